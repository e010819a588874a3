"""Cluster counts: how many clusters each layer keeps, as users write them and as methods need them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import Calibration, calibrated_presets, check_description, runs
from chai_eval.errors import SettingError
from chai_eval.resources import paper_dir

# A preset's name, one count per layer, or runs of [count, layers].
ClusterSpec = str | Sequence[int] | Sequence[Sequence[int]]

FORMS = "a preset, a list with one count per layer, or a run-length list such as [[9, 17], [3, 13]]"

# How far a saving may lie from the one that was asked for, as a part of it.
NEAR = 0.1

# No model comes near it; a run is only expanded where it can be of one.
MOST_LAYERS = 10_000


def preset_runs(name: str) -> list[list[int]]:
    """Run-length list of a preset: one that the paper's authors published, or one of a calibration.

    Raises
    ------
    SettingError
        Where there is no such preset, or its calibration is damaged: another one of that name would give other counts.
    """
    published: dict[str, Any] = json.loads((paper_dir() / "cluster_counts.json").read_text())
    if name in published:
        return published[name]["runs"]
    check_description(name.rpartition("-")[0], "method.clusters")
    calibrated = calibrated_presets()
    if name in calibrated:
        return calibrated[name]
    allowed = ", ".join(sorted({*published, *calibrated}))
    raise SettingError(f"method.clusters: no preset {name!r}; allowed: {allowed}, or a list of counts")


def check_clusters(spec: object) -> None:
    """Refuse what can't be cluster counts of any model.

    Raises
    ------
    SettingError
    """
    if spec is None or isinstance(spec, str):
        return
    if not isinstance(spec, Sequence) or not spec:
        raise SettingError(f"method.clusters: {spec!r} given; allowed: {FORMS}")
    _expand(spec)


def resolved(spec: ClusterSpec | None) -> list[list[int]] | None:
    """The runs of [count, layers] that a spec stands for; a preset is read, so that what it says is known."""
    if spec is None:
        return None
    return runs(_expand(preset_runs(spec) if isinstance(spec, str) else spec))


def cluster_counts(spec: ClusterSpec | None, model: PreTrainedModel) -> tuple[int, ...]:
    """Clusters that each layer of a model keeps.

    Parameters
    ----------
    spec : preset name, list of counts, or run-length list
    model : PreTrainedModel

    Returns
    -------
    tuple of int
        One count per layer, each from 1 to the number of heads.

    Raises
    ------
    SettingError
        Where the spec is no such thing or does not fit the model.
    """
    shape = attention_shape(model)
    if spec is None:
        raise SettingError(
            f"method.clusters: no cluster counts are known for this model of {shape.layers} layers of {shape.heads} "
            f"heads; python -m chai_eval calibrate model=<name> finds some; allowed: {FORMS}"
        )
    counts = _expand(preset_runs(spec) if isinstance(spec, str) else spec)
    named = f"preset {spec!r} has" if isinstance(spec, str) else ""
    if len(counts) != shape.layers:
        raise SettingError(
            f"method.clusters: {named or ''}{' ' if named else ''}{len(counts)} counts given for a model of "
            f"{shape.layers} layers; allowed: one count per layer"
        )
    for layer, count in enumerate(counts):
        if not 1 <= count <= shape.heads:
            raise SettingError(
                f"method.clusters: {count} given for layer {layer}; allowed: 1 to {shape.heads} (the layer's heads)"
            )
    return counts


def counts_within(known: Calibration, cost: str, kept: Tensor, kv_heads: int, saving: float) -> list[int] | None:
    """Counts that save a share of the K,V cache at the least cost; None where a share comes out that is far from it.

    Parameters
    ----------
    cost : str
        Tensor of the calibration that has the cost of every count, `[layers, heads]`.
    kept : Tensor [layers, heads]
        Key heads that every count keeps.
    """
    from chai_eval.calibration.counts import kv_saving, within_budget

    counts = within_budget(known.tensor(cost).double(), kept, kv_heads, saving)
    return counts if abs(kv_saving(counts, kept, kv_heads) - saving) < NEAR * saving else None


def _expand(spec: Sequence[Any]) -> tuple[int, ...]:
    """One count per layer from either kind of list."""
    counts: list[int] = []
    for entry in spec:
        run = [entry, 1] if isinstance(entry, int) else entry
        if (
            isinstance(run, str)
            or not isinstance(run, Sequence)
            or len(run) != 2
            or not all(isinstance(number, int) and not isinstance(number, bool) for number in run)
        ):
            raise SettingError(f"method.clusters: {entry!r} given; allowed: {FORMS}")
        if min(run) < 1:
            raise SettingError(f"method.clusters: {entry!r} given; allowed: counts from 1 to the model's heads")
        if len(counts) + run[1] > MOST_LAYERS:
            raise SettingError(f"method.clusters: {entry!r} given; allowed: counts of at most {MOST_LAYERS} layers")
        counts.extend([run[0]] * run[1])
    return tuple(counts)
