"""From what was collected to what methods use: counts by preset, and the memberships fixed at those counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chai_eval.attention.inject import AttentionShape
from chai_eval.attention.membership import average_linkage
from chai_eval.calibration.counts import elbows, kv_saving, towards, within_budget, within_tolerance
from chai_eval.calibration.medoids import kept_by, representatives
from chai_eval.calibration.settings import CalibrationSettings
from chai_eval.calibration.sums import Sums
from chai_eval.calibration_file import PRESETS, runs
from chai_eval.methods import Method, build_method


@dataclass(frozen=True)
class Preset:
    """Counts that belong together, and what they save.

    Attributes
    ----------
    counts : list of int
        Clusters of each layer, for the methods that find clusters by what heads attend to.
    saving : float
        Share of the K,V cache, as CHAI saves it.
    divergence : float
        KL divergence foretold of CHAI, in nats per token: what single layers give, added up.
    static : Tensor [layers, heads], int64
        For each head the lowest head of its cluster.
    served_counts, served_saving, served_divergence, serving
        The same for `output_aware`, whose merges cost something else: as large a saving by counts of its own. `serving`
        is the head that serves each head.
    """

    counts: list[int]
    saving: float
    divergence: float
    static: Tensor
    served_counts: list[int]
    served_saving: float
    served_divergence: float
    serving: Tensor


@dataclass(frozen=True)
class Choice:
    """The presets of a calibration, and the rule that made them."""

    presets: dict[str, Preset]
    rule: str
    predicted: Tensor
    predicted_serving: Tensor

    def methods(self, probe_tokens: int) -> list[Method]:
        """CHAI and `output_aware` under each preset in turn."""
        return [
            method
            for each in self.presets.values()
            for method in (
                build_method("chai", clusters=runs(each.counts), probe_tokens=probe_tokens),
                build_method("output_aware", membership=each.serving.tolist()),
            )
        ]

    def description(self, divergences: Sequence[float]) -> dict[str, Any]:
        """As `calibration.json` has it: a divergence that is infinite as null.

        Parameters
        ----------
        divergences : sequence of float
            Of the `methods`, measured on text that calibration has not seen.
        """
        pairs = zip(divergences[::2], divergences[1::2], strict=True)
        return {
            name: {
                "clusters": runs(each.counts),
                "kv_saving": round(each.saving, 6),
                "predicted_divergence": round(each.divergence, 6),
                "divergence": _rounded(chai),
                "output_aware": {
                    "clusters": runs(each.served_counts),
                    "kv_saving": round(each.served_saving, 6),
                    "predicted_divergence": round(each.served_divergence, 6),
                    "divergence": _rounded(served),
                },
                "rule": self.rule,
            }
            for (name, each), (chai, served) in zip(self.presets.items(), pairs, strict=True)
        }

    def tensors(self) -> dict[str, Tensor]:
        """As `calibration.safetensors` has them."""
        tensors = {
            "predicted_divergence": self.predicted.float(),
            "predicted_divergence.output_aware": self.predicted_serving.float(),
        }
        for name, each in self.presets.items():
            tensors[f"static_membership.{name}"] = each.static
            tensors[f"output_aware.{name}"] = each.serving
        return tensors


def _rounded(divergence: float) -> float | None:
    return round(divergence, 6) if math.isfinite(divergence) else None


def choose(
    settings: CalibrationSettings,
    sums: Sums,
    predicted: Tensor,
    serving: Tensor,
    predicted_serving: Tensor,
    shape: AttentionShape,
) -> Choice:
    """Choose counts by the rule that was asked for, and the memberships at those counts.

    Parameters
    ----------
    predicted : Tensor [layers, heads]
        KL divergence when CHAI clusters one layer alone; column k - 1 with k clusters.
    serving : Tensor [layers, heads, heads]
        See `serving_by_count`.
    predicted_serving : Tensor [layers, heads]
        KL divergence with those.
    """
    heads, kv_heads = shape.heads, shape.kv_heads
    kept = sums.mean("kept")
    kept_serving = torch.tensor([kept_by(count, heads, kv_heads) for count in range(1, heads + 1)]).expand_as(kept)
    distance = sums.mean(f"distance_{settings.features}")
    presets = {}
    for at, name in enumerate(PRESETS):
        if settings.rule == "budget":
            counts = within_budget(predicted, kept, kv_heads, settings.saving[at])
            served = within_budget(predicted_serving, kept_serving, kv_heads, settings.saving[at])
        else:
            error = sums.mean("error")
            by_curve = (
                towards(elbows(error), heads, settings.elbow[at])
                if settings.rule == "elbow"
                else within_tolerance(error, settings.tolerance[at])
            )
            counts, served = (only_what_saves(by_curve, each, kv_heads) for each in (kept, kept_serving))
        presets[name] = Preset(
            counts,
            kv_saving(counts, kept, kv_heads),
            _total(predicted, counts),
            static_membership(distance, counts),
            served,
            kv_saving(served, kept_serving, kv_heads),
            _total(predicted_serving, served),
            torch.stack([serving[layer, count - 1] for layer, count in enumerate(served)]),
        )
    return Choice(presets, settings.rule, predicted, predicted_serving)


def only_what_saves(counts: Sequence[int], kept: Tensor, kv_heads: int) -> list[int]:
    """The counts, with all heads where a count would keep every K head."""
    heads = kept.shape[1]
    return [heads if float(kept[at, count - 1]) >= kv_heads else count for at, count in enumerate(counts)]


def static_membership(distance: Tensor, counts: Sequence[int]) -> Tensor:
    """For each layer and head the lowest head of its cluster, `[layers, heads]`: average linkage on mean distances.

    Parameters
    ----------
    distance : Tensor [layers, heads, heads], float64
    counts : sequence of int
    """
    return torch.cat([average_linkage(distance[at : at + 1], count) for at, count in enumerate(counts)])


def serving_heads(cost: Tensor, counts: Sequence[int], kv_heads: int) -> Tensor:
    """For each layer and head the head that serves it at the least cost, `[layers, heads]`.

    Parameters
    ----------
    cost : Tensor [layers, heads, heads]
    counts : sequence of int
    """
    heads = cost.shape[1]
    return torch.stack(
        [representatives(cost[at], count, kv_heads, kept_by(count, heads, kv_heads)) for at, count in enumerate(counts)]
    )


def serving_by_count(cost: Tensor, kv_heads: int) -> Tensor:
    """For each layer, number of representatives and head the head that serves it: `[layers, heads, heads]`.

    Parameters
    ----------
    cost : Tensor [layers, heads, heads]
    """
    layers, heads, _ = cost.shape
    return torch.stack([serving_heads(cost, [count] * layers, kv_heads) for count in range(1, heads + 1)], dim=1)


def _total(predicted: Tensor, counts: Sequence[int]) -> float:
    return sum(float(predicted[layer, count - 1]) for layer, count in enumerate(counts))
