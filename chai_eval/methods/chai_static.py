"""CHAI with a membership that calibration fixed once for all requests (the paper's CHAI-static)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel

from chai_eval.attention.membership import partitions
from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import Calibration, calibration
from chai_eval.methods.base import Method
from chai_eval.methods.clusters import counts_within
from chai_eval.methods.fixed import SETTING, FixedMembership
from chai_eval.schema import SETTINGS


@dataclass(frozen=True, config=SETTINGS)
class CHAIStatic(FixedMembership):
    """Heads that attended alike over calibration text share one representative's probabilities, in every request.

    Approximates: every head's probabilities, from the first token on, are those of its cluster's representative; its
    values stay its own. Saves what `chai` saves, and the probe as well.

    Parameters
    ----------
    membership : str, or per layer a list with a cluster label for each head
        A calibration (a model's name, or a folder), or labels: heads with equal labels form a cluster.
    preset : "conservative", "balanced" or "aggressive"
        Which of the calibration's memberships.
    representative : "first"
        The lowest head of the cluster.
    tensor_parallel : int or None
        Devices that heads are split over: a calibration's heads are clustered anew within those of each, by the same
        distances, with its share of the clusters. None for as many as the model is split over.
    """

    representative: Literal["first"] = "first"

    name: ClassVar[str] = "chai_static"
    tensor: ClassVar[str] = "static_membership"
    entries: ClassVar[str] = "cluster labels"

    @classmethod
    def at_savings(
        cls, model: PreTrainedModel, calibrated: str, savings: Sequence[float], context: int
    ) -> Sequence[Method]:
        known, kv_heads = calibration(calibrated, SETTING), attention_shape(model).kv_heads
        known.check(model)
        of_count, found = partitions(known.tensor("distance.probe").double()), []
        for saving in savings:
            counts = counts_within(known, "predicted_divergence", known.tensor("kept_kv_heads"), kv_heads, saving)
            if counts:
                found.append(cls(membership=[of_count[at, count - 1].tolist() for at, count in enumerate(counts)]))
        return found

    def _serving(self, layer: int, entries: list[int]) -> list[int]:
        return [entries.index(label) for label in entries]

    def _calibrated(self, known: Calibration, block: slice, counts: Sequence[int]) -> list[list[int]]:
        features = known.description["provenance"]["settings"]["features"]
        of_count = partitions(known.tensor(f"distance.{features}").double()[:, block, block])
        return [of_count[layer, count - 1].tolist() for layer, count in enumerate(counts)]
