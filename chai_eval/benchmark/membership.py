"""Membership of many requests at once against scipy's `cdist` and scikit-learn's clustering, request by request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from chai_eval.attention import membership_of, probe_features, probe_probabilities
from chai_eval.benchmark.records import Row, finish, numbers, parser, positive, progress
from chai_eval.measure.clock import seconds_in_turn
from chai_eval.measure.statistics import ratio

HEAD_DIM, PROBE = 128, 5
# Heads and clusters of LLaMA-7B's deeper layers by the published counts, and of the default model.
SHAPES = ("32:4", "9:3")
# A turn is the membership of several layers, as in a pass through a model.
LAYERS = 8


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Time both, print the table, write the record."""
    options = parser("membership", __doc__, repetitions=9)
    options.add_argument("--requests", type=numbers, default=[1, 16, 64, 256])
    options.add_argument("--shapes", nargs="+", default=list(SHAPES), help="heads:clusters of a layer")
    arguments = options.parse_args(given)
    device, done, rows = torch.device(arguments.device), progress("membership", arguments), []
    for shape in arguments.shapes:
        heads, clusters = (positive(each) for each in shape.split(":"))
        for requests in arguments.requests:
            measure = partial(row, requests, heads, clusters, device, arguments.repetitions)
            rows.append(done.part(f"{heads}-{clusters}-{requests}", Row, measure))
    return finish(done, rows)


def row(requests: int, heads: int, clusters: int, device: torch.device, repetitions: int) -> Row:
    """Time one number of requests."""
    layers = [features_of(requests, heads, device, seed) for seed in range(LAYERS)]
    same = 0
    for features in layers:
        found = membership_of(features, clusters).cluster.cpu()
        reference = one_by_one(features, clusters)
        same += sum(partition(mine) == partition(theirs) for mine, theirs in zip(found, reference, strict=True))
    contenders: dict[str, Callable[[Tensor], object]] = {
        "one by one": lambda features: one_by_one(features, clusters),
        "ours": lambda features: membership_of(features, clusters),
    }
    seconds = seconds_in_turn(contenders, layers, device, repetitions=repetitions)
    return Row(
        "membership of a layer",
        f"{requests} request{'s' * (requests > 1)}, {heads} → {clusters}, {device}; "
        f"{same} of {LAYERS * requests} partitions equal",
        "scipy cdist + scikit-learn per request",
        ratio(seconds["one by one"], seconds["ours"]),
        None,
        {"requests": requests, "heads": heads, "clusters": clusters, "equal_partitions": same, "seconds": seconds},
    )


def features_of(requests: int, heads: int, device: torch.device, seed: int) -> Tensor:
    """What heads of random queries and keys attend to over the probe tokens: `[requests, heads, 15]`."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(requests, heads, PROBE, HEAD_DIM, generator=generator).to(device) for _ in range(2))
    return probe_features(probe_probabilities(query, key, HEAD_DIM**-0.5))


def one_by_one(features: Tensor, clusters: int) -> list[Tensor]:
    """Labels of each request's heads, the way the paper's authors' code finds them."""
    from scipy.spatial.distance import cdist
    from sklearn.cluster import AgglomerativeClustering

    labels = []
    for heads in features.double().cpu().numpy():
        model = AgglomerativeClustering(n_clusters=clusters, metric="precomputed", linkage="average")
        labels.append(torch.from_numpy(model.fit_predict(cdist(heads, heads, metric="cosine"))))
    return labels


def partition(labels: Tensor) -> set[frozenset[int]]:
    """Which heads are together, whatever the clusters are called."""
    return {frozenset(torch.nonzero(labels == label).flatten().tolist()) for label in labels.unique()}
