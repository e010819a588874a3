"""`python -m chai_eval.calibrate`: the offline phase of a model, from its text to the file that methods read.

settings -> model -> samples -> sums (collect) -> sensitivity -> counts (rule) -> memberships -> calibration
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.inject import AttentionShape, attention_shape
from chai_eval.attention.membership import average_linkage
from chai_eval.calibration.collect import Collected, collect, heads_of
from chai_eval.calibration.command import run_command
from chai_eval.calibration.counts import (
    kv_saving,
    predicted_divergence,
    towards_elbows,
    within_budget,
    within_tolerance,
)
from chai_eval.calibration.folder import runs, write_calibration
from chai_eval.calibration.medoids import representatives
from chai_eval.calibration.predictor import SPARSITIES, recall
from chai_eval.calibration.sensitivity import counts_to_measure, layer_divergence
from chai_eval.calibration.settings import CalibrationSettings, check_tokens, parse_calibration
from chai_eval.data.assets import cache_dir
from chai_eval.data.text import cut, open_text
from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.methods.calibrated import LAYOUT, PRESETS, identity
from chai_eval.models import fingerprint, load

USAGE = """\
Calibrate a model: how many clusters each layer keeps, which heads they are, and what the methods need besides.

  python -m chai_eval.calibrate [setting=value ...]

