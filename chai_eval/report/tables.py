"""The table that a run ends with: rich on a terminal, fixed-width Markdown everywhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from chai_eval.markdown import markdown
from chai_eval.report.statistics import Difference


@dataclass(frozen=True)
class Row:
    """One task of a run.

    Attributes
    ----------
    mha, method
        Scores as the task reports them; `method` is None when the run is the baseline itself.
    difference
        Method minus MHA, times 100; None where there is no second score; its interval may be nan.
    percent
        Whether the metric is a mean of scores between 0 and 1, shown in per cent. Other metrics, and their
        differences, are shown as they are.
    paper
        The paper's difference in percentage points (its score in per cent for the baseline).
    divergence
        KL(MHA ‖ method) of next-token distributions, in nats per token.
    agreement
        Share of tokens for which both predict the same most likely next token, from 0 to 1.
    infinite_tokens, compared_tokens
        For how many tokens the divergence is infinite, of how many; more than none make the row's infinite.
    """

    task: str
    metric: str
    n: int
    mha: float
    method: float | None = None
    difference: Difference | None = None
    percent: bool = True
    paper: float | None = None
    divergence: float | None = None
    agreement: float | None = None
    infinite_tokens: int = 0
    compared_tokens: int | None = None


@dataclass(frozen=True)
class Header:
    """What the table is about: `facts` are (name, text) lines above it, `method` the name of its column."""

    method: str
    facts: tuple[tuple[str, str], ...] = ()
    in_paper: bool = False


def render(header: Header, rows: Sequence[Row], stream: TextIO) -> None:
    """Print one run's table to `stream`.

    A pipe or a file gets Markdown that is never wrapped or cut; a terminal gets rich's table.
    """
    width = max((len(name) for name, _ in header.facts), default=0)
    facts = [f"{name.ljust(width)}  {text}" for name, text in header.facts]
    notes = [_infinite(row.task, row) for row in rows if row.infinite_tokens]
    _print(facts, *_cells(header, rows), stream, left=2, notes=notes)


def render_sweep(runs: Sequence[tuple[str, Header, Sequence[Row]]], stream: TextIO) -> None:
    """Print all runs of a sweep in one table: by what was swept over, then as each run's own table has them."""
    header = Header("", in_paper=any(each.in_paper for _, each, _ in runs))
    columns, lines = _cells(header, [row for _, _, rows in runs for row in rows], scores="score")
    labels = [label for label, _, rows in runs for _ in rows]
    labelled = [[label, *line] for label, line in zip(labels, lines, strict=True)]
    notes = [_infinite(f"{label}, {row.task}", row) for label, _, rows in runs for row in rows if row.infinite_tokens]
    _print([], ["run", *columns], labelled, stream, left=3, notes=notes)


def _infinite(where: str, row: Row) -> str:
    """Why a row's divergence is infinite."""
    return (
        f"KL is infinite in {where}: for {row.infinite_tokens} of {row.compared_tokens} tokens the method rules out "
        "(logit -inf) a next token that MHA does not"
    )


def _print(
    facts: Sequence[str],
    columns: list[str],
    lines: list[list[str]],
    stream: TextIO,
    *,
    left: int,
    notes: Sequence[str] = (),
) -> None:
    """Print facts, the table, and notes below it."""
    if not stream.isatty():
        text = "\n".join([*facts, "", *markdown(columns, lines, left=left)]).lstrip("\n")
        stream.write("".join(f"{each}\n" for each in [text, *([""] if notes else []), *notes]))
        stream.flush()
        return
    console = Console(file=stream, highlight=False)
    for fact in facts:
        console.print(fact, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if index < left else "right"
        table.add_column(column.replace(" (", "\n("), justify=justify, no_wrap=True)
    for line in lines:
        table.add_row(*map(escape, line))
    # A terminal that is too narrow wraps a line; rich would cut figures out of it.
    console.width = max(console.width, Measurement.get(console, console.options.update(width=1000), table).maximum)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)


def _cells(header: Header, rows: Sequence[Row], scores: str | None = None) -> tuple[list[str], list[list[str]]]:
    """Names of columns and the cells of each row; `scores` heads the method's where it isn't one method's."""
    compared = any(row.method is not None for row in rows)
    columns = ["task", "metric", "n", "MHA"]
    if compared:
        columns += [scores or header.method.upper(), "difference (pp)", "95 % interval"]
    close = any(row.divergence is not None or row.agreement is not None for row in rows)
    if close:
        columns += ["KL", "same token (%)"]
    if header.in_paper:
        columns.append("paper (pp)" if compared else "paper (%)")
    lines = []
    for row in rows:
        cells = [row.task, row.metric, str(row.n), score_cell(row.mha, row.percent)]
        if compared:
            cells += [score_cell(row.method, row.percent), *difference_cells(row.difference, row.percent)]
        if close:
            cells.append("–" if row.divergence is None else f"{row.divergence:#.3g}".rstrip("."))
            cells.append("–" if row.agreement is None else f"{100 * row.agreement:.1f}")
        if header.in_paper:
            cells.append(_paper(row, compared))
        lines.append(cells)
    return columns, lines


def _paper(row: Row, compared: bool) -> str:
    if row.paper is None or (compared and row.method is None):
        return "–"
    return f"{row.paper:+.2f}" if compared else f"{row.paper:.1f}"


def score_cell(value: float | None, percent: bool) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.2f}" if percent else f"{value:.4g}"


def difference_cells(difference: Difference | None, percent: bool) -> tuple[str, str]:
    if difference is None:
        return "–", "–"

    def signed(value: float) -> str:
        # `+ 0.0` turns a negative zero, and what rounds to it, into a plain one.
        return f"{round(value, 2) + 0.0:+.2f}" if percent else f"{value / 100:+.4g} (raw)"

    if math.isnan(difference.low):
        return signed(difference.points), "–"
    return signed(difference.points), f"{signed(difference.low)} to {signed(difference.high)}"
