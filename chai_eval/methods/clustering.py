"""What all methods that cluster heads share: a plan for each layer, and what it saves."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel

from chai_eval.attention import FixedPlan, Hooks, Plan, Prefill, SharedHeads
from chai_eval.attention.shape import AttentionShape, attention_shape
from chai_eval.methods.base import LayerFootprint, Method
from chai_eval.schema import SETTINGS


@dataclass(frozen=True, config=SETTINGS)
class Clustering(Method):
    """A method in which representatives stand in for their clusters.

    Parameters
    ----------
    prefill : "auto", "two_step" or "one_pass"
        Whether the tokens after the probe are projected for representatives only. Scores are the same up to rounding.
    """

    prefill: Prefill = "auto"

    share_value: ClassVar[bool] = False

    @abstractmethod
    def plans(self, model: PreTrainedModel) -> dict[int, Plan]:
        """The plan of each layer that is clustered, by layer number.

        Raises
        ------
        SettingError
            Where the settings do not fit the model.
        """

    def hooks(self, model: PreTrainedModel) -> Hooks:
        return Hooks(self.plans(model), self.prefill)

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint]:
        shape, plans = attention_shape(model), self.plans(model)
        return [layer_footprint(shape, plans.get(layer)) for layer in range(shape.layers)]


def layer_footprint(shape: AttentionShape, plan: Plan | None) -> LayerFootprint:
    """What a layer computes and caches whose heads share scores as a plan says."""
    if plan is None:
        return LayerFootprint.full(shape)
    keys = min(plan.clusters, shape.kv_heads)
    if isinstance(plan, FixedPlan):  # which key heads its representatives read is known beforehand
        keys = SharedHeads.of(plan.membership, shape.kv_heads).key_heads.shape[1]
    outputs, values = (plan.clusters, keys) if plan.share_value else (shape.heads, shape.kv_heads)
    besides = 0 if plan.guard is None else plan.guard.numbers(shape, plan.probe_tokens)
    return LayerFootprint(plan.clusters, outputs, keys, values, plan.probe_tokens, first_numbers=besides)
