"""What calibration keeps of all samples: sums, whose size does not depend on how many samples there were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chai_eval.attention.membership import cosine_distance, partitions
from chai_eval.calibration.kmeans import error_curve, gram
from chai_eval.calibration.observe import Seen
from chai_eval.calibration.settings import Algorithm, FeatureKind


@dataclass(frozen=True)
class ErrorCurves:
    """How curves of the clustering error over the number of clusters are computed: from which features, and how."""

    features: FeatureKind
    algorithm: Algorithm
    starts: int

    def of(self, products: Tensor, distance: Tensor, generator: torch.Generator) -> Tensor:
        """Σ_h ‖x_h - μ_c(h)‖² in column k - 1 with k clusters, `[rows, heads]`, float64.

        From `kmeans.gram` and cosine distances of the heads' features, `[rows, heads, heads]`, float64.
        """
        if self.algorithm == "kmeans":
            return error_curve(products, self.starts, generator)
        return partition_errors(products, partitions(distance))


@dataclass
class BatchStatistics:
    """What a batch of samples tells about every layer, as a watcher for `observe`.

    Costs are taken by `output_projection.output_factors` over the queries in some columns `[n]`; keys are all before
    them. What is found, by name and layer, each with samples as the first dimension, is what `HeadStatistics` sums, and
    `products` of the features that the curves are computed from; None for curves leaves out what only these need.
    """

    factors: Sequence[Tensor]
    queries: Tensor
    probe_tokens: int
    curves: ErrorCurves | None = None
    found: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def __call__(self, seen: Seen) -> None:
        last = torch.tensor([seen.query.shape[2] - 1])
        probabilities = seen.probabilities(torch.cat((self.queries, last)))
        features = {"last_row": probabilities[:, :, -1], "probe": seen.probe(self.probe_tokens)}
        cost, importance = serving_costs(probabilities[:, :, :-1], seen.value, self.factors[seen.call.index])
        found = {f"distance_{kind}": cosine_distance(each) for kind, each in features.items()}
        found |= {"output_cost": cost, "importance": importance}
        if self.curves is not None:
            found["products"] = gram(features[self.curves.features])
        for name, each in found.items():
            self.found.setdefault(name, {})[seen.call.index] = each.cpu()

    def stacked(self, name: str) -> Tensor:
        """What was found under a name: `[layers, samples, ...]`."""
        return torch.stack([each for _, each in sorted(self.found[name].items())])


class HeadStatistics:
    """Means over samples of what each layer shows, kept as sums in float64 on the CPU.

    - `distance_last_row`, `distance_probe`: [layers, heads, heads], cosine distances of heads by the last token's
      attention, and by that of the probe
    - `output_cost`, `importance`: [layers, heads, heads] and [layers, heads], see `serving_costs`
    - `kept`: [layers, heads], in column k - 1 the K heads that CHAI's representatives (the lowest heads) need; k itself
      unless heads share them
    - `error`: [layers, heads], see `ErrorCurves`; only where they were asked for
    """

    def __init__(self, sums: Mapping[str, Tensor] | None = None) -> None:
        self.sums = dict(sums or {})

    @property
    def samples(self) -> int:
        """How many samples there were."""
        return int(self.sums.get("samples", 0))

    def add(self, batch: BatchStatistics, kv_heads: int, generator: torch.Generator) -> None:
        """Add a batch of samples; the generator is that of the error curves."""
        found = {name: batch.stacked(name) for name in batch.found}
        layers, samples, heads, _ = found["distance_probe"].shape
        by_probe = partitions(found["distance_probe"].flatten(0, 1))
        found["kept"] = _distinct(by_probe // (heads // kv_heads), kv_heads).view(layers, samples, heads)
        if batch.curves is not None:
            products = found.pop("products").flatten(0, 1)  # [layers * samples, heads, heads]
            distance = found[f"distance_{batch.curves.features}"].flatten(0, 1)
            found["error"] = batch.curves.of(products, distance, generator).view(layers, samples, heads)
        totals = {name: each.sum(1) for name, each in found.items()} | {"samples": torch.tensor(samples)}
        for name, each in totals.items():
            self.sums[name] = self.sums[name] + each if name in self.sums else each

    def mean(self, name: str) -> Tensor:
        """Mean over samples of what stands under that name."""
        return self.sums[name] / self.sums["samples"]


def serving_costs(probabilities: Tensor, value: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """What it costs the layer's output when one head's probabilities serve another, and each head's importance.

    c(i, r) = E ‖(A_i - A_r) V_i W_O,i‖² over queries, `[rows, heads, heads]`: head i keeps its values and its slice of
    the output projection; not symmetric, zero on the diagonal. Importance is E ‖A_i V_i W_O,i‖², `[rows, heads]`; both
    float64. From probabilities `[rows, heads, queries, keys]`, values `[rows, kv_heads, keys, head_dim]` and
    `output_projection.output_factors`.
    """
    rows, heads, queries, _ = probabilities.shape
    group = heads // value.shape[1]
    # Every head's probabilities with every head's values: [rows, kv_heads, heads, queries, head_dim].
    mixed = torch.matmul(probabilities.flatten(1, 2)[:, None], value.float()).unflatten(2, (heads, queries))
    cost = torch.empty(rows, heads, heads, dtype=torch.float64, device=value.device)
    importance = torch.empty(rows, heads, dtype=torch.float64, device=value.device)
    for head in range(heads):
        served = mixed[:, head // group]
        factor = factors[head].T
        change = torch.matmul(served - served[:, head : head + 1], factor)
        cost[:, head] = change.square().sum(-1).mean(-1)
        importance[:, head] = torch.matmul(served[:, head], factor).square().sum(-1).mean(-1)
    return cost, importance


def partition_errors(products: Tensor, lowest: Tensor) -> Tensor:
    """Sum of squared distances to the clusters' means: `[rows, heads]`, column k - 1 with k clusters.

    From `kmeans.gram` and `membership.partitions`, `[rows, heads, heads]` each.
    """
    same = (lowest[..., :, None] == lowest[..., None, :]).double()  # [rows, heads (k), heads, heads]
    # Σ_h ‖x_h‖² less, for each cluster, the squared norm of its sum over its size.
    within = (same * products[:, None]).sum(-1) / same.sum(-1)
    return (products.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None] - within.sum(-1)).clamp_(min=0)


def _distinct(numbers: Tensor, below: int) -> Tensor:
    """How many different numbers there are along the last dimension."""
    present = torch.zeros(*numbers.shape[:-1], below, dtype=torch.bool, device=numbers.device)
    return present.scatter_(-1, numbers, True).sum(-1).double()
