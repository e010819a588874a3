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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.inject import AttentionShape, attention_shape
from chai_eval.calibration.choice import choose, serving_by_count
from chai_eval.calibration.collect import Collected, collect, heads_of
from chai_eval.calibration.predictor import SPARSITIES, Predictors, recall
from chai_eval.calibration.sensitivity import layer_divergence, true_divergences
from chai_eval.calibration.settings import CalibrationSettings, check_tokens
from chai_eval.calibration_file import DESCRIPTION, identity, write_calibration
from chai_eval.checksum import read_document
from chai_eval.data.assets import cache_dir
from chai_eval.data.text import cut, open_text
from chai_eval.errors import RunError, SettingError
from chai_eval.files import held
from chai_eval.methods import build_method
from chai_eval.models import fingerprint, load
from chai_eval.models.embeddings import embedded

# Samples that nothing is calibrated on, which what was chosen and learnt is tested on.
HELD_OUT = 4
LOCK = "calibration.lock"

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
    if attention_shape(model).heads < 2:
        raise SettingError(f"model: {settings.model.name} has a single head, nothing to cluster; allowed: two or more")
    shape, weights = attention_shape(model), fingerprint(model)
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
    with held_for_calibration(folder):
        kept = folder / f".progress-{_progress_key(settings, weights)}"
        found = collect(model, samples, settings, kept / "sums.pt")
        _say_what_there_was(found, settings)
        serving = serving_by_count(found.sums.mean("output_cost"), shape.kv_heads)
        predicted = layer_divergence(model, measured, serving, settings.probe_tokens, settings.seed, kept)
        choice = choose(settings, found.sums, predicted[0], serving, predicted[1], shape)
        divergences = true_divergences(model, held_out, choice.methods(settings.probe_tokens))
        description: dict[str, Any] = {
            "model": _described(model, settings, weights),
            "presets": choice.description(divergences),
            "provenance": _provenance(settings, found, len(measured), text.name, command),
        }
        if found.predictors:
            description["predictor_recall"] = _recalls(model, found.predictors, held_out)
        tensors = {**_tensors(found, shape), **choice.tensors()}
        write_calibration(folder, description, tensors)
        shutil.rmtree(kept)
    return folder


@contextmanager
def held_for_calibration(folder: Path) -> Iterator[None]:
    """Keep other processes from calibrating into a folder while the context lasts.

    Raises
    ------
    RunError
        Where one is at it, or the folder can't be written.
    """

    def taken() -> None:
        raise RunError(f"out: another process is calibrating into {folder}")

    try:
        with held(folder / LOCK, taken):
            yield
    except PermissionError as error:
        raise RunError(f"out: {folder} can't be written ({error.strerror})") from error


def _described(model: PreTrainedModel, settings: CalibrationSettings, weights: str) -> dict[str, Any]:
    return {
        "name": settings.model.name,
        **identity(model),
        "fingerprint": weights,
        "revision": settings.model.revision,
    }


def _tensors(found: Collected, shape: AttentionShape) -> dict[str, Tensor]:
    tensors = {
        "error_curves": found.sums.mean("error").float(),
        "head_importance": found.sums.mean("importance").float(),
        "output_cost": found.sums.mean("output_cost").float(),
        "kept_kv_heads": found.sums.mean("kept").float(),
        "distance.last_row": found.sums.mean("distance_last_row").float(),
        "distance.probe": found.sums.mean("distance_probe").float(),
    }
    if found.predictors:
        for layer in range(shape.layers):
            tensors[f"predictor.{layer}.down"] = found.predictors.down[layer].detach().half().cpu()
            tensors[f"predictor.{layer}.up"] = found.predictors.up[layer].detach().half().cpu()
    return tensors


def _recalls(model: PreTrainedModel, predictors: Predictors, held_out: Sequence[Tensor]) -> dict[str, Any]:
    """Share of the true top heads that predictors find on text that they have not seen, by sparsity and layer."""
    by_sample = [
        torch.stack([recall(predictors.scores(inputs), norms, each) for each in SPARSITIES])
        for inputs, norms in heads_of(model, held_out)
    ]
    mean = torch.stack(by_sample).mean(0)  # [sparsities, layers]
    return {
        str(sparsity): {"mean": round(float(each.mean()), 4), "layers": [round(float(one), 4) for one in each]}
        for sparsity, each in zip(SPARSITIES, mean, strict=True)
    }


def _provenance(
    settings: CalibrationSettings, found: Collected, measured: int, text: str, command: str
) -> dict[str, Any]:
    from chai_eval.store.provenance import versions

    return {
        "text": text,
        "text_sha256": found.sha256,
        "samples": int(found.sums.samples),
        "tokens": found.tokens,
        "sensitivity_samples": measured,
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


def main(settings: CalibrationSettings, command: str) -> None:
    """Calibrate a model and print where what was found lies, and what each preset costs; raises as `calibrate` does."""
    folder = calibrate(settings, command)
    description = read_document(folder / DESCRIPTION).content
    sys.stdout.write(f"{folder}\n")
    for name, preset in description["presets"].items():
        chai, served = (
            math.inf if each["divergence"] is None else each["divergence"] for each in (preset, preset["output_aware"])
        )
        sys.stdout.write(
            f"{name}: saves {preset['kv_saving']:.1%} of the K,V cache; KL {chai:.3f} under chai, "
            f"{served:.3f} under output_aware; clusters {preset['clusters']}\n"
        )
