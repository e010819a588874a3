"""`chai-eval calibrate`: the offline phase of a model, from its text to the file that methods read.

settings -> model -> samples -> sums (collect) -> sensitivity -> counts (rule), memberships -> calibration
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from chai_eval.calibration.choice import (
    CHAI,
    OUTPUT_AWARE,
    Candidates,
    Choices,
    candidates_of,
    choose,
    description,
    methods,
    serving_by_count,
)
from chai_eval.calibration.collect import Collected, collect, error_curves
from chai_eval.calibration.moments import HeadMoments
from chai_eval.calibration.predictor import recalls
from chai_eval.calibration.sensitivity import layer_sensitivity, true_divergences
from chai_eval.calibration.settings import CalibrationSettings, check_tokens
from chai_eval.calibration_file import DESCRIPTION, MOMENTS, write_calibration
from chai_eval.checksum import read_document
from chai_eval.data.assets import cache_dir
from chai_eval.data.text import cut, open_text
from chai_eval.errors import RunError, SettingError
from chai_eval.files import held
from chai_eval.methods import build_method
from chai_eval.methods.moments import KINDS, LAYER_SHARE
from chai_eval.models import fingerprint, load
from chai_eval.models.embeddings import embedded
from chai_eval.models.fingerprint import identity
from chai_eval.store.provenance import versions

# Samples that nothing is calibrated on, which what was chosen and learnt is tested on.
HELD_OUT = 4
LOCK = "calibration.lock"
# Savings of the K,V cache at which the cost of `kv_rank` is told.
RANK_SAVINGS = (0.14, 0.3, 0.45)

log = logging.getLogger("chai_eval")


def calibrate(settings: CalibrationSettings, command: str) -> Path:
    """Calibrate a model and return the folder that was written; the command is recorded as having made it.

    SettingError for text that isn't there or is empty, a model that can't be taken over, samples longer than it reads;
    RunError where the model, the hub or the disk fails.
    """
    text = open_text(settings.text, settings.seed)
    model, tokenizer = load(settings.model)
    check_tokens(settings.tokens, model)
    build_method("mha").check(model)
    shape = attention_shape(model)
    if shape.heads < 2:
        raise SettingError(f"model: {settings.model.name} has a single head, nothing to cluster; allowed: two or more")
    weights = fingerprint(model)
    folder = settings.out or cache_dir() / "calibration" / settings.model.name
    all_samples = cut(text.documents, tokenizer, settings.tokens)
    samples = embedded(model, tokenizer, all_samples, HELD_OUT + max(settings.samples, HELD_OUT + 1))
    measured_on = min(settings.sensitivity_samples, settings.samples)
    read = list(itertools.islice(samples, HELD_OUT + max(measured_on, HELD_OUT + 1)))
    if not read:
        raise SettingError(f"text: {settings.text} has no text in it; allowed: any text")
    # Where the text is too short for both, what there is serves to calibrate on and to test on.
    held_out, first = read[:HELD_OUT], read[HELD_OUT:] if len(read) > 2 * HELD_OUT else read
    measured, samples = first[:measured_on], itertools.chain(first, samples)
    made_for = {"name": settings.model.name, **identity(model), "fingerprint": weights}
    made_for["revision"] = settings.model.revision
    made_how = {
        "text": text.name,
        "sensitivity_samples": len(measured),
        "seed": settings.seed,
        "settings": settings.as_config(),
        "versions": versions(),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    found = serving = None
    with held_for_calibration(folder):
        progress = folder / f".progress-{_progress_key(settings, weights)}"
        if settings.only != "moments":
            found = collect(model, samples, settings, progress / "sums.pt")
            _say_what_there_was(found, settings)
            serving = serving_by_count(found.sums.mean("output_cost"), shape.kv_heads)
        sensitivity = layer_sensitivity(
            model, measured, serving, settings.probe_tokens, settings.seed, progress / "sensitivity.pt"
        )
        if found is not None and serving is not None:
            candidates = candidates_of(found.sums, settings.features, serving, sensitivity.divergence, shape.kv_heads)
            made_how |= {"text_sha256": found.sha256, "samples": found.sums.samples, "tokens": found.tokens}
            described, tensors = _clusters(model, settings, found, candidates, held_out)
            write_calibration(folder, {"model": made_for, **described, "provenance": made_how}, tensors)
        if settings.only != "clusters":
            made_how |= {"samples": len(measured), "tokens": sensitivity.moments.tokens}
            made_how["text_sha256"] = hashlib.sha256(b"".join(each.numpy().tobytes() for each in measured)).hexdigest()
            _write_moments(folder, model, sensitivity.moments, held_out, {"model": made_for, "provenance": made_how})
        shutil.rmtree(progress)
    return folder


def _clusters(
    model: PreTrainedModel,
    settings: CalibrationSettings,
    found: Collected,
    candidates: Mapping[str, Candidates],
    held_out: Sequence[Tensor],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a calibration says of clusters, and its tensors."""
    kv_heads = attention_shape(model).kv_heads
    error = found.sums.mean("error") if error_curves(settings) else None
    choices = choose(settings, candidates, error, kv_heads)
    divergences = true_divergences(model, held_out, methods(choices, settings.probe_tokens))
    described: dict[str, Any] = {"presets": description(choices, divergences, settings.rule)}
    if found.predictors:
        described["predictor_recall"] = recalls(model, found.predictors, held_out)
    return described, _tensors(found, candidates, choices, error)


