"""Membership: which heads form a cluster, for all requests of a batch at once (DESIGN section 3, steps 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Representative = Literal["first", "medoid"]

# Distances are compared in whole steps of this; those that round to the same step are a tie. They are computed in
# float64 from probabilities in float32: two heads that attend exactly alike differ by rounding of about 1e-16. Heads
# that nearly all look at one token differ by the square of the little that they look elsewhere, which may be 1e-10.
TIE = 2.0**-40


@dataclass(frozen=True)
class Membership:
    """Clusters of the heads of one layer, for each row of a batch.

    Clusters are numbered by their lowest head.

    Attributes
    ----------
    cluster : Tensor [rows, heads], int64
        The cluster each head belongs to.
    representative : Tensor [rows, clusters], int64
        The head whose queries and keys stand in for the cluster.
    """

    cluster: Tensor
    representative: Tensor

    @property
    def clusters(self) -> int:
        """Number of clusters, the same in every row."""
        return self.representative.shape[1]

    @classmethod
    def every_head(cls, rows: int, heads: int, device: torch.device) -> Membership:
        """Each head a cluster of its own."""
        number = torch.arange(heads, device=device).expand(rows, -1)
        return cls(number, number)

    def expand(self, rows: int) -> Membership:
        """The one membership (of one row) for every one of `rows` rows."""
        return Membership(self.cluster.expand(rows, -1), self.representative.expand(rows, -1))


def cosine_distance(features: Tensor) -> Tensor:
    """d(i, j) = 1 - x_i · x_j / (|x_i| |x_j|), in float64.

    Parameters
    ----------
    features : Tensor [rows, heads, n]

    Returns
    -------
    Tensor [rows, heads, heads], float64, zero on the diagonal, symmetric to the bit
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

    Parameters
    ----------
    distance : Tensor [rows, heads, heads], float64
        Symmetric.
    clusters : int
        1 to heads.

    Returns
    -------
    Tensor [rows, heads], int64
        For each head the lowest head of its cluster.
    """
    rows, heads, _ = distance.shape
    lowest = torch.arange(rows * heads, device=distance.device)
    kept, given_up = merge_order(distance, clusters)
    lowest.index_copy_(0, given_up.flatten(), kept.flatten())
    for _ in range(max(heads - 1, 1).bit_length()):  # follow merges of merges
        lowest = lowest.index_select(0, lowest)
    return (lowest % heads).view(rows, heads)


def partitions(distance: Tensor) -> Tensor:
    """The clusters of `average_linkage` for each number of clusters.

    Parameters
    ----------
    distance : Tensor [rows, heads, heads], float64
        Symmetric.

    Returns
    -------
    Tensor [rows, heads, heads], int64
        Entry (row, k - 1, head): the lowest head of the head's cluster when there are k.
    """
    rows, heads, _ = distance.shape
    lowest = torch.arange(heads, device=distance.device).expand(rows, -1)
    found = [lowest]
    for kept, given_up in zip(*merge_order(distance, 1), strict=True):
        keep, gone = ((each % heads)[:, None] for each in (kept, given_up))
        lowest = torch.where(lowest == gone, keep, lowest)
        found.append(lowest)
    return torch.stack(found[::-1], dim=1)


@torch.no_grad()
def merge_order(distance: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Which heads average linkage merges, in order, until a number of clusters is left.

    Each step merges the two clusters with the smallest mean distance; among ties, the pair with the lowest heads.
    The distance of a merged cluster to another is the mean weighted by size (Lance and Williams, 1967).

    Parameters
    ----------
    distance : Tensor [rows, heads, heads], float64
        Symmetric.
    clusters : int
        1 to heads.

    Returns
    -------
    Tensor [heads - clusters, rows], int64
        Lowest head of the first cluster of each merge, which names what was merged from then on.
    Tensor [heads - clusters, rows], int64
        Lowest head of the second. Both are counted through all rows: head h of row r is r · heads + h.
    """
    # A batch is small, so what a step costs is its number of operations and of tensors that it makes: none, which is a
    # tenth less time. Distances are whole numbers of `TIE`, and so are means of them once rounded: the same on every
    # device and in every batch, with ties that are equal to the bit.
    rows, heads, _ = distance.shape
    steps, device, infinite = heads - clusters, distance.device, float("inf")
    # What is no number (of a model gone wrong, which scoring tells) counts as nearest, so that clusters stay clusters.
    apart = (distance * (1 / TIE)).round_().nan_to_num_(0.0)
    apart.diagonal(dim1=-2, dim2=-1).fill_(infinite)
    by_head, entries = apart.view(rows * heads, heads), apart.view(rows, heads * heads)
    first = torch.arange(0, rows * heads, heads, device=device)  # head of each row
    column = torch.arange(0, heads * heads, heads, device=device)  # of head 0 in `entries`
    size = torch.ones(rows * heads, dtype=apart.dtype, device=device)
    # Infinite for heads that were merged into another: their columns are not kept up.
    gone_already = torch.zeros(rows, heads, dtype=apart.dtype, device=device)
    gone_by_head = gone_already.view(-1)
    nearest, merged, other = (torch.empty_like(gone_already) for _ in range(3))
    count, more = size.new_empty(2, rows)
    keep = torch.empty_like(first)
    each_count, each_more, each_keep = count.unsqueeze(1), more.unsqueeze(1), keep.unsqueeze(1)
    to_column = first.new_empty(rows, heads)
    kept, given_up = first.new_empty(2, steps, rows)
    for step, (at_keep, at_gone) in enumerate(zip(kept.unbind(), given_up.unbind(), strict=True)):
        # The first head that has a smallest distance, then its first partner at that distance: lowest heads first.
        torch.amin(apart, 1, out=nearest)
        torch.argmin(nearest.add_(gone_already), 1, out=keep)
        torch.add(keep, first, out=at_keep)
        torch.index_select(by_head, 0, at_keep, out=merged)
        torch.argmin(merged.add_(gone_already), 1, out=at_gone)
        at_gone.add_(first)
        if step == steps - 1:
            break
        torch.index_select(by_head, 0, at_gone, out=other)
        torch.index_select(size, 0, at_keep, out=count)
        torch.index_select(size, 0, at_gone, out=more)
        merged.mul_(each_count).addcmul_(other, each_more)
        count.add_(more)
        merged.div_(each_count).round_()
        by_head.index_copy_(0, at_keep, merged)
        entries.scatter_(1, torch.add(column, each_keep, out=to_column), merged)
        by_head.index_fill_(0, at_gone, infinite)
        gone_by_head.index_fill_(0, at_gone, infinite)
        size.index_copy_(0, at_keep, count)
    return kept, given_up


