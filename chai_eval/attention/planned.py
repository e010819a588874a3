"""Put clustered attention into a model: the general path for every architecture, narrow projections where they go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.inject import take_over
from chai_eval.attention.narrow import Prefill, narrowed
from chai_eval.attention.passes import ForwardPass, Layer, Takeover
from chai_eval.attention.probed import Plan, attend_planned


@contextmanager
def clustered(
    model: PreTrainedModel, plans: dict[int, Plan], prefill: Prefill = "auto", *, made_by: str = ""
) -> Iterator[Takeover]:
    """Let clustered attention compute the attention of `model` while the context lasts.

    Parameters
    ----------
    model : PreTrainedModel
    plans : dict of int to Plan
        By layer number; layers without a plan keep every head.
    prefill : "auto", "two_step" or "one_pass"
        Whether the tokens after the probe are projected for representatives only, in a second step; "auto" does so
        where it pays. Results are the same up to rounding.
    made_by : str
        See `take_over`.
    """

    def attend(layer: Layer, query: Tensor, key: Tensor, value: Tensor, run: ForwardPass) -> Tensor:
        return attend_planned(plans.get(layer.index), layer, query, key, value, run)

    probe = max((plan.probe_tokens for plan in plans.values()), default=0)
    with (
        take_over(model, attend, stores=True, made_by=made_by, probe_tokens=probe) as handle,
        narrowed(model, plans, handle, prefill),
    ):
        yield handle
