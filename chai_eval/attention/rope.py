"""Rotary embeddings that depend on the longest text of a pass, so that a request's numbers would depend on its batch.

`longrope` takes other factors, `dynamic` another base, once a position of the pass lies beyond the original length
(`transformers.modeling_rope_utils`); `dynamic` also goes on with the largest base it has had.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn

# Types whose angles depend on a token's own position only.
BY_POSITION = frozenset({"default", "linear", "yarn", "llama3", "proportional"})


@dataclass(frozen=True)
class RotaryLengths:
    """Which lengths of requests a model's rotary embeddings treat alike.

    Attributes
    ----------
    embeddings : tuple of (module, str or None)
        Those that look at a whole pass, with the layer type where a module has an embedding for each.
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
