"""From two finished results to one row of the table, and from a run to the lines above it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from chai_eval.errors import RunError
from chai_eval.report.statistics import Difference, paired_difference
from chai_eval.report.tables import Header, Row

if TYPE_CHECKING:
    from chai_eval.methods import Method
    from chai_eval.scored import Result
    from chai_eval.session import LoadedModel
    from chai_eval.settings import Settings


def row(task: str, primary: str | None, mha: Result, other: Result | None, paper: float | None) -> Row:
    """Compare a method with its baseline on one task.

    Parameters
    ----------
    primary
        The metric to show; the task's first one where None.
    other
        Result of the method, None when the baseline stands alone.
    paper
        The paper's figure.

    Raises
    ------
    RunError
        Where the two results are not about the same documents.
    """
    metrics: Mapping[str, Any] = mha.record["metrics"]
    metric = primary if primary is not None and primary in metrics else next(iter(metrics))
    value = float(metrics[metric]["value"])
    before = _scores(mha, metric)
    percent = before is not None and bool(((before >= 0) & (before <= 1)).all())
    n = int(mha.record["n_documents"])
    if other is None:
        return Row(task, metric, n, value, percent=percent, paper=paper)
    if mha.samples["doc_hash"].tolist() != other.samples["doc_hash"].tolist():
        raise RunError(f"{task}: {mha.folder.path} and {other.folder.path} are not about the same documents")
    second = float(other.record["metrics"][metric]["value"])
    after = _scores(other, metric)
    if before is None or after is None:
        difference = Difference(100 * (second - value), math.nan, math.nan)
    else:
        difference = paired_difference(before, after)
    return Row(task, metric, n, value, second, difference, percent, paper)


def describe(settings: Settings, loaded: LoadedModel, method: Method) -> Header:
    """Say what the table is about: model, method with its settings, documents, folder."""
    model, task = settings.model, settings.task
    source = f" ({model.path})" if model.path else ""
    weights = ", random weights" if model.weights == "random" else ""
    options = "".join(f", {name} {_brief(value)}" for name, value in method.settings().items())
    documents = "all" if task.limit is None else f"the first {task.limit} of each task"
    facts = (
        ("model", f"{model.name}{source}{weights}, {loaded.dtype} on {loaded.device}"),
        ("method", method.name + options),
        ("documents", documents),
        ("results", str(settings.results_dir / model.name)),
    )
    return Header(method.name, facts, in_paper=model.paper is not None)


def _scores(result: Result, metric: str) -> NDArray[np.float64] | None:
    """Scores per document, None where the metric isn't their mean (perplexities, F1)."""
    column, _, filtered = metric.removesuffix(")").partition(" (")
    samples = result.samples
    if filtered and "filter" in samples:
        samples = samples[samples["filter"] == filtered]
    if column not in samples or not pd.api.types.is_numeric_dtype(samples[column]):
        return None
    scores = samples[column].to_numpy(dtype=float)
    value = float(result.record["metrics"][metric]["value"])
    return scores if scores.size and math.isclose(scores.mean(), value, abs_tol=1e-9) else None


def _brief(value: Any) -> str:
    """Write cluster counts as runs: `9×17 3×13` for 17 layers of 9 and 13 of 3."""
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
