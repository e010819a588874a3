"""Plain multi-head attention: the baseline every method is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

from chai_eval.attention import take_over
from chai_eval.attention.agreement import own_scores
from chai_eval.methods.base import Method


@dataclass(frozen=True)
class MHA(Method):
    """Nothing is clustered. Approximates nothing: an ordinary forward pass is the stock model, to the bit.

    Packed rows, which the stock model does not know, go through `scaled_dot_product_attention`.
    """

    name: ClassVar[str] = "mha"

    def settings(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[None]:
        with take_over(model, own_scores, only_rows=True):
            yield
