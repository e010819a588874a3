"""Figures of experiments: drawn the same from the same data, told apart without colours, the command below."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from chai_eval.files import write_whole
from chai_eval.frontier.figure import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")
# Characters of a line below a figure.
WIDTH = 130


@dataclass(frozen=True)
class Curve:
    """Columns of a figure's lines: `y` over `x`, a line for each value of `by`; `low` to `high` is the interval.

    Without `joined` there are points alone.
    """

    x: str
    y: str
    low: str
    high: str
    by: str
    joined: bool = True


def save(figures: Mapping[str, Callable[[], Figure]], folder: Path, caption: str) -> list[str]:
    """Draw figures and write each as SVG and PNG, with the caption below; return the files' names."""
    import matplotlib as mpl

    names = []
    # The same data give the same file: no date, no random names in it.
    with mpl.rc_context({"svg.hashsalt": "experiment", "svg.fonttype": "none"}):
        for name, draw in figures.items():
            figure = draw()
            lines = "\n".join(textwrap.wrap(caption, WIDTH))
            figure.text(0.0, -0.01, lines, fontsize=6, verticalalignment="top")
            for ending, nothing in zip(FORMATS, ("Date", "Software"), strict=True):
                saved = partial(figure.savefig, format=ending, dpi=130, bbox_inches="tight", metadata={nothing: None})
                write_whole(folder / f"{name}.{ending}", saved)
                names.append(f"{name}.{ending}")
    return names


def panels(title: str, count: int, *, size: tuple[float, float] = (4.6, 3.8)) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side."""
    # A figure of its own, not pyplot's: nothing global, and no display is needed.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * count, size[1]), layout="constrained")
    figure.suptitle("\n".join(textwrap.wrap(title, 60 * count)), fontsize=9)
    axes = figure.subplots(1, count, squeeze=False)[0]
    for each in axes:
        each.grid(alpha=0.3, linewidth=0.5)
    return figure, list(axes)


def lines(axes: Axes, frame: pd.DataFrame, curve: Curve, label: str, *, names: Sequence[str] | None = None) -> None:
    """Draw lines with 95 % intervals; `names` gives every panel of a figure the same colours."""
    known = list(names) if names is not None else list(dict.fromkeys(frame[curve.by]))
    for name, own in frame.groupby(curve.by, sort=False):
        at = known.index(name)
        own = own.sort_values(curve.x)
        below, above = (own[curve.y] - own[curve.low]).clip(lower=0), (own[curve.high] - own[curve.y]).clip(lower=0)
        axes.errorbar(
            own[curve.x], own[curve.y], yerr=[below, above], label=str(name), color=COLOURS[at % len(COLOURS)],
            marker=MARKERS[at % len(MARKERS)], markersize=4, linewidth=1, capsize=2,
            linestyle="-" if curve.joined else "none",
        )  # fmt: skip
    axes.set_ylabel(label)


def legend(axes: Axes, title: str | None = None) -> None:
    """A legend to the right of the last panel."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8, title=title)
