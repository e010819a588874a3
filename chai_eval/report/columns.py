"""Tables of a report: raw values for CSV and sorting, and what people read, in Markdown, LaTeX and HTML alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from chai_eval.markdown import markdown

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column: its title, the value that it is sorted by, and how a line is shown (the value itself by default)."""

    title: str
    value: str
    show: Callable[[Line], str] | None = None
    number: bool = True

    def text(self, line: Line) -> str:
        """What stands in the cell."""
        if self.show is not None:
            return self.show(line)
        value = line.get(self.value)
        return "–" if value is None else str(value)


@dataclass(frozen=True)
class Table:
    """Lines of raw values and the columns that show them.

    `by` are the values by which a reader may filter; those of `model`, `method` and `task` that the lines have.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    lines: Sequence[Line]

    @property
    def cells(self) -> list[list[str]]:
        """Texts, a list a line."""
        return [[each.text(line) for each in self.columns] for line in self.lines]

    def markdown(self) -> str:
        """As Markdown, texts left and numbers right."""
        left = next((at for at, each in enumerate(self.columns) if each.number), len(self.columns))
        cells = [[each.replace("|", "\\|").replace("\n", " ") for each in line] for line in self.cells]
        titles = [each.title for each in self.columns]
        return "\n".join([self.caption, "", *markdown(titles, cells, left=left)]) + "\n"

    def csv(self) -> str:
        """Raw values: shares from 0 to 1, intervals as two columns."""
        return str(pd.DataFrame(list(self.lines)).to_csv(index=False, float_format="%.6g", lineterminator="\n"))

    def latex(self) -> str:
        """For the package booktabs, in a table environment with a caption and a label."""
        frame = pd.DataFrame(self.cells, columns=[each.title for each in self.columns])
        style = frame.style.hide(axis="index").format(_latex).format_index(_latex, axis=1)
        return str(
            style.to_latex(
                hrules=True,
                column_format="".join("r" if each.number else "l" for each in self.columns),
                caption=_latex(self.caption),
                label=f"tab:{self.name}",
                position_float="centering",
            )
        )


# What LaTeX would take as a command, and signs that its plain fonts lack.
LATEX = str.maketrans(
    {each: f"\\{each}" for each in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}
    | {"−": "$-$", "×": r"$\times$", "–": "--", "‖": r"$\|$", "≥": r"$\geq$", "→": r"$\to$", "|": r"$|$"}
)


def _latex(text: object) -> str:
    """A text as LaTeX shows it."""
    return str(text).translate(LATEX)


def signed(value: float | None, digits: int = 2) -> str:
    """A number with its sign; a dash for none."""
    return "–" if value is None or math.isnan(value) else f"{round(value, digits) + 0.0:+.{digits}f}"


def interval(low: float | None, high: float | None, digits: int = 2, sign: bool = True) -> str:
    """An interval; a dash where there is none."""
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return "–"
    return f"{signed(low, digits)} to {signed(high, digits)}" if sign else f"{low:.{digits}f} to {high:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share in per cent; a dash for none."""
    return "–" if value is None or math.isnan(value) else f"{100 * value:.{digits}f}"


def plain(value: float | None, digits: int = 3) -> str:
    """A number with so many digits that count; a dash for none."""
    return "–" if value is None or math.isnan(value) else f"{value:#.{digits}g}".rstrip(".")
