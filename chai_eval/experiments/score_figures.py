"""Figures of experiments that score: differences run by run, or over what was varied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from chai_eval.experiments.figures import Curve, legend, lines, panels
from chai_eval.experiments.plan import Plan
from chai_eval.experiments.score_rows import ALL, SAVING
from chai_eval.frontier.figure import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# How far apart the lines of a run's tasks lie, of the way to the next run.
SPREAD = 0.7


def dots(frame: pd.DataFrame, plan: Plan) -> Figure:
    """A line a run and task: its difference from plain attention with its interval, the paper's as an open diamond."""
    own = frame[frame["difference"].notna()]
    runs, tasks = list(dict.fromkeys(own["run"])), list(dict.fromkeys(own["task"]))
    figure, (axes,) = panels(plan.title, 1, size=(7.2, 1.6 + 0.22 * len(runs) * len(tasks)))
    ours = bool((own["method"] != "mha").any())
    for number, task in enumerate(tasks):
        each = own[own["task"] == task]
        shift = SPREAD * (number / max(len(tasks) - 1, 1) - 0.5)
        at = [runs.index(run) + shift for run in each["run"]]
        whiskers = [each["difference"] - each["low"], each["high"] - each["difference"]]
        colour = COLOURS[number % len(COLOURS)]
        axes.errorbar(
            each["difference"], at, xerr=whiskers, linestyle="none", color=colour, capsize=2, markersize=4,
            marker=MARKERS[number % len(MARKERS)], label="all documents" if task == ALL else task,
        )  # fmt: skip
        known = [(value, y) for value, y in zip(each["paper"], at, strict=True) if isinstance(value, float)]
        axes.plot(
            [value for value, _ in known], [y for _, y in known], "D", color=colour, fillstyle="none", markersize=7
        )
    if ours and pd.to_numeric(own["paper"], errors="coerce").notna().any():
        axes.plot([], [], "D", color="0.3", fillstyle="none", label=f"the paper's, {plan.experiment.paper_model}")
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(runs)), runs)
    axes.invert_yaxis()
    axes.set_xlabel(f"difference from MHA, percentage points (bars: 95 % intervals), {plan.model}")
    legend(axes)
    return figure


def over(frame: pd.DataFrame, plan: Plan) -> Figure:
    """Accuracy lost and predictions changed, over what was varied: a line a task, or a method at equal savings."""
    x = str(plan.experiment.x)
    own = frame[frame["difference"].notna() & frame[x].notna()]
    by = "method" if x == SAVING else "task"
    if x == SAVING and (own["task"] == ALL).any():
        own = own[own["task"] == ALL]
    names = list(dict.fromkeys(own[by]))
    figure, (left, right) = panels(f"{plan.title}, {plan.model}", 2)
    difference = "accuracy, difference from MHA, percentage points"
    lines(left, own, Curve(x, "difference", "low", "high", by), difference, names=names)
    left.axhline(0, color="0.3", linewidth=0.8)
    close = own[own["kl"].notna()] if "kl" in own else own.iloc[:0].assign(kl=0.0, kl_low=0.0, kl_high=0.0)
    kl = "KL(MHA ‖ method), nats per token"
    lines(right, close, Curve(x, "kl", "kl_low", "kl_high", by), kl, names=names)
    for axes in (left, right):
        axes.set_xlabel("K,V bytes saved, %" if x == SAVING else x.replace("_", " "))
        if x != SAVING:
            axes.set_xscale("log", base=2)
            values = sorted({float(each) for each in own[x]})
            axes.set_xticks(values, [f"{each:g}" for each in values])
    if len(close) and (close["kl"] > 0).all():
        right.set_yscale("log")
    legend(right, "bars: 95 % intervals")
    return figure
