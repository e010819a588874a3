"""Ours: every head stays, its keys and values cached in the few dimensions that predictions depend on.

Relatives: Palu (2407.21118), Loki (2406.02542), Thin Keys (2603.04427).
"""

from __future__ import annotations

import logging
import math
from collections.abc import MutableMapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from pydantic import SkipValidation
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks, Source
from chai_eval.attention.low_rank import LayerRanks, LowRank, low_rank_attention
from chai_eval.attention.rope import rotations
from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import MOMENTS, Calibration, calibration
from chai_eval.errors import SettingError
from chai_eval.methods.base import Fraction, LayerFootprint, Method, Positive
from chai_eval.methods.moments import GRADIENT, KINDS, OUTPUT, PULL, QUERY, RIDGE, unpack
from chai_eval.schema import SETTINGS

# Ranks are multiples of this: heads of equal rank are multiplied at once.
RANK_STEP = 4

log = logging.getLogger("chai_eval")


@dataclass(frozen=True, config=SETTINGS)
class KVRank(Method):
    """Keys and values of every head in fewer dimensions, chosen so that predictions change least.

    With C_q the moment of what asks a head (its queries; for values the gradients of predictions) and C_k that of what
    is asked (its keys as attention weighs them; for values its outputs), the top eigenvectors U of C_q^½ C_k C_q^½ are
    kept: cached is Uᵀ C_q^½ k, which Uᵀ C_q^−½ q asks. Half the eigenvalues left out are the KL divergence, in nats per
    token, so one threshold over keys and values of all heads and layers gives each its rank
    (`calibration.moments`, docs/design.md section 4).

    Approximates: keys, but for a request's first, and values lie in a subspace of their head. Saves cache and the
    reading of it; not the projections.

    Parameters
    ----------
    saving : float
        Share of the K,V cache that is saved.
    moments : str
        The calibration that has the moments: a model's name, or a folder.
    context : int or None
        Longest text that it is made for, in tokens: rotary embeddings turn keys into more directions as texts grow
        longer. None for the longest that the model reads.
    reduce : "both", "keys" or "values"
        What is cached in fewer dimensions.
    """

    saving: Fraction = 0.14
    moments: SkipValidation[str | None] = None
    context: Positive | None = None
    reduce: Literal["both", "keys", "values"] = "both"

    name: ClassVar[str] = "kv_rank"

    def __post_init__(self) -> None:
        if not isinstance(self.moments, str):
            raise SettingError(f"method.moments: {self.moments!r} given; allowed: a calibration")
        if self.reduce != "both" and self.saving >= 0.5:
            raise SettingError(f"method.saving: {self.saving} given with reduce={self.reduce}; allowed: below 0.5")

    @cached_property
    def _calibration(self) -> Calibration:
        assert self.moments is not None
        return calibration(self.moments, "method.moments", MOMENTS)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "moments": {"sha256": self._calibration.sha256}}

    @classmethod
    def at_savings(
        cls, model: PreTrainedModel, calibrated: str, savings: Sequence[float], context: int
    ) -> Sequence[Method]:
        return [cls(saving=saving, moments=calibrated, context=context) for saving in savings]

    def hooks(self, model: PreTrainedModel) -> Hooks:
        return _LowRankHooks(self._layers(model))

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint]:
        shape = attention_shape(model)
        whole = LayerFootprint.full(shape)
        return [
            LayerFootprint(
                whole.scores, whole.outputs, whole.keys, whole.values,
                key_numbers=each.keys.numbers, value_numbers=each.values.numbers,
                first_numbers=shape.kv_heads * each.keys.head_dim,
            )
            for each in self._layers(model)
        ]  # fmt: skip

    def _layers(self, model: PreTrainedModel) -> list[LayerRanks]:
        made = _MADE.setdefault(model, {})
        name = (self, str(model.dtype), str(model.device))
        if name not in made:
            made.clear()  # maps are as large as a layer's projections: one method's are held
            made[name] = self._made(model)
        return made[name]

    def _made(self, model: PreTrainedModel) -> list[LayerRanks]:
        known = self._calibration
        known.check(model)
        scale = known.tensor("scale")
        found = {kind: unpack(known.tensor(kind), scale[at]) for at, kind in enumerate(KINDS)}
        asking, asked = _over_positions(model, found[QUERY], found[PULL], self.context)
        maps = {"keys": eigenmaps(asking, asked), "values": eigenmaps(found[GRADIENT], found[OUTPUT])}
        ranks = self._ranks({name: each.cost for name, each in maps.items()})
        like = next(model.parameters())
        return [
            LayerRanks(*(
                LowRank.of(each.down[layer], each.up[layer], ranks[name][layer].tolist(), like)
                for name, each in maps.items()
            ))
            for layer in range(len(asking))
        ]  # fmt: skip

    def _ranks(self, costs: dict[str, Tensor]) -> dict[str, Tensor]:
        numbers = sum(each.numel() for each in costs.values())
        reduced = list(costs) if self.reduce == "both" else [self.reduce]
        whole = {name: torch.full(each.shape[:2], each.shape[2]) for name, each in costs.items()}
        kept = round((1 - self.saving) * numbers) - sum(costs[name].numel() for name in costs if name not in reduced)
        return whole | dict(zip(reduced, ranks_within([costs[name] for name in reduced], kept), strict=True))