def membership_from_labels(lowest: Tensor, clusters: int) -> Membership:
    """Membership with the first head of each cluster as its representative.

    Parameters
    ----------
    lowest : Tensor [rows, heads], int64
        For each head the lowest head of its cluster, as `average_linkage` gives it.
    clusters : int
        Number of clusters in every row.
    """
    heads = lowest.shape[1]
    is_first = lowest == torch.arange(heads, device=lowest.device)
    number = is_first.cumsum(1) - 1
    # A stable sort puts the first heads in front, in order.
    first = torch.argsort((~is_first).to(torch.uint8), dim=1, stable=True)[:, :clusters]
    return Membership(number.gather(1, lowest), first)


def medoids(distance: Tensor, membership: Membership) -> Tensor:
    """The member of each cluster with the smallest summed distance to the others; the lowest head among ties.

    Parameters
    ----------
    distance : Tensor [rows, heads, heads]

    Returns
    -------
    Tensor [rows, clusters], int64
    """
    same = membership.cluster[:, :, None] == membership.cluster[:, None, :]
    cost = (distance * same).sum(-1)  # [rows, heads]
    number = torch.arange(membership.clusters, device=distance.device)
    member = membership.cluster[:, None, :] == number[:, None]  # [rows, clusters, heads]
    within = cost[:, None, :].masked_fill(~member, float("inf"))
    return (within <= within.amin(-1, keepdim=True) + TIE).to(torch.uint8).argmax(-1)


def membership_of(features: Tensor, clusters: int, representative: Representative = "first") -> Membership:
    """Cluster the heads of every row by what they attend to.

    Parameters
    ----------
    features : Tensor [rows, heads, n]
        Features of the probe, see `probe_features`.
    clusters : int
        Cluster count of the layer.
    representative : "first" or "medoid"

    Returns
    -------
    Membership
        The partition of scikit-learn's `AgglomerativeClustering(metric="precomputed", linkage="average")` on the same
        distances wherever no two of them tie.
    """
    with torch.inference_mode():  # a tenth less time: many small operations, of which nothing is kept track
        distance = cosine_distance(features)
        found = membership_from_labels(average_linkage(distance, clusters), clusters)
        representatives = medoids(distance, found) if representative == "medoid" else found.representative
    # Copies are ordinary tensors again, which may take part in what is differentiated.
    return Membership(found.cluster.clone(), representatives.clone())