def _write_moments(
    folder: Path, model: PreTrainedModel, moments: HeadMoments, held_out: Sequence[Tensor], described: dict[str, Any]
) -> None:
    """Write moments, and beside them what `kv_rank` costs at some savings on text that they do not come from."""
    tensors = moments.tensors(attention_shape(model).kv_heads)
    write_calibration(folder, described, tensors, MOMENTS)
    tried = [build_method("kv_rank", moments=str(folder), saving=saving) for saving in RANK_SAVINGS]
    costs = zip(RANK_SAVINGS, true_divergences(model, held_out, tried), strict=True)
    described |= {"kv_rank": [{"kv_saving": saving, "divergence": round(cost, 6)} for saving, cost in costs]}
    write_calibration(folder, described, tensors, MOMENTS)


@contextmanager
def held_for_calibration(folder: Path) -> Iterator[None]:
    """Keep other processes from calibrating into a folder; RunError where one does, or it can't be written."""

    def taken() -> None:
        raise RunError(f"out: another process is calibrating into {folder}")

    try:
        with held(folder / LOCK, taken):
            yield
    except PermissionError as error:
        raise RunError(f"out: {folder} can't be written ({error.strerror})") from error


def _tensors(
    found: Collected, candidates: Mapping[str, Candidates], choices: Choices, error: Tensor | None
) -> dict[str, Tensor]:
    tensors = {
        "head_importance": found.sums.mean("importance"),
        "output_cost": found.sums.mean("output_cost"),
        "kept_kv_heads": found.sums.mean("kept"),
        "distance.last_row": found.sums.mean("distance_last_row"),
        "distance.probe": found.sums.mean("distance_probe"),
        "predicted_divergence": candidates[CHAI].divergence,
        "predicted_divergence.output_aware": candidates[OUTPUT_AWARE].divergence,
    }
    if error is not None:
        tensors["error_curves"] = error
    tensors = {name: each.float() for name, each in tensors.items()}
    tensors |= {f"{kind}.{preset}": each.membership for (preset, kind), each in choices.items()}
    if found.predictors:
        for name in ("down", "up"):
            for layer, weights in enumerate(getattr(found.predictors, name).detach().half().cpu()):
                tensors[f"predictor.{layer}.{name}"] = weights
    return tensors


def _say_what_there_was(found: Collected, settings: CalibrationSettings) -> None:
    samples = found.sums.samples
    if samples < settings.samples or found.tokens < samples * settings.tokens:
        log.info(
            "text: shorter than asked: %d samples of %d tokens given, %d samples with %d tokens in all found and used",
            settings.samples,
            settings.tokens,
            samples,
            found.tokens,
        )


def _progress_key(settings: CalibrationSettings, weights: str) -> str:
    summed = [*KINDS, LAYER_SHARE]  # what another version summed can't be gone on from
    collected = [settings.collecting(), settings.only == "moments", error_curves(settings) is not None, weights, summed]
    text = json.dumps(collected, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main(settings: CalibrationSettings, command: str) -> None:
    """Calibrate a model and print where what was found lies, and what each preset costs; raises as `calibrate` does."""
    folder = calibrate(settings, command)
    sys.stdout.write(f"{folder}\n")
    if settings.only != "moments":
        for name, preset in read_document(folder / DESCRIPTION).content["presets"].items():
            chai, served = (
                math.inf if each["divergence"] is None else each["divergence"]
                for each in (preset, preset["output_aware"])
            )
            sys.stdout.write(
                f"{name}: saves {preset['kv_saving']:.1%} of the K,V cache; KL {chai:.3f} under chai, "
                f"{served:.3f} under output_aware; clusters {preset['clusters']}\n"
            )
    if settings.only != "clusters":
        for each in read_document(folder / f"{MOMENTS}.json").content["kv_rank"]:
            sys.stdout.write(f"kv_rank saving={each['kv_saving']}: KL {each['divergence']:.3f}\n")
