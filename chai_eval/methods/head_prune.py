"""Heads removed for good: the structured pruning that sharing is compared with (Michel et al., 2019, 1905.10650)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from pydantic import SkipValidation
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks, Source, full_attention, stored
from chai_eval.attention.probe import repeat_heads
from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import Calibration, calibration
from chai_eval.errors import SettingError
from chai_eval.methods.base import Fraction, Method
from chai_eval.methods.fixed import check_per_head
from chai_eval.methods.keep import highest, kept_count
from chai_eval.schema import SETTINGS


@dataclass(frozen=True, config=SETTINGS)
class HeadPrune(Method):
    """The heads that mattered least over calibration text are removed from the whole model, for every token.

    Approximates: a removed head's output is zero. Saves everything that a removed head computes, and its cache where
    no other head reads the same keys and values.

    Parameters
    ----------
    sparsity : float
        Fraction of all heads of the model that is removed, lowest importance first: ⌈(1 − s) L H⌉ stay (among ties
        the lowest layer, then the lowest head).
    importance : str or None
        The calibration that has the importance of each head: a model's name, or a folder.
    pruned : per layer a list of heads, or None
        Heads to remove, in place of `sparsity` and `importance`.
    """

    sparsity: Fraction = 0.25
    importance: SkipValidation[str | None] = None
    pruned: SkipValidation[Sequence[Sequence[int]] | None] = None

    name: ClassVar[str] = "head_prune"

    def __post_init__(self) -> None:
        if self.pruned is not None:
            check_per_head("method.pruned", self.pruned, "heads to remove")
        elif not isinstance(self.importance, str):
            raise SettingError(
                f"method.importance: {self.importance!r} given; allowed: a calibration (or heads per layer in "
                "method.pruned)"
            )
        else:
            assert self._calibration is not None

    @cached_property
    def _calibration(self) -> Calibration | None:
        if self.pruned is not None or self.importance is None:
            return None
        return calibration(self.importance, "method.importance")

    def settings(self) -> dict[str, Any]:
        if self._calibration is not None:
            return {"sparsity": self.sparsity, "importance": {"sha256": self._calibration.sha256}}
        return {"pruned": [sorted({*heads}) for heads in self.pruned or ()]}

    def hooks(self, model: PreTrainedModel) -> Hooks:
        return _PrunedHeads(self._kept(model))

    def _kept(self, model: PreTrainedModel) -> list[list[int]]:
        """The heads that stay, for each layer."""
        shape = attention_shape(model)
        if self._calibration is not None:
            self._calibration.check(model)
            importance = self._calibration.tensor("head_importance")
            stay = highest(importance.flatten(), kept_count(importance.numel(), self.sparsity)).view_as(importance)
            return [layer.nonzero()[:, 0].tolist() for layer in stay]
        pruned = self.pruned or ()
        if len(pruned) != shape.layers:
            raise SettingError(
                f"method.pruned: {len(pruned)} layers given for a model of {shape.layers} layers; allowed: one list "
                "per layer"
            )
        for layer, heads in enumerate(pruned):
            if heads and max(heads) >= shape.heads:
                raise SettingError(
                    f"method.pruned: head {max(heads)} given for layer {layer}; allowed: 0 to {shape.heads - 1}"
                )
        return [[head for head in range(shape.heads) if head not in heads] for heads in pruned]


class _PrunedHeads(Hooks):
    """Removed heads put out zero, and nothing is computed for them."""

    def __init__(self, kept: list[list[int]]) -> None:
        super().__init__()
        self.kept = kept

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        query = source.query()
        heads, stay = query.shape[1], self.kept[call.index]
        if len(stay) == heads:
            return None
        key, value = stored(call.store, source.key(), source.value(), call.rows)
        out = value.new_zeros(*query.shape[:3], value.shape[-1])
        if stay:
            own_key, own_value = repeat_heads(key, heads)[:, stay], repeat_heads(value, heads)[:, stay]
            out[:, stay] = full_attention(query[:, stay], own_key, own_value, call.view)
        return out
