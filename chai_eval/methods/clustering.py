"""What all methods that cluster heads share: a plan for each layer, and what it saves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel

from chai_eval.attention import FixedPlan, Hooks, Plan, Prefill, SharedHeads, shard, side_by_side
from chai_eval.attention.shape import AttentionShape, attention_shape
from chai_eval.methods.base import LayerFootprint, Method, Positive
from chai_eval.methods.blocks import head_blocks
from chai_eval.schema import SETTINGS


@dataclass(frozen=True, config=SETTINGS)
class Clustering(Method):
    """A method in which representatives stand in for their clusters.

    Parameters
    ----------
    prefill : "auto", "two_step" or "one_pass"
        Whether the tokens after the probe are projected for representatives only. Scores are the same up to rounding.
    tensor_parallel : int or None
        Devices that heads are split over: clusters are found within the heads of each. None for as many as the model
        is split over.
    """

    prefill: Prefill = "auto"
    tensor_parallel: Positive | None = None

    share_value: ClassVar[bool] = False
    by_device: ClassVar[bool] = True

    @abstractmethod
    def block_plans(self, model: PreTrainedModel, heads: Sequence[int]) -> list[list[Plan | None]]:
        """For each layer the plan of each block of so many neighbouring `heads`, None where it is left as it is.

        Raises
        ------
        SettingError
            Where the settings do not fit the model.
        """

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        if self.tensor_parallel in (None, 1):
            del found["tensor_parallel"]
        return found

    def for_model(self, model: PreTrainedModel) -> Method:
        return replace(self, tensor_parallel=self.tensor_parallel or shard(model).size)

    def plans(self, model: PreTrainedModel) -> dict[int, Plan]:
        """The plan of each layer that is clustered, by layer number; of the heads that are here of a model split up.

        Raises
        ------
        SettingError
            Where the settings do not fit the model.
        """
        heads, part = head_blocks(model, self.tensor_parallel), shard(model)
        of_layers = [
            each[part.rank] if part.size > 1 else side_by_side(each, heads) for each in self.block_plans(model, heads)
        ]
        return {layer: plan for layer, plan in enumerate(of_layers) if plan is not None}

    def hooks(self, model: PreTrainedModel) -> Hooks:
        return Hooks(self.plans(model), self.prefill)

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint]:
        shape, heads = attention_shape(model), head_blocks(model, self.tensor_parallel)
        shapes = [replace(shape, heads=own, kv_heads=own * shape.kv_heads // shape.heads) for own in heads]
        return [
            LayerFootprint.side_by_side(list(map(layer_footprint, shapes, of_layer)))
            for of_layer in self.block_plans(model, heads)
        ]


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
