"""The data of an experiment that scores: a row a run and task, from finished results; all documents in one more."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from chai_eval.evaluation import Result
from chai_eval.experiments.plan import Plan
from chai_eval.report.paper import incomparable, paper_figure, verdict
from chai_eval.report.rows import row as compared_row
from chai_eval.report.statistics import Difference, paired_difference
from chai_eval.report.tables import Row
from chai_eval.run import Compared, Report
from chai_eval.scoring.fidelity import plain, summary
from chai_eval.settings import Settings
from chai_eval.store.record import read_fidelity
from chai_eval.student import student_interval

ALL = "all"
SAVING = "saving"


def ours_frame(plan: Plan, reports: Mapping[str, Report]) -> pd.DataFrame:
    """Scores under each run and under plain attention, what predictions lose, and the paper's figures.

    Returns
    -------
    DataFrame
        Scores in per cent, `difference` with `low` and `high` in percentage points (other metrics as they are), `p` of
        McNemar's exact test, `kl` in nats per token, `same_token`, `held` and `read` as shares; nan where there is
        nothing. `task` is `all` in rows
        that are about the documents of all tasks together.
    """
    rows = []
    for label, settings in plan.runs.items():
        report = reports[label]
        tasks = [
            {**_scored(each), **_close(found.fidelity), **_beside(plan, settings, each, found)}
            for each, found in zip(report.rows, report.compared, strict=True)
        ]
        together = _together(report)
        costs = _costs(report.compared[0].other)
        about = {"run": label, "method": settings.method.name, **_at(plan, settings, costs)}
        options = json.dumps(settings.method.options, sort_keys=True)
        rows += [{**about, **each, **costs, "settings": options} for each in [*tasks, *together]]
    return pd.DataFrame(rows)


def against_frame(plan: Plan, reports: Mapping[str, Report], label: str | None) -> pd.DataFrame | None:
    """Every run against one of them, on the same documents: as `ours_frame`; None where there is none to compare."""
    if label is None or label not in reports:
        return None
    rows, first = [], reports[label]
    for name, settings in plan.runs.items():
        if name == label:
            continue
        scored = []
        for each, a, b in zip(reports[name].rows, first.compared, reports[name].compared, strict=True):
            found = compared_row(each.task, each.metric, _own(a), _own(b), None)
            paper = _paper_against(plan, settings, plan.runs[label], each.task)
            judged = {} if paper is None else {"paper": paper, "verdict": _verdict(plan, found.difference, paper)}
            rows.append({"run": name, "against": label, **_scored(found), **_closer([a], [b]), **judged})
            scored.append((found, a, b))
        rows += [{"run": name, "against": label, **each} for each in _pooled(scored)]
    return pd.DataFrame(rows)


def _own(each: Compared) -> Result:
    return each.mha if each.other is None else each.other


def _scored(row: Row) -> dict[str, Any]:
    """Scores and their difference."""
    times = 100.0 if row.percent else 1.0
    found = row.difference or Difference(math.nan, math.nan, math.nan)
    return {
        "task": row.task, "metric": row.metric, "n": row.n, "mha": times * row.mha,
        "score": times * (row.mha if row.method is None else row.method),
        "difference": found.points * times / 100, "low": found.low * times / 100, "high": found.high * times / 100,
        "p": math.nan if found.p is None else found.p,
    }  # fmt: skip


def _close(said: Mapping[str, Any] | None) -> dict[str, Any]:
    """How close predictions stay to plain attention's."""
    if said is None:
        return {}
    ends = {"kl": "value", "kl_low": "low", "kl_high": "high"}
    infinite = bool(said.get("infinite_tokens"))
    kl = {name: math.inf if infinite and name == "kl" else said["divergence"][end] for name, end in ends.items()}
    return {**kl, "same_token": said["agreement"]["value"], "compared": said["documents"]}


def _beside(plan: Plan, settings: Settings, row: Row, found: Compared) -> dict[str, Any]:
    """The paper's figure, and what it says of ours."""
    paper = paper_figure(plan.experiment.paper_model, settings.method, row.task)
    if found.other is not None:
        return {"paper": paper, "verdict": _verdict(plan, row.difference, paper)}
    error = found.mha.record["metrics"][row.metric].get("stderr")
    half = 196 * error if isinstance(error, float) else math.nan
    score = Difference(100 * row.mha, 100 * row.mha - half, 100 * row.mha + half)
    return {"paper": paper, "verdict": _verdict(plan, score, paper)}


