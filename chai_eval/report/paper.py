"""The figures that the paper publishes, read from `results/paper/`, and in words whether ours agree."""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path

from chai_eval.resources import paper_dir
from chai_eval.settings import MethodSettings, ModelSettings

LEGEND = (
    "agrees: the paper's figure lies in our 95 % interval; differs by: how far ours is from the paper's, where it "
    "doesn't."
)


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


def row_name(method: MethodSettings) -> str:
    """What the paper's tables call a method."""
    return f"dejavu_{100 * method.options['sparsity']:.0f}" if method.name == "dejavu" else method.name


def paper_figure(model: str | None, method: MethodSettings, task: str) -> float | str | None:
    """What the paper has for a method on a task: see `published`; a text where it gives a range over its tasks."""
    found = published(model, row_name(method), task)
    return found if found is not None else _ranges().get((model, row_name(method)))


def incomparable(model: ModelSettings, paper_model: str | None, *, trained: bool = True) -> str | None:
    """Why nothing of a model can be held against the paper's figures; None where it can.

    `trained` says whether figures depend on the weights, as bytes and times don't.
    """
    if paper_model is None:
        return "not comparable: the paper has no figures for it"
    if model.paper != paper_model:
        return f"not comparable: the paper's figures are of {paper_model}"
    if trained and model.weights == "random":
        return "not comparable: the weights are random"
    return None


def verdict(ours: tuple[float, float, float], paper: float | str | None, unit: str = "points") -> str:
    """Whether a figure of ours agrees with the paper's.

    Parameters
    ----------
    ours : value, low, high
        With its 95 % interval; low and high are the value itself where it is counted rather than sampled, nan where
        there is no interval.
    paper : float, str or None
    unit : str
        Of both.
    """
    value, low, high = ours
    if paper is None:
        return "not comparable: the paper has no figure for it"
    if isinstance(paper, str):
        return "not comparable: the paper gives a range over its tasks"
    if math.isnan(low) or math.isnan(high):
        return "not comparable: no interval"
    if low <= paper <= high or (low == high and math.isclose(value, paper, abs_tol=0.05)):
        return "agrees"
    return f"differs by {value - paper:+.2f} {unit}"


def headline(quantity: str, model: str | None) -> float | None:
    """One of the paper's headline figures; None where it has none for the model."""
    with (paper_dir() / "headlines.csv").open(newline="", encoding="utf-8") as file:
        found = {(row["quantity"], row["model"]): row["value"] for row in csv.DictReader(file)}
    value = found.get((quantity, model or ""))
    return None if value is None else float(value)


def shown(paper: float | str | None, signed: bool = True) -> str:
    """A figure of the paper's in a table."""
    if paper is None or isinstance(paper, str):
        return paper or "–"
    return f"{paper:+.2f}" if signed else f"{paper:.1f}"


@cache
def _ranges() -> dict[tuple[str | None, str], str]:
    with (paper_dir() / "tables.csv").open(newline="", encoding="utf-8") as file:
        return {
            (row["model"], row["method"]): row["value"].replace("..", " to ")
            for row in csv.DictReader(file)
            if row["task"] == "any"
        }
