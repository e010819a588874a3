"""`chai-eval analyse`: facts about how a model's heads cluster, as data and figures."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from chai_eval.attention.shape import attention_shape
from chai_eval.calibration.analysis import (
    change_table,
    correlation_and_error,
    correlation_table,
    error_table,
    follow_membership,
    size_table,
)
from chai_eval.calibration.counts import elbows
from chai_eval.calibration.drift import described_drift, drift_table, follow_windows, window_ends
from chai_eval.calibration.figures import INSTALL, draw_all, to_be_drawn
from chai_eval.calibration.settings import AnalysisSettings, check_tokens
from chai_eval.calibration.sums import ErrorCurves
from chai_eval.checksum import write_document
from chai_eval.data.text import Text, batches, cut, open_text
from chai_eval.errors import SettingError
from chai_eval.files import disk_errors, write_whole
from chai_eval.methods import build_method
from chai_eval.methods.clusters import cluster_counts
from chai_eval.models import fingerprint, load
from chai_eval.models.embeddings import embedded
from chai_eval.store.provenance import versions


def analyse(settings: AnalysisSettings, command: str) -> Path:
    """Analyse a model and return the folder that was written.

    SettingError for text that isn't there or is empty, counts that don't fit the model, samples longer than it reads or
    too short for windows; RunError where the model, the hub or the disk fails.
    """
    figures = to_be_drawn(settings.figures)
    window = settings.window or settings.probe_tokens
    ends = window_ends(settings.tokens, settings.probe_tokens, window) if settings.drift else []
    text = open_text(settings.text, settings.seed)
    model, tokenizer = load(settings.model)
    build_method("mha").check(model)
    counts = None if settings.counts is None else list(cluster_counts(settings.counts, model))
    together = sample_batches(settings, text, model, tokenizer)
    curves = ErrorCurves(settings.features, settings.algorithm, settings.starts)
    correlation, error = correlation_and_error(model, together, curves, settings.probe_tokens, settings.seed)
    counts = counts or elbows(error)
    membership = follow_membership(model, together, counts, settings.longest_probe)
    tables = {
        "head_correlation": correlation_table(correlation),
        "error_curves": error_table(error),
        "membership_changes": change_table(membership, counts, attention_shape(model)),
        "cluster_sizes": size_table(membership, settings.probe_tokens),
    }
    if settings.drift:
        followed = follow_windows(model, together, counts, settings.probe_tokens, window, ends)
        tables["cluster_drift"] = drift_table(followed, counts, ends, attention_shape(model))
    described = {
        "model": {"name": settings.model.name, "fingerprint": fingerprint(model)},
        "clusters": counts,
        **({"drift": described_drift(tables["cluster_drift"])} if settings.drift else {}),
        "provenance": {
            "text": text.name,
            "samples": sum(map(len, together)),
            "settings": settings.as_config(),
            "versions": versions(),
            "command": command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    }
    folder = settings.out or Path("results") / "analysis" / settings.model.name
    _write(folder, tables, described, figures)
    return folder


def sample_batches(
    settings: AnalysisSettings, text: Text, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[Tensor]:
    """Samples of a text in batches `[samples, tokens]`, few enough to be held: every pass reads the same.

    SettingError for text that is empty, samples longer than the model reads.
    """
    check_tokens(settings.tokens, model)
    samples = list(embedded(model, tokenizer, cut(text.documents, tokenizer, settings.tokens), settings.samples))
    if not samples:
        raise SettingError(f"text: {settings.text} has no text in it; allowed: any text")
    return list(batches(samples, max(settings.batch_tokens // settings.tokens, 1)))


def _write(folder: Path, tables: dict[str, pd.DataFrame], described: dict[str, Any], figures: bool) -> None:
    with disk_errors(f"out: {folder} can't be written"):
        for earlier in folder.glob("cluster_drift.*"):
            earlier.unlink()
        for name, table in tables.items():
            (folder / f"{name}.png").unlink(missing_ok=True)  # of other data than what is written now
            write_whole(folder / f"{name}.parquet", partial(table.to_parquet, index=False))
        if figures:
            draw_all(tables, folder)
        write_document(folder / "analysis.json", described, files=None)


def main(settings: AnalysisSettings, command: str) -> None:
    """Analyse a model and print where what was found lies; raises as `analyse` does."""
    folder = analyse(settings, command)
    sys.stdout.write(f"{folder}\n" + "".join(f"  {path.name}\n" for path in sorted(folder.iterdir())))
    if settings.figures is None and not to_be_drawn(None):
        sys.stdout.write(f"No figures, for want of matplotlib: {INSTALL}\n")
