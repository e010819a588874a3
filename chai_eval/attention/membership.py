"""Membership: which heads form a cluster, for all requests of a batch at once.

Steps 3 and 4 of the design (docs/design.md, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from chai_eval.attention.linkage import TIE, merge_order

Representative = Literal["first", "medoid"]


@dataclass(frozen=True)
class Membership:
    """Clusters of the heads of one layer, for each row of a batch, numbered by their lowest head.

    `cluster`, `[rows, heads]`, is the one that each head belongs to; `representative`, `[rows, clusters]`, the head
    whose queries and keys stand in for the cluster; both int64.
    """

    cluster: Tensor
    representative: Tensor

    @property
    def clusters(self) -> int:
        """Number of clusters, the same in every row."""
        return self.representative.shape[1]

    @cached_property
    def flat(self) -> Tensor:
        """The cluster of each head of all rows, counted through all rows' clusters: `[rows * heads]`, int64."""
        first = torch.arange(len(self.cluster), device=self.cluster.device)[:, None] * self.clusters
        return (first + self.cluster).flatten()

    @classmethod
    def every_head(cls, rows: int, heads: int, device: torch.device) -> Membership:
        """Each head a cluster of its own."""
        number = torch.arange(heads, device=device).expand(rows, -1)
        return cls(number, number)

    @classmethod
    def side_by_side(cls, parts: Sequence[Membership]) -> Membership:
        """One membership of all heads from those of blocks of neighbouring heads, in their order."""
        heads = accumulate((each.cluster.shape[1] for each in parts), initial=0)
        clusters = accumulate((each.clusters for each in parts), initial=0)
        moved = [
            (each.cluster + cluster, each.representative + head)
            for each, cluster, head in zip(parts, clusters, heads, strict=False)
        ]
        cluster, representative = (torch.cat(each, dim=1) for each in zip(*moved, strict=True))
        return cls(cluster, representative)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Membership:
        """The same with both tensors moved to another device, or for other rows."""
        return Membership(change(self.cluster), change(self.representative))


def cosine_distance(features: Tensor) -> Tensor:
    """d(i, j) = 1 - x_i · x_j / (|x_i| |x_j|) of features `[rows, heads, n]`.

    It is `[rows, heads, heads]`, float64, zero on the diagonal, symmetric to the bit.
    """
    unit = torch.nn.functional.normalize(features.double(), dim=-1)
    half = torch.full((), 0.5, dtype=unit.dtype, device=unit.device)
    # A matrix product need not be symmetric to the bit; half of it and half of its transpose are.
    distance = torch.baddbmm(half, unit, unit.transpose(-1, -2), alpha=-0.5)
    distance = distance + distance.transpose(-1, -2)
    distance.diagonal(dim1=-2, dim2=-1).zero_()
    return distance


def average_linkage(distance: Tensor, clusters: int) -> Tensor:
    """Agglomerative clustering with average linkage of every row, down to a number of clusters, as `merge_order` says.

    From distances `[rows, heads, heads]`, float64, to `[rows, heads]`, int64: for each head the lowest of its cluster.
    """
    rows, heads, _ = distance.shape
    first = np.arange(0, rows * heads, heads)
    lowest = np.arange(rows * heads)
    kept, given_up = (merge_order(distance.numpy(force=True), clusters) + first).swapaxes(0, 1)
    lowest[given_up] = kept
    for _ in range(max(heads - 1, 1).bit_length()):  # follow merges of merges
        lowest = lowest.take(lowest)
    return torch.from_numpy(lowest.reshape(rows, heads) - first[:, None]).to(distance.device)


def partitions(distance: Tensor) -> Tensor:
    """The clusters of `average_linkage` for each number of clusters: `[rows, heads, heads]`, int64.

    Entry (row, k - 1, head) is the lowest head of the head's cluster when there are k.
    """
    rows, heads, _ = distance.shape
    found = [np.broadcast_to(np.arange(heads), (rows, heads))]
    for kept, given_up in merge_order(distance.numpy(force=True), 1):
        found.append(np.where(found[-1] == given_up[:, None], kept[:, None], found[-1]))
    return torch.from_numpy(np.stack(found[::-1], axis=1)).to(distance.device)


def membership_from_labels(lowest: Tensor, clusters: int) -> Membership:
    """The membership in `clusters` clusters that `average_linkage` gave, their first heads the representatives."""
    rows, heads = lowest.shape
    is_first = lowest == torch.arange(heads, device=lowest.device)
    number = is_first.cumsum(1) - 1
    return Membership(number.gather(1, lowest), is_first.nonzero()[:, 1].view(rows, clusters))


def medoids(distance: Tensor, membership: Membership) -> Tensor:
    """The member of each cluster with the smallest summed distance to the others; the lowest head among ties.

    From distances `[rows, heads, heads]` to `[rows, clusters]`, int64.
    """
    same = membership.cluster[:, :, None] == membership.cluster[:, None, :]
    cost = (distance * same).sum(-1)  # [rows, heads]
    number = torch.arange(membership.clusters, device=distance.device)
    member = membership.cluster[:, None, :] == number[:, None]  # [rows, clusters, heads]
    within = cost[:, None, :].masked_fill(~member, float("inf"))
    return (within <= within.amin(-1, keepdim=True) + TIE).to(torch.uint8).argmax(-1)


def membership_of(features: Tensor, clusters: int, representative: Representative = "first") -> Membership:
    """Cluster the heads of every row by what they attend to: by features `[rows, heads, n]`, see `probe_features`.

    The partition is that of scikit-learn's `AgglomerativeClustering(metric="precomputed", linkage="average")` on the
    same distances wherever no two of them tie.
    """
    with torch.inference_mode():
        distance = cosine_distance(features.cpu())  # on the host, so that every device gives the same membership
        found = membership_from_labels(average_linkage(distance, clusters), clusters)
        representatives = medoids(distance, found) if representative == "medoid" else found.representative
    # Copies are ordinary tensors again, which may take part in what is differentiated.
    return Membership(found.cluster, representatives).changed(lambda each: each.to(features.device, copy=True))
