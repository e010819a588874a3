"""Drift: how far the clusters that a request's first tokens show agree with those of windows further on in the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.membership import average_linkage, cosine_distance
from chai_eval.attention.shape import AttentionShape
from chai_eval.calibration.figures import EVERY_LAYER
from chai_eval.calibration.observe import Seen, observe
from chai_eval.calibration.progress import progress
from chai_eval.errors import SettingError
from chai_eval.scoring.fidelity import student_mean

# What the clusters of a window are held against: those of the probe, and of as many tokens just before the window.
AGAINST = ("probe", "before")
FIRST_END = 16


def window_ends(tokens: int, probe_tokens: int, window: int) -> list[int]:
    """Where windows end, in tokens from the start of a text: at powers of two, and at its end.

    Before each of them there is room for another, behind the probe.

    Raises
    ------
    SettingError
        Where there is no room for two.
    """
    most = (tokens - probe_tokens) // 2
    if window > most:
        raise SettingError(
            f"window: {window} given with tokens={tokens} and probe_tokens={probe_tokens}; allowed: "
            + (f"1 to {most}" if most > 0 else "longer samples")
        )
    doubling = (FIRST_END << step for step in range(tokens.bit_length()))
    return [*(end for end in doubling if probe_tokens + 2 * window <= end < tokens), tokens]


def follow_windows(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    counts: Sequence[int],
    probe_tokens: int,
    window: int,
    ends: Sequence[int],
) -> list[Tensor]:
    """Clusters by the probe and by windows further on, found as CHAI finds them.

    Heads are compared by the attention probabilities of a window's queries over all keys that they see, which at the
    start of a text is the probe.

    Parameters
    ----------
    batches : sequence of Tensor [samples, tokens], int64
    counts : sequence of int
        Clusters of each layer.
    ends : sequence of int
        Where windows end, see `window_ends`.

    Returns
    -------
    list of Tensor [samples, 1 + 2 * windows, heads], one a layer
        For each head the lowest head of its cluster: by the probe, by each window, and by the one just before each.
    """
    found: list[list[Tensor]] = [[] for _ in counts]
    lasts = [*ends, *(end - window for end in ends)]

    def watch(seen: Seen) -> None:
        rows = (seen.probabilities(torch.arange(last - window, last)).flatten(-2) for last in lasts)
        distances = [cosine_distance(each) for each in (seen.probe(probe_tokens), *rows)]
        layer = seen.call.index
        found[layer].append(torch.stack([average_linkage(each, counts[layer]).cpu() for each in distances], 1))

    observe(model, progress(batches, len(batches), "drift", "batches"), [watch])
    return [torch.cat(each) for each in found]


def drift_table(
    followed: Sequence[Tensor], counts: Sequence[int], ends: Sequence[int], shape: AttentionShape
) -> pd.DataFrame:
    """Agreement of clusters, for each layer, window and what its clusters are held against.

    Parameters
    ----------
    followed : sequence of Tensor
        See `follow_windows`.

    Returns
    -------
    DataFrame
        `layer` (`EVERY_LAYER` for the mean over layers), `clusters` (0 there), `end` (of the window), `against`,
        `agreement`: the adjusted Rand index (Hubert and Arabie, 1985), 1 for the same clusters and 0 on average for
        clusters by chance, a mean over samples with its 95 % interval, `low` to `high` (Student's; nan where there is
        none), `samples`. Layers with one cluster or all heads, in which nothing can move, are left out.
    """
    moving = [layer for layer, count in enumerate(counts) if 1 < count < shape.heads]
    agreement = {layer: _agreement(followed[layer].numpy(), len(ends)) for layer in moving}
    if moving:
        agreement[EVERY_LAYER] = np.mean([agreement[layer] for layer in moving], axis=0)
    lines = []
    for layer, of_layer in agreement.items():
        for which, against in enumerate(AGAINST):
            for end, values in zip(ends, of_layer[which], strict=True):
                mean, clusters = student_mean(values, -1, 1), 0 if layer == EVERY_LAYER else counts[layer]
                lines.append((layer, clusters, end, against, mean.value, mean.low, mean.high, len(values)))
    columns = ["layer", "clusters", "end", "against", "agreement", "low", "high", "samples"]
    return pd.DataFrame(lines, columns=columns)


def described_drift(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The means over layers as plain JSON values."""
    lines = table[table["layer"] == EVERY_LAYER].drop(columns=["layer", "clusters"]).to_dict("records")
    return [
        {str(key): None if isinstance(value, float) and math.isnan(value) else value for key, value in line.items()}
        for line in lines
    ]


def _agreement(lowest: NDArray[np.int64], windows: int) -> NDArray[np.float64]:
    """`[2, windows, samples]`: of each window with the probe, and with the window before it."""
    here, before = lowest[:, 1 : 1 + windows], lowest[:, 1 + windows :]
    found = np.empty((2, windows, len(lowest)))
    for which, others in enumerate((np.broadcast_to(lowest[:, :1], here.shape), before)):
        for sample, at in np.ndindex(len(lowest), windows):
            found[which, at, sample] = adjusted_rand_score(others[sample, at], here[sample, at])
    return found
