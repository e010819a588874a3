"""From what was collected to what methods use: counts by preset, and the memberships fixed at those counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chai_eval.attention.membership import partitions
from chai_eval.calibration.counts import elbows, kv_saving, towards, within_budget, within_tolerance
from chai_eval.calibration.medoids import kept_by, representatives
from chai_eval.calibration.settings import CalibrationSettings, FeatureKind
from chai_eval.calibration.sums import HeadStatistics
from chai_eval.calibration_file import PRESETS, runs
from chai_eval.methods import Method, build_method

# The two kinds of membership, by the names of their tensors. CHAI's own come with each request; fixed at the same
# counts they are `chai_static`'s. Merges by output cost something else, so that `output_aware` has counts of its own.
CHAI, OUTPUT_AWARE = "static_membership", "output_aware"


@dataclass(frozen=True)
class Candidates:
    """What can be chosen of a kind of membership; at k - 1 in the second dimension stands what k clusters give.

    The KL divergence, `[layers, heads]`, is predicted where one layer alone is clustered, in nats per token; `kept` are
    the K heads that are, `[layers, heads]`; membership, `[layers, heads, heads]`, is for each head the head that stands
    for its cluster.
    """

    divergence: Tensor
    kept: Tensor
    membership: Tensor


@dataclass(frozen=True)
class Choice:
    """What is chosen of a kind of membership under a preset: clusters of each layer, and membership `[layers, heads]`.

    The saving is a share of the K,V cache; the KL divergence, in nats per token, what single layers give, added up.
    """

    counts: list[int]
    saving: float
    divergence: float
    membership: Tensor

    def description(self, measured: float) -> dict[str, Any]:
        """As `calibration.json` has it, with the KL divergence that was measured; one that is infinite as null."""
        return {
            "clusters": runs(self.counts),
            "kv_saving": round(self.saving, 6),
            "predicted_divergence": round(self.divergence, 6),
            "divergence": round(measured, 6) if math.isfinite(measured) else None,
        }


def candidates_of(
    sums: HeadStatistics, features: FeatureKind, serving: Tensor, predicted: Tensor, kv_heads: int
) -> dict[str, Candidates]:
    """Both kinds of membership at every count, by what `serving_by_count` gives and `Sensitivity.divergence`."""
    layers, heads, _ = serving.shape
    fewest = torch.tensor([kept_by(count, heads, kv_heads) for count in range(1, heads + 1)])
    by_attention = partitions(sums.mean(f"distance_{features}"))
    return {
        CHAI: Candidates(predicted[0], sums.mean("kept"), by_attention),
        OUTPUT_AWARE: Candidates(predicted[1], fewest.expand(layers, -1), serving),
    }


# By preset and kind of membership.
Choices = Mapping[tuple[str, str], Choice]


def choose(
    settings: CalibrationSettings, candidates: Mapping[str, Candidates], error: Tensor | None, kv_heads: int
) -> Choices:
    """Choose counts by the rule that was asked for, for every preset and kind of membership.

    `error` are the error curves `[layers, heads]`; None for a rule that uses none.
    """
    return {
        (preset, kind): at_counts(each, _counts(settings, at, each, error, kv_heads), kv_heads)
        for at, preset in enumerate(PRESETS)
        for kind, each in candidates.items()
    }


def _counts(
    settings: CalibrationSettings, preset: int, candidates: Candidates, error: Tensor | None, kv_heads: int
) -> list[int]:
    if error is None:
        return within_budget(candidates.divergence, candidates.kept, kv_heads, settings.saving[preset])
    if settings.rule == "elbow":
        counts = towards(elbows(error), error.shape[1], settings.elbow[preset])
    else:
        counts = within_tolerance(error, settings.tolerance[preset])
    return only_what_saves(counts, candidates.kept, kv_heads)


def at_counts(candidates: Candidates, counts: list[int], kv_heads: int) -> Choice:
    """What counts give."""
    return Choice(
        counts,
        kv_saving(counts, candidates.kept, kv_heads),
        sum(column(candidates.divergence, counts).tolist()),
        column(candidates.membership, counts),
    )


def column(values: Tensor, counts: Sequence[int]) -> Tensor:
    """For each layer what stands at its count: `[layers, heads, ...]` to `[layers, ...]`."""
    return values[torch.arange(len(counts)), torch.tensor(counts) - 1]


def methods(choices: Choices, probe_tokens: int) -> list[Method]:
    """The method that each choice was made for, in their order."""
    return [
        build_method("chai", clusters=runs(each.counts), probe_tokens=probe_tokens)
        if kind == CHAI
        else build_method("output_aware", membership=each.membership.tolist())
        for (_, kind), each in choices.items()
    ]


def description(choices: Choices, measured: Sequence[float], rule: str) -> dict[str, Any]:
    """The presets as `calibration.json` has them, with the divergence of each of the `methods` on unseen text."""
    described = {key: each.description(kl) for (key, each), kl in zip(choices.items(), measured, strict=True)}
    return {
        preset: {**described[preset, CHAI], "output_aware": described[preset, OUTPUT_AWARE], "rule": rule}
        for preset in PRESETS
    }


def only_what_saves(counts: Sequence[int], kept: Tensor, kv_heads: int) -> list[int]:
    """The counts, with all heads where a count would keep every K head."""
    heads = kept.shape[1]
    return [heads if float(kept[at, count - 1]) >= kv_heads else count for at, count in enumerate(counts)]


def serving_by_count(cost: Tensor, kv_heads: int) -> Tensor:
    """For each layer, number of representatives and head the head that serves it at the least cost.

    From costs `[layers, heads, heads]` to `[layers, heads, heads]`, int64.
    """
    heads = cost.shape[1]
    by_count = [
        torch.stack([representatives(layer, count, kv_heads, kept_by(count, heads, kv_heads)) for layer in cost])
        for count in range(1, heads + 1)
    ]
    return torch.stack(by_count, dim=1)
