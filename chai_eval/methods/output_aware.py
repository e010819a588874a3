"""Beyond the paper: representatives chosen by what serving another head costs the layer's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import Membership, Plan, ProbePlan, probe_features, probe_probabilities
from chai_eval.attention.linkage import TIE
from chai_eval.attention.membership import cosine_distance
from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import Calibration, calibration
from chai_eval.errors import SettingError
from chai_eval.methods.base import Method, Positive
from chai_eval.methods.clusters import counts_within
from chai_eval.methods.fixed import SETTING, FixedMembership, membership_by_representative
from chai_eval.schema import SETTINGS, Flag


@dataclass(frozen=True, config=SETTINGS)
class OutputAware(FixedMembership):
    """A head is served by the representative whose probabilities cost the layer's output least.

    The cost of serving head i by head r is c(i→r) = E over tokens of ‖(A_i − A_r) V_i W_O,i‖², W_O,i being head i's
    slice of the output projection; calibration chooses representatives by k-medoids on it.

    Approximates: a head's probabilities are those of its representative, its values stay its own. Saves what
    `chai_static` saves; with `adaptive` what `chai` saves.

    Parameters
    ----------
    membership : str, or per layer a list with each head's representative
        A calibration (a model's name, or a folder), or heads: a representative represents itself.
    preset : "conservative", "balanced" or "aggressive"
        Which of the calibration's memberships.
    adaptive : bool
        Keep the representatives only: from token `probe_tokens` on, every other head is served by the one whose
        probabilities over the request's first tokens are nearest to its own (cosine; the lowest head among ties).
    probe_tokens : int
        First tokens of a request, run as plain attention; with `adaptive`.
    tensor_parallel : int or None
        Devices that heads are split over: representatives are chosen anew among those of each, by the calibration's
        costs, with its share of the clusters. None for as many as the model is split over.
    """

    adaptive: Flag = False
    probe_tokens: Positive = 5

    name: ClassVar[str] = "output_aware"
    tensor: ClassVar[str] = "output_aware"
    entries: ClassVar[str] = "representative heads"

    @property
    def shared_context(self) -> int:
        return self.probe_tokens if self.adaptive else 1

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        if not self.adaptive:
            del found["probe_tokens"]
        return found

    def _plan(self, membership: Membership) -> Plan:
        if not self.adaptive:
            return super()._plan(membership)
        representatives = membership.representative[0]

        def cluster(query: Tensor, key: Tensor, scaling: float) -> Membership:
            features = probe_features(probe_probabilities(query, key, scaling))
            return nearest_representative(features, representatives.to(features.device))

        return ProbePlan(clusters=len(representatives), probe_tokens=self.probe_tokens, cluster=cluster)

    @classmethod
    def at_savings(
        cls, model: PreTrainedModel, calibrated: str, savings: Sequence[float], context: int
    ) -> Sequence[Method]:
        from chai_eval.calibration.medoids import kept_by, representatives

        known, shape = calibration(calibrated, SETTING), attention_shape(model)
        known.check(model)
        heads, kv_heads, cost = shape.heads, shape.kv_heads, known.tensor("output_cost").double()
        fewest = torch.tensor([kept_by(count, heads, kv_heads) for count in range(1, heads + 1)])
        found = []
        for saving in savings:
            kept = fewest.expand(shape.layers, -1)
            counts = counts_within(known, "predicted_divergence.output_aware", kept, kv_heads, saving)
            if counts:
                serving = [
                    representatives(layer, count, kv_heads, kept_by(count, heads, kv_heads)).tolist()
                    for layer, count in zip(cost, counts, strict=True)
                ]
                found.append(cls(membership=serving))
        return found

    def _calibrated(self, known: Calibration, block: slice, counts: Sequence[int]) -> list[list[int]]:
        from chai_eval.calibration.medoids import kept_by, representatives

        cost, of_model = known.tensor("output_cost").double(), known.description["model"]
        own = cost[:, block, block]
        heads, kv_heads = own.shape[1], own.shape[1] * of_model["kv_heads"] // of_model["heads"]
        return [
            representatives(layer, count, kv_heads, kept_by(count, heads, kv_heads)).tolist()
            for layer, count in zip(own, counts, strict=True)
        ]

    def _serving(self, layer: int, entries: list[int]) -> list[int]:
        for head, by in enumerate(entries):
            if by >= len(entries):
                raise SettingError(
                    f"{SETTING}: head {by} given for head {head} of layer {layer}; allowed: 0 to {len(entries) - 1}"
                )
            if entries[by] != by:
                raise SettingError(
                    f"{SETTING}: head {by} given for head {head} of layer {layer}, and for head {by} head "
                    f"{entries[by]}; allowed: representatives that represent themselves"
                )
        return entries


def nearest_representative(features: Tensor, representatives: Tensor) -> Membership:
    """Assign every head to the representative with the nearest features.

    Parameters
    ----------
    features : Tensor [rows, heads, n]
    representatives : Tensor [clusters], int64
        Heads that stay representatives, of themselves at least.
    """
    ordered = representatives.sort().values
    distance = cosine_distance(features)[:, :, ordered]  # [rows, heads, clusters]
    nearest = (distance <= distance.amin(-1, keepdim=True) + TIE).to(torch.uint8).argmax(-1)
    serving = ordered[nearest]
    serving[:, ordered] = ordered
    return membership_by_representative(serving)