Writes <cache>/calibration/<model>/, where methods find it by the model's name. Interrupted and started again, it goes
on from where it was.
"""

log = logging.getLogger("chai_eval")


def calibrate(settings: CalibrationSettings, command: str) -> Path:
    """Calibrate a model and return the folder that was written.

    Parameters
    ----------
    settings : CalibrationSettings
    command : str
        What is recorded as having made it.

    Raises
    ------
    SettingError
        Text that isn't there or is empty, a model that can't be taken over, samples longer than it reads.
    RunError
        The model, the hub or the disk fails.
    """
    text = open_text(settings.text, settings.seed)
    model, tokenizer = load(settings.model)
    check_tokens(settings.tokens, model)
    build_method("mha").check(model)
    shape, weights = attention_shape(model), fingerprint(model)
    folder = settings.out or cache_dir() / "calibration" / settings.model.name
    samples = cut(text.documents, tokenizer, settings.tokens)
    held_out = list(itertools.islice(samples, settings.sensitivity_samples))
    first = next(samples, None)
    if not held_out:
        raise SettingError(f"text: {settings.text} has no text in it; allowed: any text")
    # Too short for both: what there is serves to calibrate on and to measure on.
    samples = iter(held_out) if first is None else itertools.chain([first], samples)
    kept = folder / f".progress-{_progress_key(settings, weights)}"
    found = collect(model, samples, settings, kept / "sums.pt")
    _say_what_there_was(found, settings)
    measured_at = counts_to_measure(shape.heads, settings.sensitivity_counts)
    measured = layer_divergence(model, held_out, measured_at, settings.probe_tokens, kept)
    cost = predicted_divergence(found.sums.mean("chai_cost"), measured, measured_at)
    presets = {name: choose_counts(settings, at, found, cost, shape) for at, name in enumerate(PRESETS)}
    description = {
        "layout": LAYOUT,
        "model": {
            "name": settings.model.name,
            **identity(model),
            "fingerprint": weights,
            "revision": settings.model.revision,
        },
        "presets": {name: _described(counts, settings, found, shape) for name, counts in presets.items()},
        "measured_counts": measured_at,
        "provenance": _provenance(settings, found, text.name, command),
    }
    if found.predictors:
        description["predictor_recall"] = _recalls(model, found, held_out)
    write_calibration(folder, description, _tensors(found, settings, presets, measured, cost, shape))
    shutil.rmtree(kept)
    return folder


def choose_counts(
    settings: CalibrationSettings, preset: int, found: Collected, cost: Tensor, shape: AttentionShape
) -> list[int]:
    """Cluster counts of one preset by the rule that was asked for; a layer that would save nothing keeps all heads."""
    error, kept = found.sums.mean("error"), found.sums.mean("kept")
    if settings.rule == "budget":
        return within_budget(cost, kept, shape.kv_heads, settings.saving[preset])
    counts = (
        towards_elbows(error, settings.elbow[preset])
        if settings.rule == "elbow"
        else within_tolerance(error, settings.tolerance[preset])
    )
    saves_nothing = [float(kept[at, count - 1]) >= shape.kv_heads for at, count in enumerate(counts)]
    return [shape.heads if nothing else count for nothing, count in zip(saves_nothing, counts, strict=True)]


def _described(
    counts: list[int], settings: CalibrationSettings, found: Collected, shape: AttentionShape
) -> dict[str, Any]:
    saving = kv_saving(counts, found.sums.mean("kept"), shape.kv_heads)
    return {"clusters": runs(counts), "kv_saving": round(saving, 6), "rule": settings.rule}


def _tensors(
    found: Collected,
    settings: CalibrationSettings,
    presets: Mapping[str, list[int]],
    measured: Tensor,
    cost: Tensor,
    shape: AttentionShape,
) -> dict[str, Tensor]:
    tensors = {
        "error_curves": found.sums.mean("error").float(),
        "head_importance": found.sums.mean("importance").float(),
        "output_cost": found.sums.mean("output_cost").float(),
        "chai_output_cost": found.sums.mean("chai_cost").float(),
        "kept_kv_heads": found.sums.mean("kept").float(),
        "measured_divergence": measured.float(),
        "predicted_divergence": cost.float(),
    }
    for kind in ("last_row", "probe"):
        tensors[f"distance.{kind}"] = found.sums.mean(f"distance_{kind}").float()
    for name, counts in presets.items():
        tensors[f"static_membership.{name}"] = static_membership(tensors[f"distance.{settings.features}"], counts)
        tensors[f"output_aware.{name}"] = output_aware_membership(found, counts, shape)
    if found.predictors:
        for layer in range(shape.layers):
            tensors[f"predictor.{layer}.down"] = found.predictors.down[layer].detach().half().cpu()
            tensors[f"predictor.{layer}.up"] = found.predictors.up[layer].detach().half().cpu()
    return tensors


def static_membership(distance: Tensor, counts: Sequence[int]) -> Tensor:
    """For each layer and head the lowest head of its cluster, `[layers, heads]`: average linkage on mean distances.

    Parameters
    ----------
    distance : Tensor [layers, heads, heads]
    counts : sequence of int
    """
    return torch.cat([average_linkage(distance[at : at + 1].double(), count) for at, count in enumerate(counts)])


def output_aware_membership(found: Collected, counts: Sequence[int], shape: AttentionShape) -> Tensor:
    """For each layer and head the head that serves it at the least cost: `[layers, heads]`.

    Where query heads share K/V heads, as many of those are kept as CHAI's representatives keep on average.
    """
    cost, kept = found.sums.mean("output_cost"), found.sums.mean("kept")
    return torch.stack(
        [
            representatives(cost[at], count, shape.kv_heads, max(round(float(kept[at, count - 1])), 1))
            for at, count in enumerate(counts)
        ]
    )


def _recalls(model: PreTrainedModel, found: Collected, held_out: Sequence[Tensor]) -> dict[str, Any]:
    """Share of the true top heads that predictors find on text that they have not seen, by sparsity and layer."""
    assert found.predictors is not None
    by_sample = [
        torch.stack([recall(found.predictors.scores(inputs), norms, each) for each in SPARSITIES])
        for inputs, norms in heads_of(model, held_out)
    ]
    mean = torch.stack(by_sample).mean(0)  # [sparsities, layers]
    return {
        str(sparsity): {"mean": round(float(each.mean()), 4), "layers": [round(float(one), 4) for one in each]}
        for sparsity, each in zip(SPARSITIES, mean, strict=True)
    }


def _provenance(settings: CalibrationSettings, found: Collected, text: str, command: str) -> dict[str, Any]:
    from chai_eval.store.provenance import versions

    return {
        "text": text,
        "text_sha256": found.sha256,
        "samples": int(found.sums.samples),
        "tokens": found.tokens,
        "seed": settings.seed,
        "settings": settings.as_config(),
        "versions": versions(),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _say_what_there_was(found: Collected, settings: CalibrationSettings) -> None:
    samples = int(found.sums.samples)
    if samples < settings.samples or found.tokens < samples * settings.tokens:
        log.info(
            "text: shorter than asked: %d samples of %d tokens given, %d samples with %d tokens in all found and used",
            settings.samples,
            settings.tokens,
            samples,
            found.tokens,
        )


def _progress_key(settings: CalibrationSettings, weights: str) -> str:
    text = json.dumps([settings.collecting(), weights], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _work(values: Mapping[str, Any], arguments: Sequence[str]) -> None:
    settings = parse_calibration(values)
    folder = calibrate(settings, shlex.join(["python", "-m", "chai_eval.calibrate", *arguments]))
    description = json.loads((folder / "calibration.json").read_text(encoding="utf-8"))
    sys.stdout.write(f"{folder}\n")
    for name, preset in description["presets"].items():
        sys.stdout.write(f"{name}: saves {preset['kv_saving']:.1%} of the K,V cache, clusters {preset['clusters']}\n")


if __name__ == "__main__":
    sys.exit(run_command("calibrate", USAGE, _work))
