"""Clustered Head Attention (Agarwal et al., ICML 2024, arXiv 2403.08058)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import (
    ForwardPass,
    Layer,
    Membership,
    attend_after_probe,
    attend_full,
    membership_of,
    probe_features,
    probe_probabilities,
    take_over,
)
from chai_eval.attention.membership import Representative
from chai_eval.attention.probe import Features
from chai_eval.methods.base import Method
from chai_eval.methods.checks import one_of, positive
from chai_eval.methods.clusters import ClusterSpec, check_clusters, cluster_counts, resolved


@dataclass(frozen=True)
class CHAI(Method):
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
    """

    clusters: ClusterSpec | None = None
    probe_tokens: int = 5
    features: Features = "triangle"
    linkage: str = "average"
    representative: Representative = "first"

    name: ClassVar[str] = "chai"
    share_value: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_clusters(self.clusters)
        positive("method.probe_tokens", self.probe_tokens)
        one_of("method.features", self.features, ("triangle", "full"))
        one_of("method.linkage", self.linkage, ("average",))
        one_of("method.representative", self.representative, ("first", "medoid"))

    @property
    def shared_context(self) -> int:
        return self.probe_tokens

    def settings(self) -> dict[str, Any]:
        return {
            "clusters": resolved(self.clusters),
            "probe_tokens": self.probe_tokens,
            "features": self.features,
            "linkage": self.linkage,
            "representative": self.representative,
        }

    def check(self, model: PreTrainedModel) -> None:
        cluster_counts(self.clusters, model)
        super().check(model)

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[None]:
        with take_over(model, partial(self._attend, cluster_counts(self.clusters, model)), stores=True):
            yield

    def _attend(
        self,
        counts: tuple[int, ...],
        layer: Layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        run: ForwardPass,
    ) -> Tensor:
        clusters = counts[layer.index]
        if clusters == query.shape[1]:
            return attend_full(layer, query, key, value, run)

        def choose(probe_query: Tensor, probe_key: Tensor) -> Membership:
            seen = probe_probabilities(probe_query, probe_key, layer.scaling, self.features)
            return membership_of(probe_features(seen, self.features), clusters, self.representative)

        return attend_after_probe(
            layer, query, key, value, run, self.probe_tokens, choose, share_value=self.share_value
        )
