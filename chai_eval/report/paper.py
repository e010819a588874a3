"""The figures that the paper publishes, read from `results/paper/`."""

from __future__ import annotations

import csv
from pathlib import Path

from chai_eval.resources import paper_dir


def published(model: str | None, method: str, task: str, *, tables: Path | None = None) -> float | None:
    """Return what the paper reports for a method on a task.

    Parameters
    ----------
    model
        The model's name in `tables.csv`, None for a model that the paper doesn't have.
    tables
        Another file in the layout of `results/paper/tables.csv`.

    Returns
    -------
    float or None
        For `mha` the score in per cent; for other methods the difference from MHA in percentage points. Scores
        that the paper gives as such (its V-reuse ablation) become differences from its MHA score. None where it
        gives no figure for this task, or a range only.
    """
    if model is None:
        return None
    with (tables or paper_dir() / "tables.csv").open(newline="", encoding="utf-8") as file:
        rows = {(row["model"], row["method"], row["task"]): row for row in csv.DictReader(file)}
    row = rows.get((model, method, task))
    if row is None or row["kind"] not in ("absolute", "delta"):
        return None
    value = float(row["value"])
    if method == "mha" or row["kind"] == "delta":
        return value
    mha = rows.get((model, "mha", task))
    return None if mha is None else round(value - float(mha["value"]), 2)
