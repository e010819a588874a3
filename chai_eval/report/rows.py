"""From two finished results to one row of the table, and from a run to the lines above it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from chai_eval.errors import RunError
from chai_eval.report.statistics import (
    Difference,
    bits_per_byte,
    bootstrap_difference,
    paired_difference,
    perplexity,
)
from chai_eval.report.tables import Header, Row
from chai_eval.task_settings import told

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from chai_eval.evaluation import Result
    from chai_eval.methods import Method
    from chai_eval.session import LoadedModel
    from chai_eval.settings import Settings


def row(
    task: str,
    primary: str | None,
    mha: Result,
    other: Result | None,
    paper: float | None,
    fidelity: Mapping[str, Any] | None = None,
) -> Row:
    """Compare a method with its baseline on one task.

    Parameters
    ----------
    primary
        The metric to show; the task's first one where None.
    other
        Result of the method, None when the baseline stands alone.
    paper
        The paper's figure.
    fidelity
        How close the method's predictions are to the baseline's, as its record has it.

    Raises
    ------
    RunError
        Where the two results are not about the same documents, or one lacks what the other has.
    """
    metrics: Mapping[str, Any] = mha.record["metrics"]
    metric = primary if primary is not None and primary in metrics else next(iter(metrics))
    value = float(metrics[metric]["value"])
    before = scores(mha, metric)
    percent = before is not None and bool(((before >= 0) & (before <= 1)).all())
    n = int(mha.record["n_documents"])
    if other is None:
        return Row(task, metric, n, value, percent=percent, paper=paper)
    for each in (mha, other):  # one without checksums may be damaged
        if metric not in each.record["metrics"] or "doc_hash" not in each.samples:
            raise RunError(f"{each.folder.path} lacks {metric} or doc_hash; move the folder away to score again")
    if mha.samples["doc_hash"].tolist() != other.samples["doc_hash"].tolist():
        raise RunError(f"{task}: {mha.folder.path} and {other.folder.path} are not about the same documents")
    second = float(other.record["metrics"][metric]["value"])
    close = fidelity or {}
    divergence, agreement = ((close.get(name) or {}).get("value") for name in ("divergence", "agreement"))
    infinite = int(close.get("infinite_tokens", 0))
    return Row(
        task, metric, n, value, second, _difference(metric, mha, other), percent, paper,
        math.inf if infinite else divergence, agreement, infinite, close.get("tokens"),
    )  # fmt: skip


def describe(settings: Settings, loaded: LoadedModel, method: Method) -> Header:
    """Say what the table is about: model, method with its settings, documents, folder."""
    model, task = settings.model, settings.task
    source = f" ({model.path})" if model.path else ""
    weights = ", random weights" if model.weights == "random" else ""
    options = "".join(f", {name} {brief(value)}" for name, value in method.settings().items())
    prompts = told(task.prompts.as_config())
    documents = "all" if task.limit is None else f"the first {task.limit} of each task"
    facts = (
        ("model", f"{model.name}{source}{weights}, {loaded.dtype} on {loaded.device}"),
        ("method", method.name + options),
        *(() if method.name == "mha" else (("costs", cost_line(method, loaded.model)),)),
        ("documents", documents),
        *((("prompts", ", ".join(prompts)),) if prompts else ()),
        *((("scoring", "decode: token by token through the cache"),) if settings.scoring == "decode" else ()),
        ("results", str(settings.results_dir / model.name)),
    )
    return Header(method.name, facts, in_paper=model.paper is not None)


def cost_line(method: Method, model: PreTrainedModel) -> str:
    """What a method costs while it decodes, as shares of plain attention's costs."""
    from chai_eval.methods.costs import described_costs

    found = described_costs(method, model)
    held, read, products = (f"{100 * found['of_mha'][name]:.1f} %" for name in ("held", "read", "multiplications"))
    line = f"K,V bytes held {held}, read by a decoded token {read}, its multiplications {products} of MHA's"
    return f"{line} (the saving is simulated)" if found["simulated"] else line


def _difference(metric: str, mha: Result, other: Result) -> Difference:
    """The difference with the interval that belongs to the metric; without one where we don't know how it is made."""
    before, after = scores(mha, metric), scores(other, metric)
    if before is not None and after is not None:
        return paired_difference(before, after)
    first, second = _parts(mha, metric), _parts(other, metric)
    values = [_value(each, metric) for each in (mha, other)]
    if first is not None and second is not None:
        for aggregate in (perplexity, bits_per_byte):
            made = [float(aggregate(each[:, 0], each[:, 1], 0)) for each in (first, second)]
            if np.allclose(made, values, rtol=1e-6, atol=0):
                return bootstrap_difference(aggregate, first, second)
    return Difference(100 * (values[1] - values[0]), math.nan, math.nan)


def _value(result: Result, metric: str) -> float:
    return float(result.record["metrics"][metric]["value"])


def _column(result: Result, metric: str) -> pd.Series[Any] | None:
    """What the samples hold about a metric, one entry per document."""
    column, _, filtered = metric.removesuffix(")").partition(" (")
    samples = result.samples
    if filtered and "filter" in samples:
        samples = samples[samples["filter"] == filtered]
    return samples[column] if column in samples and len(samples) else None


def scores(result: Result, metric: str) -> NDArray[np.float64] | None:
    """Scores per document, None where the metric isn't their mean (perplexities, F1)."""
    column = _column(result, metric)
    if column is None or not pd.api.types.is_numeric_dtype(column):
        return None
    scores = column.to_numpy(dtype=float)
    return scores if math.isclose(scores.mean(), _value(result, metric), abs_tol=1e-9) else None


def _parts(result: Result, metric: str) -> NDArray[np.float64] | None:
    """Log-likelihood and weight of each document, [documents, 2], None where the samples hold something else."""
    column = _column(result, metric)
    if column is None:
        return None
    if pd.api.types.is_numeric_dtype(column):
        return np.column_stack([column.to_numpy(dtype=float), np.ones(len(column))])
    try:
        parts = np.array([json.loads(each) for each in column], dtype=float)
    except (TypeError, ValueError):
        return None
    return parts if parts.shape == (len(column), 2) and (parts[:, 1] > 0).all() else None


def brief(value: Any) -> str:
    """Write cluster counts as runs, `9×17 3×13` for 17 layers of 9 and 13 of 3, and a calibration by its hash."""
    if isinstance(value, dict) and "sha256" in value:
        return " ".join(["of calibration", value["sha256"][:8], *(str(value[key]) for key in value if key != "sha256")])
    if not isinstance(value, list | tuple) or not value:
        return str(value)
    if all(isinstance(run, list | tuple) and len(run) == 2 for run in value):
        runs = [(count, layers) for count, layers in value]
    else:
        runs = []
        for count in value:
            if runs and runs[-1][0] == count:
                runs[-1] = (count, runs[-1][1] + 1)
            else:
                runs.append((count, 1))
    return " ".join(f"{count}×{layers}" for count, layers in runs)