def _verdict(plan: Plan, ours: Difference | None, paper: float | str | None) -> str:
    why = incomparable(plan.scoring.model, plan.experiment.paper_model)
    if why is not None or ours is None:
        return why or "not comparable: one score"
    return verdict((ours.points, ours.low, ours.high), paper)


def _paper_against(plan: Plan, one: Settings, other: Settings, task: str) -> float | None:
    """The paper's difference between two methods."""
    model = plan.experiment.paper_model
    found = [0.0 if each.method.name == "mha" else paper_figure(model, each.method, task) for each in (one, other)]
    return round(found[0] - found[1], 2) if isinstance(found[0], float) and isinstance(found[1], float) else None


def _costs(result: Result | None) -> dict[str, float]:
    """Bytes held and read, as shares of plain attention's."""
    of_mha = {} if result is None else result.record["costs"]["of_mha"]
    return {name: of_mha.get(name, 1.0) for name in ("held", "read")}


def _at(plan: Plan, settings: Settings, costs: Mapping[str, float]) -> dict[str, Any]:
    """Where a run lies in a figure."""
    x = plan.experiment.x
    if x is None:
        return {}
    return {x: 100 * (1 - costs["held"]) if x == SAVING else settings.method.options.get(x, math.nan)}


def _together(report: Report) -> list[dict[str, Any]]:
    """The documents of all tasks as those of one, where there are several and all are right or wrong."""
    tasks = list(zip(report.rows, report.compared, strict=True))
    found = _all_documents([(row, each.mha, each.other) for row, each in tasks])
    frames = [frame for each in report.compared if (frame := _fidelity(each)) is not None]
    if found and frames:
        documents = sum(map(len, frames))
        found[0] |= _close({**plain(summary(pd.concat(frames, ignore_index=True))), "documents": documents})
    return found


def _pooled(scored: list[tuple[Row, Compared, Compared]]) -> list[dict[str, Any]]:
    found = _all_documents([(row, _own(a), _own(b)) for row, a, b in scored])
    return [{**each, **_closer([a for _, a, _ in scored], [b for *_, b in scored])} for each in found]


def _all_documents(tasks: list[tuple[Row, Result, Result | None]]) -> list[dict[str, Any]]:
    """Scores of all documents, under one and (unless it is None) another; nothing where they are no shares of 1."""
    if len(tasks) < 2 or not all(row.percent and row.metric in one.samples for row, one, _ in tasks):
        return []
    before = np.concatenate([one.samples[row.metric].to_numpy(float) for row, one, _ in tasks])
    second = [other.samples[row.metric].to_numpy(float) for row, _, other in tasks if other is not None]
    row = Row(ALL, "accuracy", len(before), float(before.mean()))
    if second:
        after = np.concatenate(second)
        row = replace(row, method=float(after.mean()), difference=paired_difference(before, after))
    return [_scored(row)]


def _fidelity(each: Compared) -> pd.DataFrame | None:
    """The documents on which a result was compared with plain attention: those that were asked about."""
    if each.other is None or each.fidelity is None:
        return None
    asked = each.fidelity["asked"]
    samples = read_fidelity(each.other.folder.path, asked)
    if samples is None:
        return None
    return samples[samples["doc_id"].isin(each.mha.samples["doc_id"].drop_duplicates().head(asked))]


def _closer(before: list[Compared], after: list[Compared]) -> dict[str, Any]:
    """How much more predictions lose, document by document (Student's interval), in nats per token."""
    differences: list[NDArray[np.float64]] = []
    for a, b in zip(before, after, strict=True):
        first, second = _fidelity(a), _fidelity(b)
        if first is None or second is None:
            return {}
        both = first.merge(second, on="doc_id", suffixes=("_a", "_b"))
        differences.append((both["divergence_b"] - both["divergence_a"]).to_numpy(float))
    values = np.concatenate(differences)
    if not len(values) or not np.isfinite(values).all():
        return {}
    low, high = student_interval(values)
    return {"kl_difference": float(values.mean()), "kl_difference_low": low, "kl_difference_high": high}
