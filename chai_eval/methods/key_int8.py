"""Keys cached as whole numbers of 8 or 4 bits: what rounding costs, with every head and dimension kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks, Source, full_attention, stored
from chai_eval.attention.quantised import key_size, quantise, restore
from chai_eval.attention.shape import attention_shape
from chai_eval.methods.base import LayerFootprint, Method, plain_footprint
from chai_eval.schema import SETTINGS

# As they are.
WHOLE = 16


@dataclass(frozen=True, config=SETTINGS)
class KeyInt8(Method):
    """Keys are rounded to multiples of a scale of their own, symmetric about zero, for each token and key head.

    Round-to-nearest, the baseline that KIVI (Liu et al. 2024, arXiv 2402.02750, section 3.1) and others start from.

    Approximates: keys, after their rotary embedding. Saves the cache and the reading of it; the scales, in float16, are
    counted. Products are not in whole numbers here: keys are restored before they meet queries, in every pass. Which
    way a number at a half goes may depend on how the model's own sums were rounded.

    Parameters
    ----------
    bits : 8, 4 or 16
        Of each number; 16 leaves keys as they are.
    """

    bits: Literal[8, 4, 16] = 8

    name: ClassVar[str] = "key_int8"

    @classmethod
    def at_savings(
        cls, model: PreTrainedModel, calibrated: str, savings: Sequence[float], context: int
    ) -> Sequence[Method]:
        return [cls(bits=8), cls(bits=4)]

    def hooks(self, model: PreTrainedModel) -> Hooks:
        return Hooks() if self.bits == WHOLE else _RoundedKeys(self.bits)

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint]:
        layers, shape = plain_footprint(model), attention_shape(model)
        if self.bits == WHOLE:
            return layers
        nbytes = shape.kv_heads * key_size(shape.head_dim, self.bits)
        return [replace(each, key_bytes=nbytes) for each in layers]


class _RoundedKeys(Hooks):
    """Attention on keys that the cache holds in a few bits."""

    by_position = True

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        query = source.query()
        packed, value = stored(call.store, quantise(source.key(), self.bits), source.value(), call.rows)
        key = restore(packed, query.shape[-1], self.bits, query.dtype)
        return full_attention(query, key, value, call.view)
