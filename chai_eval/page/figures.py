"""Figures of a report: loss over bytes, differences with intervals, sweeps; told apart without colours as well."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from chai_eval.calibration.figures import change_figure, drift_figure
from chai_eval.frontier.figure import COLOURS, MARKERS
from chai_eval.report.pairs import Pair
from chai_eval.report.ranking import pool, task_losses
from chai_eval.report.records import Records, Stored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Values of a setting that make a curve.
FEWEST = 3
SETTLED = "all tasks"


@dataclass(frozen=True)
class Drawn:
    """A figure, what its files are called, whose it is, and what stands below it."""

    name: str
    model: str
    title: str
    caption: str
    command: str
    figure: Figure


def draw_all(records: Records, found: Sequence[Pair], command: str) -> list[Drawn]:
    """All figures that the records allow; `command` made the report."""
    methods = {each.method for each in found} | {
        str(point["method"]) for each in records.frontiers for point in each.content["points"]
    }
    numbers = {method: number for number, method in enumerate(sorted(methods))}
    drawn = [_frontier(each, numbers) for each in records.frontiers]
    for model in dict.fromkeys(each.model for each in found):
        own = [each for each in found if each.model == model]
        drawn.append(_differences(model, own, command))
        drawn += _sweeps(model, own, numbers, command)
        drawn += _by_saving(model, own, numbers, command)
    return drawn + [one for each in records.analyses for one in _membership(each)]


def new_figure(width: float, height: float) -> Figure:
    """A figure of its own, not pyplot's: nothing global, and no display is needed. Inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def style(number: int) -> dict[str, Any]:
    """Colour and marker of a method's curve; where colours come again, they do with another marker."""
    colour, again = number % len(COLOURS), number // len(COLOURS)
    return {"color": COLOURS[colour], "marker": MARKERS[(number + again) % len(MARKERS)], "markersize": 5}


def _curve(axes: Axes, number: int, label: str, points: Sequence[tuple[float, float, float, float]]) -> None:
    """Points as (x, value, low, high), a line between them; intervals that aren't finite are left out."""
    x, y, low, high = zip(*sorted(points), strict=True)
    below = [value - end if math.isfinite(end) else 0 for value, end in zip(y, low, strict=True)]
    above = [end - value if math.isfinite(end) else 0 for value, end in zip(y, high, strict=True)]
    axes.errorbar(x, y, yerr=[below, above], label=label, linewidth=1.2, elinewidth=1, capsize=2, **style(number))


def _frontier(frontier: Stored, numbers: Mapping[str, int]) -> Drawn:
    content = frontier.content
    model, tokens = content["model"]["name"], content["settings"]["tokens"]
    frame = pd.DataFrame(content["points"])
    frame = frame[(frame["held"] < 0.999) & (frame["kl"] > 0)]
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    for method, own in frame.groupby("method", sort=True):
        ends = own[["kl_low", "kl_high"]].astype(float)
        low = ends["kl_low"].clip(lower=own["kl"] / 10)
        points = list(zip(100 * (1 - own["held"]), own["kl"], low, ends["kl_high"], strict=True))
        _curve(axes, numbers[str(method)], str(method), points)
    axes.set(xlabel="K,V bytes saved, %", ylabel="KL(MHA ‖ method), nats per token", yscale="log")
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    caption = (
        f"What predictions lose against the K,V bytes saved: {model}, {content['points'][0]['sequences']} sequences of "
        f"{tokens} tokens of {content['text']}. Bars: 95 % intervals over sequences. Lower is better."
    )
    name = f"frontier-{frontier.path.name}"
    return Drawn(name, model, f"Loss at equal bytes, {tokens} tokens", caption, content["command"], figure)


def _differences(model: str, found: Sequence[Pair], command: str) -> Drawn:
    """A row a method, a panel a task; filled where the interval leaves zero out."""
    pooled = {each.label: each.difference for each in pool(found)}
    labels = sorted(pooled, key=lambda each: (pooled[each].points, each))
    tasks = list(dict.fromkeys(each.task for each in found if each.right is not None))
    known = {(each.task, each.label): each.row.difference for each in found} | {
        (SETTLED, label): each for label, each in pooled.items()
    }
    panels = [SETTLED, *tasks]
    figure = new_figure(1.9 + 1.55 * len(panels), 1.1 + 0.27 * max(len(labels), 2))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, task in zip(grid, panels, strict=True):
        axes.axvline(0, color="#777777", linewidth=0.8)
        for at, label in enumerate(labels):
            each = known.get((task, label))
            if each is None or math.isnan(each.low):
                continue
            told = not each.low <= 0 <= each.high
            axes.errorbar(
                each.points, at, xerr=[[each.points - each.low], [each.high - each.points]], marker="o", markersize=5,
                color=COLOURS[0], markerfacecolor=COLOURS[0] if told else "white", linewidth=1.2, capsize=2,
            )  # fmt: skip
        axes.set_title(task, fontsize=9, fontweight="bold" if task == SETTLED else "normal")
        axes.grid(axis="x", alpha=0.3, linewidth=0.5)
    grid[0].set_yticks(range(len(labels)), labels)
    grid[0].set_ylim(-0.6, len(labels) - 0.4)
    figure.supxlabel("score minus MHA's, percentage points", fontsize=9)
    caption = (
        f"Change of the score under each method on {model}, with paired 95 % intervals; filled: the interval leaves "
        "zero out. Right of the line the method does better."
    )
    return Drawn(f"scores-{model}", model, "Change of scores", caption, command, figure)


