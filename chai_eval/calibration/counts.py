"""How many clusters each layer keeps: three rules, from curves over the number of clusters.

A curve is a tensor `[layers, heads]` whose column k - 1 belongs to k clusters.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from kneed import KneeLocator
from torch import Tensor


def elbows(error: Tensor) -> list[int]:
    """The elbow of each layer's error curve by Kneedle (Satopaa et al., 2011), as the paper finds its counts.

    A curve that has none (a straight line: every merge costs the same) keeps all heads.
    """
    heads = error.shape[1]
    found = []
    for curve in error.tolist():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that there is no elbow; so does the answer
            elbow = KneeLocator(range(1, heads + 1), curve, curve="convex", direction="decreasing").elbow
        found.append(heads if elbow is None else int(elbow))
    return found


def towards(elbow: Sequence[int], heads: int, share: float) -> list[int]:
    """Counts that share of the way from all heads to each layer's elbow; 1 is the elbow itself."""
    return [min(max(round(heads - share * (heads - each)), 1), heads) for each in elbow]


def within_tolerance(error: Tensor, share: float) -> list[int]:
    """For each layer the smallest count whose error is at most that share of its error with a single cluster."""
    enough = error <= share * error[:, :1] + 1e-12 * error[:, :1]
    return [int(each.to(torch.uint8).argmax()) + 1 if bool(each.any()) else error.shape[1] for each in enough]


def within_budget(cost: Tensor, kept: Tensor, kv_heads: int, saving: float) -> list[int]:
    """Counts that save a share of the K,V cache, given out greedily where it costs least.

    Each step takes, of all layers and all smaller counts that save no more than is missing, the one that adds least
    cost for what it saves. Where the saving can't be reached, the counts are those that come closest.

    Parameters
    ----------
    cost : Tensor [layers, heads]
        What each count costs the model, on one scale for all layers.
    kept : Tensor [layers, heads]
        K heads that each count keeps.
    saving : float
        Share of the K,V cache, up to a half less what a single cluster keeps.
    """
    layers, heads = cost.shape
    price, saved = cost.double(), ((kv_heads - kept.double()) / (2 * kv_heads * layers)).clamp(min=0)
    counts = [heads] * layers
    while (missing := saving - _total(saved, counts)) > 1e-9:
        steps = []
        for layer, count in enumerate(counts):
            enough = float("inf")  # the least that a step in this layer saves and leaves nothing missing
            for fewer in range(count - 1, 0, -1):
                gain = float(saved[layer, fewer - 1] - saved[layer, count - 1])
                if gain > enough + 1e-12:
                    break
                if gain >= missing - 1e-9:
                    enough = gain
                if gain > 1e-12:
                    more = float(price[layer, fewer - 1] - price[layer, count - 1])
                    steps.append((more / min(gain, missing), gain, layer, fewer))
        if not steps:
            break
        _, _, layer, fewer = min(steps)
        counts[layer] = fewer
    return [count if saved[at, count - 1] > 0 else heads for at, count in enumerate(counts)]


def kv_saving(counts: Sequence[int], kept: Tensor, kv_heads: int) -> float:
    """Share of the K,V cache that counts save: only K shrinks, to the heads that are kept."""
    saved = ((kv_heads - kept.double()) / (2 * kv_heads * len(counts))).clamp(min=0)
    return _total(saved, counts)


def _total(saved: Tensor, counts: Sequence[int]) -> float:
    return sum(float(saved[layer, count - 1]) for layer, count in enumerate(counts))
