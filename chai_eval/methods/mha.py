"""Plain multi-head attention: the baseline every method is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel

from chai_eval.attention import Takeover, take_over
from chai_eval.attention.agreement import own_scores
from chai_eval.methods.base import LayerFootprint, Method, plain_footprint
from chai_eval.schema import SETTINGS


@dataclass(frozen=True, config=SETTINGS)
class MHA(Method):
    """Nothing is clustered. Approximates nothing: an ordinary forward pass is the stock model, to the bit.

    Packed rows, which the stock model does not know, go through `scaled_dot_product_attention`.
    """

    name: ClassVar[str] = "mha"
    by_device: ClassVar[bool] = True

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint]:
        return plain_footprint(model)

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[Takeover]:
        with take_over(model, own_scores, only_rows=True) as handle:
            yield handle
