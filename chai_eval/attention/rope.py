"""Rotary embeddings that depend on the longest text of a pass, so that a request's numbers would depend on its batch.

`longrope` takes other factors, `dynamic` another base, once a position of the pass lies beyond the original length
(`transformers.modeling_rope_utils`); `dynamic` also goes on with the largest base it has had.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_layers

# Types whose angles depend on a token's own position only.
BY_POSITION = frozenset({"default", "linear", "yarn", "llama3", "proportional"})


@dataclass(frozen=True)
class RotaryLengths:
    """Which lengths of requests a model's rotary embeddings treat alike.

    `embeddings` are those that look at a whole pass, with the layer type where a module has an embedding for each.
    """

    embeddings: tuple[tuple[nn.Module, str | None], ...]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.embeddings)

    def alike(self, length: int) -> Hashable:
        """Requests whose lengths, in tokens, give the same here may share a pass."""
        return tuple(_alike(module, layer_type, length) for module, layer_type in self.embeddings)

    def forget(self) -> None:
        """Let embeddings forget the passes before, so that the next one is treated as the first."""
        for module, layer_type in self.embeddings:
            if "dynamic" in _type(module, layer_type):
                _forget(module, "" if layer_type is None else f"{layer_type}_")


def rotary_lengths(model: nn.Module) -> RotaryLengths:
    """Find the rotary embeddings of a model that look at a whole pass."""
    found: list[tuple[nn.Module, str | None]] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = {None: kinds} if isinstance(kinds, str) else kinds
        if isinstance(named, dict):
            found += [(module, layer_type) for layer_type, kind in named.items() if kind not in BY_POSITION]
    return RotaryLengths(tuple(found))


@dataclass(frozen=True)
class Rotations:
    """The rotations that positions 0 to n - 1 put on queries and keys: x becomes cos ∘ x + sin ∘ (turn x).

    Cosine and sine, `[positions, head_dim]`, are without the factor by which some types scale both; the turn,
    `[head_dim, head_dim]`, is by a right angle, and zero for dimensions that are not rotated, whose cos is 1. All
    float64.
    """

    cos: Tensor
    sin: Tensor
    turn: Tensor

    def average(self, moments: Tensor) -> Tensor:
        """Second moments `[..., head_dim, head_dim]` averaged over all positions: the mean of R C Rᵀ."""
        turned = self.turn @ moments
        pairs = ((self.cos, self.cos), (self.cos, self.sin), (self.sin, self.sin))
        cos_cos, cos_sin, sin_sin = (a.T @ b / len(a) for a, b in pairs)
        return moments * cos_cos + turned @ self.turn.T * sin_sin + turned * cos_sin.T + moments @ self.turn.T * cos_sin


@torch.no_grad()
def rotations(model: PreTrainedModel, positions: int, head_dim: int) -> Rotations | None:
    """What a model's own code does to queries and keys at each position; None where it rotates none, or otherwise.

    Embeddings that depend on the longest text of a pass are those of a text of so many `positions`.
    """
    embedding = next((each for each in model.modules() if isinstance(getattr(each, "rope_type", None), str)), None)
    of_layer = attention_layers(model)[0]
    rotate = getattr(sys.modules[type(of_layer).__module__], "apply_rotary_pos_emb", None)
    if embedding is None or rotate is None:
        return None
    device = next(embedding.buffers()).device
    here = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
    try:
        cos, sin = embedding(here, torch.arange(positions, device=device)[None])
        scale = (cos[:, :1, :1].square() + sin[:, :1, :1].square()).sqrt()
        cos, sin = (each.double().cpu() / scale.double().cpu() for each in (cos, sin))

        def rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
            return rotate(states.double(), states.double(), cosine, sine)[0]

        ones, unit = torch.ones(1, 1, positions, head_dim), torch.eye(head_dim)[None, None]
        zero, one = torch.zeros_like(cos), torch.ones_like(cos)
        still = rotated(ones, zero, zero)[0, 0]  # 1 in dimensions that are passed on as they are
        first = (each[:, :1].expand(-1, head_dim, -1) for each in (zero, one))
        turn = (rotated(unit, *first)[0, 0] - torch.diag(still[0])).T
        found = Rotations(rotated(ones, cos, zero)[0, 0], (rotated(ones, zero, sin)[0, 0] - still) * turn.sum(1), turn)
        states = torch.randn(1, 1, positions, head_dim, generator=torch.Generator().manual_seed(0)).double()
        ours = states * found.cos + states @ turn.T * found.sin
        same = torch.allclose(rotated(states, cos, sin), ours, atol=1e-5)
    except (TypeError, ValueError, RuntimeError, IndexError):  # code of another shape
        return None
    finally:
        rotary_lengths(model).forget()
    return found if same else None


def _type(module: nn.Module, layer_type: str | None) -> str:
    kinds: Any = module.rope_type
    return str(kinds if layer_type is None else kinds[layer_type])


def _alike(module: Any, layer_type: str | None, length: int) -> Hashable:
    kind = _type(module, layer_type)
    if kind == "longrope":
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        return length > parameters["original_max_position_embeddings"]
    # Up to the original length a dynamic base is the original one; beyond, each length has its own. Nor is more known
    # of a type that came after this was written.
    original = module.original_max_seq_len if "dynamic" in kind else 0
    return max(length, original)


def _forget(module: Any, prefix: str) -> None:
    original = getattr(module, f"{prefix}original_inv_freq")
    current = getattr(module, f"{prefix}inv_freq")
    setattr(module, f"{prefix}inv_freq", original.to(current.device, copy=True))
    name = f"{prefix}max_seq_len_cached"
    if hasattr(module, name):
        setattr(module, name, module.original_max_seq_len)
