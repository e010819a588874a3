"""What calibration keeps of all samples: sums, whose size does not depend on how many samples there were."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from chai_eval.attention.inject import AttentionShape
from chai_eval.attention.membership import partitions
from chai_eval.calibration.kmeans import error_curve
from chai_eval.calibration.observe import Observed
from chai_eval.calibration.settings import Algorithm, FeatureKind


@dataclass
class Sums:
    """Sums over samples, in float64 on the CPU; `mean` divides.

    Attributes
    ----------
    samples : Tensor [], int64
    error : Tensor [layers, heads]
        Column k - 1: Σ_h ‖x_h - μ_c(h)‖² with k clusters.
    distance_last_row, distance_probe : Tensor [layers, heads, heads]
        Cosine distances of the heads' features.
    output_cost : Tensor [layers, heads, heads]
        See `observe.serving_costs`.
    importance : Tensor [layers, heads]
    kept : Tensor [layers, heads]
        Column k - 1: K heads that CHAI's representatives (the lowest heads) need; k itself unless heads share them.
    """

    samples: Tensor
    error: Tensor
    distance_last_row: Tensor
    distance_probe: Tensor
    output_cost: Tensor
    importance: Tensor
    kept: Tensor

    @classmethod
    def empty(cls, shape: AttentionShape) -> Sums:
        """Before the first sample."""
        layers, heads = shape.layers, shape.heads
        by_count, by_pair = (layers, heads), (layers, heads, heads)
        sizes = (by_count, by_pair, by_pair, by_pair, by_count, by_count)
        return cls(torch.zeros((), dtype=torch.int64), *(torch.zeros(size, dtype=torch.float64) for size in sizes))

    def add(
        self,
        seen: Observed,
        shape: AttentionShape,
        features: FeatureKind,
        algorithm: Algorithm,
        starts: int,
        generator: torch.Generator,
    ) -> None:
        """Add a batch of samples.

        Parameters
        ----------
        features : "last_row" or "probe"
            What the error curve is computed from.
        algorithm : "kmeans" or "average"
            How its clusters are found.
        starts, generator
            Of K-Means.
        """
        layers, samples, heads, _ = seen.output_cost.shape
        self.samples += samples
        for name in ("distance_last_row", "distance_probe", "output_cost", "importance"):
            getattr(self, name).add_(getattr(seen, name).sum(1))
        products = getattr(seen, f"products_{features}").flatten(0, 1)  # [layers * samples, heads, heads]
        by_probe = partitions(seen.distance_probe.flatten(0, 1))
        if algorithm == "kmeans":
            errors = error_curve(products, starts, generator)
        elif features == "probe":
            errors = partition_errors(products, by_probe)
        else:
            errors = partition_errors(products, partitions(seen.distance_last_row.flatten(0, 1)))
        for name, each in (
            ("error", errors),
            ("kept", _distinct(by_probe // (heads // shape.kv_heads), shape.kv_heads)),
        ):
            getattr(self, name).add_(each.view(layers, samples, heads).sum(1))

    def mean(self, name: str) -> Tensor:
        """Mean over samples of what is summed under that name."""
        total: Tensor = getattr(self, name)
        return total / self.samples

    def tensors(self) -> dict[str, Tensor]:
        """All sums by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def partition_errors(products: Tensor, lowest: Tensor) -> Tensor:
    """Sum of squared distances to the clusters' means: `[rows, heads]`, column k - 1 with k clusters.

    Parameters
    ----------
    products : Tensor [rows, heads, heads], float64
        See `kmeans.gram`.
    lowest : Tensor [rows, heads, heads], int64
        See `membership.partitions`.
    """
    same = (lowest[..., :, None] == lowest[..., None, :]).double()  # [rows, heads (k), heads, heads]
    # Σ_h ‖x_h‖² less, for each cluster, the squared norm of its sum over its size.
    within = (same * products[:, None]).sum(-1) / same.sum(-1)
    return (products.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None] - within.sum(-1)).clamp_(min=0)


def _distinct(numbers: Tensor, below: int) -> Tensor:
    """How many different numbers there are along the last dimension."""
    present = torch.zeros(*numbers.shape[:-1], below, dtype=torch.bool, device=numbers.device)
    return present.scatter_(-1, numbers, True).sum(-1).double()
