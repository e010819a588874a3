"""Clustered Head Attention (Agarwal et al., ICML 2024, arXiv 2403.08058)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import SkipValidation
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import Membership, Plan, ProbePlan, membership_of, probe_features, probe_probabilities
from chai_eval.attention.membership import Representative
from chai_eval.attention.probe import Features
from chai_eval.attention.regroup import Guard
from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import calibration, runs
from chai_eval.errors import SettingError
from chai_eval.methods.base import FromZero, Method, Positive, ToTwo
from chai_eval.methods.blocks import shared_out
from chai_eval.methods.clustering import Clustering
from chai_eval.methods.clusters import ClusterSpec, check_clusters, cluster_counts, counts_within, resolved
from chai_eval.schema import SETTINGS

SETTING = "method.clusters"


@dataclass(frozen=True, config=SETTINGS)
class CHAI(Clustering):
    """Heads that attend alike over a request's first tokens share one representative's attention probabilities.

    Approximates: from token `probe_tokens` on, a head's probabilities are those of its cluster's representative; its
    values stay its own. Saves the queries and keys of all other members, and their cache.

    Parameters
    ----------
    clusters : list of int, run-length list of [count, layers], or preset name
        Clusters that each layer keeps; the number of heads leaves the layer as it is.
    probe_tokens : int
        First tokens of a request, run as plain attention to find its membership; 5 in the paper.
    features : "triangle" or "full"
        What heads are compared by: the causal probabilities, or the published code's unmasked block.
    linkage : "average"
    representative : "first" or "medoid"
        Lowest head of the cluster (the published code), or the member closest to all others.
    prefill : "auto", "two_step" or "one_pass"
        Whether the tokens after the probe are projected for representatives only. Scores are the same up to rounding.
    recluster_every : int
        Tokens after which heads that have drifted from their representative change over to another; 0 for never.
    drift_threshold : float
        Cosine distance from its representative, over the last `probe_tokens` tokens, above which a head does so.
    tensor_parallel : int or None
        Devices that heads are split over: clusters are found within the heads of each, whose counts are its share of
        the layer's (`blocks.shared_out`). None for as many as the model is split over.
    """

    clusters: SkipValidation[ClusterSpec | None] = None
    probe_tokens: Positive = 5
    features: Features = "triangle"
    linkage: Literal["average"] = "average"
    representative: Representative = "first"
    recluster_every: FromZero = 0
    drift_threshold: ToTwo = 0.0

    name: ClassVar[str] = "chai"

    def __post_init__(self) -> None:
        check_clusters(self.clusters)
        least = 2 * self.probe_tokens
        if 0 < self.recluster_every < least:
            raise SettingError(
                f"method.recluster_every: {self.recluster_every} given with probe_tokens={self.probe_tokens}; allowed: "
                f"0, or {least} and more"
            )

    @property
    def shared_context(self) -> int:
        return self.probe_tokens

    def settings(self) -> dict[str, Any]:
        found = {**super().settings(), "clusters": resolved(self.clusters)}
        if not self.recluster_every:
            del found["recluster_every"], found["drift_threshold"]
        return found

    def block_plans(self, model: PreTrainedModel, heads: Sequence[int]) -> list[list[Plan | None]]:
        if self.recluster_every and len(heads) > 1:
            given = f"{self.recluster_every} given with tensor_parallel={len(heads)}"
            raise SettingError(f"method.recluster_every: {given}; allowed: 0")
        of_layers = [
            shared_out(clusters, heads, layer) for layer, clusters in enumerate(cluster_counts(self.clusters, model))
        ]
        return [
            [self._plan(count) if count < own else None for count, own in zip(counts, heads, strict=True)]
            for counts in of_layers
        ]

    @classmethod
    def at_savings(
        cls, model: PreTrainedModel, calibrated: str, savings: Sequence[float], context: int
    ) -> Sequence[Method]:
        known, kv_heads = calibration(calibrated, SETTING), attention_shape(model).kv_heads
        known.check(model)
        kept, found = known.tensor("kept_kv_heads"), []
        for saving in savings:
            of_keys = saving / 2 if cls.share_value else saving  # values are then saved as keys are
            counts = counts_within(known, "predicted_divergence", kept, kv_heads, of_keys)
            found += [cls(clusters=runs(counts))] if counts else []
        return found

    def _plan(self, clusters: int) -> Plan:
        def cluster(query: Tensor, key: Tensor, scaling: float) -> Membership:
            seen = probe_probabilities(query, key, scaling, self.features)
            return membership_of(probe_features(seen, self.features), clusters, self.representative)

        guard = Guard(self.recluster_every, self.probe_tokens, self.drift_threshold) if self.recluster_every else None
        return ProbePlan(
            clusters=clusters,
            share_value=self.share_value,
            probe_tokens=self.probe_tokens,
            cluster=cluster,
            guard=guard,
        )
