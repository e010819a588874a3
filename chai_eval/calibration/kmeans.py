"""K-Means of many small problems at once: the heads of every layer of every sample, for each number of clusters.

A problem has few points (heads) of many dimensions (positions), so it is stated by the points' inner products alone:
all that Lloyd's algorithm needs of a cluster's mean are sums of rows of that matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Lloyd's algorithm on a few dozen points ends long before this; scikit-learn's default.
MAX_STEPS = 300
# Numbers held at once in one intermediate; problems are taken in blocks so that they fit (64 MiB in float64).
BLOCK_ELEMENTS = 1 << 23


def gram(points: Tensor) -> Tensor:
    """Inner products of points `[..., heads, n]` around their mean: `[..., heads, heads]`, float64."""
    centred = points.double() - points.double().mean(-2, keepdim=True)
    return centred @ centred.transpose(-1, -2)


def error_curve(products: Tensor, starts: int, generator: torch.Generator) -> Tensor:
    """Smallest sum of squared distances to the clusters' means that K-Means finds, for each number of clusters.

    From products `[problems, heads, heads]` (see `gram`) to `[problems, heads]`, float64: column k - 1 is the error
    with k clusters, E(k) of the paper's section 3.2. Of the starts, by greedy k-means++ as scikit-learn's (`n_init`),
    the best counts; they are drawn on the CPU, so that they are the same on every device.
    """
    problems, heads, _ = products.shape
    curve = products.new_zeros(problems, heads)
    curve[:, 0] = products.diagonal(dim1=-2, dim2=-1).sum(-1)
    for clusters in range(2, heads):  # each head its own cluster: no error
        block = max(BLOCK_ELEMENTS // (starts * clusters * heads), 1)
        for first in range(0, problems, block):
            part = products[first : first + block]
            curve[first : first + block, clusters - 1] = _inertia(part, clusters, starts, generator)
    return curve


def _inertia(products: Tensor, clusters: int, starts: int, generator: torch.Generator) -> Tensor:
    norms = products.diagonal(dim1=-2, dim2=-1)
    apart = (norms[:, :, None] + norms[:, None, :] - 2 * products).clamp_(min=0)  # squared distances
    problems, heads, _ = products.shape
    labels = _starting_labels(apart, clusters, starts, generator)  # [problems, starts, heads]
    number = torch.arange(clusters, device=products.device)
    for _ in range(MAX_STEPS):
        member = (labels[:, :, None, :] == number[:, None]).to(products.dtype)  # [problems, starts, clusters, heads]
        size = member.sum(-1)
        mean = member / size.clamp(min=1)[..., None]
        with_mean = torch.matmul(mean.view(problems, -1, heads), products).view_as(mean)  # point · mean
        of_mean = (with_mean * mean).sum(-1, keepdim=True)
        distance = (of_mean - 2 * with_mean).masked_fill_((size == 0)[..., None], math.inf)
        closest, moved = distance.min(2)
        if torch.equal(moved, labels):
            break
        labels = moved
    return (closest + norms[:, None, :]).sum(-1).amin(1).clamp_(min=0)


def _starting_labels(apart: Tensor, clusters: int, starts: int, generator: torch.Generator) -> Tensor:
    """Greedy k-means++: of a few heads drawn by their squared distance, the one that leaves the least error."""
    problems, heads, _ = apart.shape
    trials = 2 + int(math.log(clusters))
    whole = apart.repeat_interleave(starts, dim=0)  # [problems * starts, heads, heads]
    one = torch.arange(len(whole), device=apart.device)
    chosen = torch.randint(heads, (len(whole),), generator=generator).to(apart.device)
    nearest = whole[one, chosen]
    labels = torch.zeros_like(nearest, dtype=torch.int64)
    for cluster in range(1, clusters):
        drawn = _draw(nearest, trials, generator)  # [problems * starts, trials]
        to_drawn = whole[one[:, None], drawn]  # [problems * starts, trials, heads]
        best = torch.minimum(nearest[:, None], to_drawn).sum(-1).argmin(1)
        chosen = to_drawn[one, best]
        closer = chosen < nearest
        labels = torch.where(closer, cluster, labels)
        nearest = torch.where(closer, chosen, nearest)
    return labels.view(problems, starts, heads)


def _draw(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Heads drawn by weight; where all weights are zero (heads that attend alike) it doesn't matter which."""
    total = weights.cumsum(-1)
    at = torch.rand(len(weights), count, generator=generator, dtype=torch.float64).to(weights.device) * total[:, -1:]
    return torch.searchsorted(total, at, right=True).clamp_(max=weights.shape[1] - 1)