def _sweeps(model: str, found: Sequence[Pair], numbers: Mapping[str, int], command: str) -> list[Drawn]:
    """KL over each setting that is a number and was given several values, the other settings being equal."""
    losses = {each.settings: each for each in task_losses(found)}
    groups: dict[tuple[str, str, str], dict[float, str]] = {}
    for each in found:
        settings = each.result.method_settings
        for name, value in settings.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and each.label in losses:
                others = json.dumps({key: one for key, one in settings.items() if key != name}, sort_keys=True)
                groups.setdefault((each.method, name, others), {})[float(value)] = each.label
    drawn = []
    for (method, name, _), labels in sorted(groups.items()):
        if len(labels) < FEWEST:
            continue
        figure = new_figure(6, 3.6)
        axes = figure.subplots()
        _curve(axes, numbers[method], method, [(value, *losses[label].kl) for value, label in labels.items()])
        axes.set(xlabel=name.replace("_", " "), ylabel="KL(MHA ‖ method), nats per token", ylim=(0, None))
        axes.set_xticks(sorted(labels))
        axes.grid(alpha=0.3, linewidth=0.5)
        caption = (
            f"{method} on {model} over {name}, on the documents of its tasks. Bars: 95 % intervals over documents."
        )
        drawn.append(Drawn(f"sweep-{model}-{method}-{name}", model, f"{method}: {name}", caption, command, figure))
    return drawn


def _by_saving(model: str, found: Sequence[Pair], numbers: Mapping[str, int], command: str) -> list[Drawn]:
    """KL and scores over the share saved, a curve a method that was run at several savings."""
    curves: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    method_of = {each.label: each.method for each in found}
    for loss in task_losses(found):
        curves.setdefault(loss.method, {}).setdefault("kl", []).append((100 * loss.saved, *loss.kl))
    for each in pool(found):
        lost = each.difference
        point = (100 * (each.saved or 0.0), lost.points, lost.low, lost.high)
        curves.setdefault(method_of[each.label], {}).setdefault("score", []).append(point)
    several = {
        method: own
        for method, own in sorted(curves.items())
        if len({round(point[0], 1) for point in own.get("kl", own.get("score", []))}) >= FEWEST
    }
    if not several:
        return []
    figure = new_figure(9, 3.8)
    both = figure.subplots(1, 2)
    for axes, of in zip(both, ("kl", "score"), strict=True):
        for method, own in several.items():
            if of in own:
                _curve(axes, numbers[method], method, own[of])
        axes.set_xlabel("K,V bytes saved, %")
        axes.grid(alpha=0.3, linewidth=0.5)
    both[0].set_ylabel("KL(MHA ‖ method), nats per token")
    both[1].set_ylabel("score minus MHA's, points")
    both[1].axhline(0, color="#777777", linewidth=0.8)
    both[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    caption = f"{model} at several savings, on the documents of its tasks. Bars: 95 % intervals."
    return [Drawn(f"saving-{model}", model, "Loss over saving, on tasks", caption, command, figure)]


def _membership(analysis: Stored) -> list[Drawn]:
    """How clusters settle over the first tokens, and drift further on, where an analysis has followed them."""
    model, made = analysis.content["model"]["name"], analysis.content["provenance"]
    about = f"{model}, {made['samples']} samples of {made['text']}"
    kinds = {
        "membership_changes": ("Membership over probe tokens", "settles as more tokens are probed", change_figure),
        "cluster_drift": ("Clusters over a text", "agrees with that of windows further on in a text", drift_figure),
    }
    return [
        Drawn(f"{name}-{model}", model, title, f"How membership {says}: {about}.", made["command"], draw(table))
        for name, (title, says, draw) in kinds.items()
        if (table := analysis.tables.get(name)) is not None and len(table)
    ]