_MADE: MutableMapping[PreTrainedModel, dict[tuple[KVRank, str, str], list[LayerRanks]]] = WeakKeyDictionary()


class _LowRankHooks(Hooks):
    """Every layer's attention on the numbers that are kept."""

    by_position = True
    fixed_steps = True

    def __init__(self, layers: list[LayerRanks]) -> None:
        super().__init__()
        self.layers = layers

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        return low_rank_attention(self.layers[call.index], source, call.view, call.store)


def _over_positions(
    model: PreTrainedModel, asking: Tensor, asked: Tensor, context: int | None
) -> tuple[Tensor, Tensor]:
    """Moments of queries and keys averaged over the positions of a text of `context` tokens."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest is not None and context > longest:
        raise SettingError(f"method.context: {context} given; allowed: 1 to {longest}, the longest this model reads")
    positions = context or longest
    turns = None if positions is None else rotations(model, positions, asking.shape[-1])
    if turns is not None:
        return turns.average(asking), turns.average(asked)
    if getattr(model.config.get_text_config(), "rope_parameters", None):
        log.warning(
            "method.context: how %s rotates keys isn't known; it is made for texts as long as those of its calibration",
            model.config.model_type,
        )
    return asking, asked


class EigenMaps(NamedTuple):
    """Maps of each head to its dimensions, in the order of what leaving them out costs.

    Attributes
    ----------
    cost : Tensor [layers, heads, head_dim], float64
        In nats per token, descending.
    down, up : Tensor [layers, heads, head_dim, head_dim], float64
        A row for each dimension: x stands for `upᵀ down x` if all are kept.
    """

    cost: Tensor
    down: Tensor
    up: Tensor


def eigenmaps(asking: Tensor, asked: Tensor) -> EigenMaps:
    """The dimensions of what is asked that matter most to what asks.

    Of `asking` what is below `RIDGE` of the largest eigenvalue is noise: it is raised to that, so that no map blows up.

    Parameters
    ----------
    asking, asked : Tensor [layers, heads, head_dim, head_dim], float64
        Second moments.
    """
    size, axes = torch.linalg.eigh(asking)
    size = size.clamp(min=0) + RIDGE * size.amax(-1, keepdim=True).clamp(min=torch.finfo(size.dtype).tiny)
    half, back = ((axes * each[..., None, :]) @ axes.transpose(-1, -2) for each in (size.sqrt(), size.rsqrt()))
    cost, chosen = torch.linalg.eigh(half @ asked @ half)
    rows = chosen.flip(-1).transpose(-1, -2)
    return EigenMaps(cost.flip(-1).clamp(min=0) / 2, rows @ half, rows @ back)


def ranks_within(costs: list[Tensor], kept: int) -> list[Tensor]:
    """Ranks of all heads that leave out the least with so many numbers a token, in steps of `RANK_STEP`.

    Parameters
    ----------
    costs : list of Tensor [layers, heads, head_dim]
        Descending along the last dimension.

    Returns
    -------
    list of Tensor [layers, heads], int64
    """
    step = math.gcd(RANK_STEP, *(each.shape[-1] for each in costs))
    in_steps = [each.unflatten(-1, (-1, step)).sum(-1) for each in costs]
    order = torch.cat([each.flatten() for each in in_steps]).argsort(descending=True, stable=True)
    taken = torch.zeros(len(order), dtype=torch.int64)
    taken[order[: max(kept, 0) // step]] = step
    parts = taken.split([each.numel() for each in in_steps])
    return [part.view_as(each).sum(-1) for part, each in zip(parts, in_steps, strict=True)]
