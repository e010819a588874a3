"""Average linkage of the heads of many rows at once (docs/design.md, section 3, step 3).

It runs on the host, in numpy: a merge is a dozen operations on a few thousand numbers, which cost what calling them
costs. Numpy's cost a third of torch's, and a GPU would need a launch for each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Distances are compared in whole steps of this; those that round to the same step are a tie. They are computed in
# float64 from probabilities in float32: two heads that attend exactly alike differ by rounding of about 1e-16. Heads
# that nearly all look at one token differ by the square of the little that they look elsewhere, which may be 1e-10.
TIE = 2.0**-40

# Rows so few that one after the other takes less time: plain slices cost less than gathering from all rows at once.
FEW = 2


def merge_order(distance: NDArray[np.float64], clusters: int) -> NDArray[np.intp]:
    """Which heads average linkage merges, in order, until 1 to `heads` clusters are left.

    Each step merges the two clusters with the smallest mean distance; among ties, the pair with the lowest heads.
    The distance of a merged cluster to another is the mean weighted by size (Lance and Williams, 1967).

    Distances `[rows, heads, heads]` are symmetric, from 0 to 2. It gives, `[heads - clusters, 2, rows]`, of each merge
    the lowest head of the first cluster, which names what was merged from then on, and that of the second.
    """
    # Distances are whole numbers of `TIE`, and so are means of them once rounded: the same in every batch, with ties
    # that are equal to the bit. What is no number (of a model gone wrong, which scoring tells) counts as nearest, so
    # that clusters stay clusters.
    apart = np.rint(distance * (1 / TIE), order="C")
    np.fmax(apart, 0, out=apart)
    rows, heads, _ = apart.shape
    apart.reshape(rows, heads * heads)[:, :: heads + 1] = np.inf
    if 0 < rows <= FEW:
        return np.stack([_merge_order_of_one(each, clusters) for each in apart], axis=-1)
    return _merge_order_of_many(apart, clusters)


def _merge_order_of_one(apart: NDArray[np.float64], clusters: int) -> NDArray[np.intp]:
    """The merges `[heads - clusters, 2]` of one row's distances `[heads, heads]`, which are lost."""
    heads = len(apart)
    size = [1] * heads
    merges = np.empty((heads - clusters, 2), np.intp)
    for merge in merges:
        merge[:] = keep, gone = divmod(int(apart.argmin()), heads)  # the first smallest: lowest heads among ties
        merged = apart[keep]
        merged *= size[keep]
        merged += apart[gone] * size[gone]
        size[keep] += size[gone]
        merged /= size[keep]
        apart[:, keep] = np.rint(merged, out=merged)
        apart[gone] = apart[:, gone] = np.inf  # nobody's nearest from now on
    return merges


def _merge_order_of_many(apart: NDArray[np.float64], clusters: int) -> NDArray[np.intp]:
    """The merges `[heads - clusters, 2, rows]` of all rows' distances `[rows, heads, heads]`, which are lost."""
    rows, heads, _ = apart.shape
    flat, by_head, by_row = apart.reshape(-1), apart.reshape(rows * heads, heads), apart.reshape(rows, heads * heads)
    first = np.arange(0, rows * heads, heads)  # head of each row
    column = np.arange(0, apart.size, heads).reshape(rows, heads)  # of head 0: where in `flat` it is
    size = np.ones(rows * heads)
    # Distances of the merged clusters, and of those that they were merged with, which are nobody's nearest from now on.
    renewed = np.full((2, rows, heads), np.inf)
    merged, other = renewed[0], np.empty((rows, heads))
    closest = np.empty(rows, np.intp)
    merges = np.empty((heads - clusters, 2, rows), np.intp)
    for merge in merges:
        by_row.argmin(1, out=closest)
        np.divmod(closest, heads, out=(merge[0], merge[1]))
        pair = merge + first
        count, more = size.take(pair)
        total = count + more
        by_head.take(pair[0], 0, out=merged, mode="clip")  # which, unlike "raise", needs no copy in between
        by_head.take(pair[1], 0, out=other, mode="clip")
        merged *= count[:, None]
        other *= more[:, None]
        merged += other
        merged /= total[:, None]
        np.rint(merged, out=merged)
        by_head[pair] = renewed
        flat[column + merge[:, :, None]] = renewed
        size[pair[0]] = total
    return merges
