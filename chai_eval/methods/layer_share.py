"""Layers that take the attention probabilities of the layer before (Liao and Vargas, 2024, arXiv 2407.12866)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from pydantic import SkipValidation
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks, Source, View, stored
from chai_eval.attention.kernels.prefill import probability_blocks
from chai_eval.attention.probe import repeat_heads
from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import MOMENTS, Calibration, calibration
from chai_eval.errors import SettingError
from chai_eval.methods.base import FromZero, LayerFootprint, Method
from chai_eval.methods.moments import LAYER_SHARE
from chai_eval.schema import SETTINGS

PROBABILITIES = "layer_share_probabilities"


@dataclass(frozen=True, config=SETTINGS)
class LayerShare(Method):
    """Some layers weigh their values by the probabilities of the layer before, head by head; untrained.

    In a run of such layers all have the probabilities of the layer before the run, whatever windows they have.

    Approximates: a taking layer's probabilities are those of the heads with the same numbers in the layer before.
    Saves the queries and keys of taking layers: their projections, products and cache.

    Parameters
    ----------
    count : int
        Layers that take: those for which calibration foretells the least divergence when each takes alone (among ties
        the lowest).
    costs : str or None
        The calibration that has these divergences: a model's name, or a folder.
    layers : list of int, or None
        The layers that take, in place of `count` and `costs`; the first, 0, has none before it.
    """

    count: FromZero = 8
    costs: SkipValidation[str | None] = None
    layers: SkipValidation[Sequence[int] | None] = None

    name: ClassVar[str] = "layer_share"

    def __post_init__(self) -> None:
        if self.layers is not None:
            numbers = isinstance(self.layers, Sequence) and all(type(each) is int for each in self.layers)
            if not numbers or min(self.layers, default=1) < 1:
                raise SettingError(f"method.layers: {self.layers!r} given; allowed: numbers of layers from 1")
        elif not isinstance(self.costs, str):
            raise SettingError(
                f"method.costs: {self.costs!r} given; allowed: a calibration (or layers in method.layers)"
            )

    @classmethod
    def at_savings(
        cls, model: PreTrainedModel, calibrated: str, savings: Sequence[float], context: int
    ) -> Sequence[Method]:
        layers = attention_shape(model).layers
        counts = [round(2 * saving * layers) for saving in savings]  # each saves half a layer's cache
        return [cls(count=count, costs=calibrated) for count in counts if 0 < count < layers]

    @cached_property
    def _calibration(self) -> Calibration:
        assert self.costs is not None
        return calibration(self.costs, "method.costs", MOMENTS)

    def settings(self) -> dict[str, Any]:
        if self.layers is not None:
            return {"layers": sorted({*self.layers})}
        return {"count": self.count, "costs": {"sha256": self._calibration.sha256}}

    def hooks(self, model: PreTrainedModel) -> Hooks:
        return _SharedProbabilities(self._takers(model))

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint]:
        shape, takers = attention_shape(model), self._takers(model)
        whole, taking = LayerFootprint.full(shape), LayerFootprint(0, shape.heads, 0, shape.kv_heads)
        return [taking if layer in takers else whole for layer in range(shape.layers)]

    def _takers(self, model: PreTrainedModel) -> frozenset[int]:
        last = attention_shape(model).layers - 1
        if self.layers is not None:
            if max(self.layers, default=0) > last:
                raise SettingError(f"method.layers: layer {max(self.layers)} given; allowed: 1 to {last}")
            return frozenset(self.layers)
        if self.count > last:
            raise SettingError(f"method.count: {self.count} given; allowed: 0 to {last}")
        self._calibration.check(model)
        order = self._calibration.tensor(LAYER_SHARE)[1:].argsort(stable=True) + 1
        return frozenset(order[: self.count].tolist())


class _SharedProbabilities(Hooks):
    """Layers before a taker leave their probabilities, which it weighs its values by."""

    def __init__(self, takers: frozenset[int]) -> None:
        super().__init__()
        self.takers = self.narrow = takers

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        takes, gives = call.index in self.takers, call.index + 1 in self.takers
        if not takes and not gives:
            return None
        carried, value = call.forward.carried, source.value()
        key = value[:, :0].clone() if takes else source.key()  # a copy of nothing, which keeps no keys alive
        key, value = stored(call.store, key, value, call.rows)
        if not takes:
            carried[PROBABILITIES] = _probabilities(source.query(), key, call.view)
        given = carried[PROBABILITIES] if gives else carried.pop(PROBABILITIES)
        return torch.matmul(given.to(value), repeat_heads(value, given.shape[1]))


def _probabilities(query: Tensor, key: Tensor, view: View) -> Tensor:
    """What each query gives to each key: `[rows, heads, length, keys]`, in their precision."""
    out = query.new_empty(*query.shape[:3], key.shape[2])
    for block, probabilities in probability_blocks(query, key, view):
        out[:, :, block] = probabilities
    return out
