"""`chai-eval compare A B`: two runs on the same documents, as a table, with the documents that flipped."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from chai_eval.errors import RunError
from chai_eval.files import write_whole
from chai_eval.logs.compare import Comparison, compare
from chai_eval.logs.flips import GAINED, LOST, Flip, answered, asked
from chai_eval.logs.settings import CompareSettings
from chai_eval.markdown import markdown
from chai_eval.report.tables import Row, difference_cells, score_cell
from chai_eval.scoring.tasks import primary_metric

COLUMNS = ("task", "metric", "n", "A", "B", "B - A (pp)", "95 % interval", "McNemar p")
LEAST_P = 1e-4


def main(settings: CompareSettings, command: str) -> None:
    """Compare, print, and write where `out` is given; raises as `compare` does, RunError where it can't be written."""
    wanted = settings.flips != 0 or settings.out is not None
    found = compare(settings.a, settings.b, settings.task, settings.metric, flipped=wanted)
    shown = found.flips if settings.metric else [each for each in found.flips if each.metric == _main(each.task, found)]
    text = "\n".join([*_table(found), *_flips(shown, settings.flips)]) + "\n"
    sys.stdout.write(text)
    if settings.out is not None:
        try:
            _write(settings.out, found, text, command)
        except OSError as error:
            raise RunError(f"out: {settings.out} can't be written ({error.strerror or error})") from error
        sys.stdout.write(f"\n{settings.out}\n")


def _table(found: Comparison) -> list[str]:
    facts = [f"{name}  {text}" for name, text in found.facts]
    lines = [
        [
            *(row.task, row.metric, str(row.n), score_cell(row.mha, row.percent), score_cell(row.method, row.percent)),
            *difference_cells(row.difference, row.percent),
            _p(row),
        ]
        for row in found.rows
    ]
    remarks = ["", *(f"- {each}" for each in found.remarks)] if found.remarks else []
    return [*facts, "", *markdown(COLUMNS, lines), *remarks]


def _p(row: Row) -> str:
    p = None if row.difference is None else row.difference.p
    if p is None:
        return "–"
    return f"{p:.4f}" if p >= LEAST_P else f"< {LEAST_P:.4f}"


def _main(task: str, found: Comparison) -> str:
    """The metric whose flips are shown: that by which the task is usually compared, else the first with any."""
    those = [each.metric for each in found.flips if each.task == task]
    return next((each for each in (primary_metric(task), "acc_norm", "acc") if each in those), those[0])


def _flips(flips: Sequence[Flip], most: int | None) -> list[str]:
    if most == 0:
        return []
    lines: list[str] = []
    for task, metric in dict.fromkeys((each.task, each.metric) for each in flips):
        for kind in (LOST, GAINED):
            those = [each for each in flips if (each.task, each.metric, each.kind) == (task, metric, kind)]
            some = those[:most]
            more = f", the first {len(some)}" if len(some) < len(those) else ""
            lines += ["", f"{task}, {metric}: {kind} in {len(those)} documents{more}"]
            cells = [[str(each.doc_id), asked(each.question), *answered(each.a, each.b)] for each in some]
            lines += ["", *markdown(("doc", "question", "A's answer", "B's answer"), cells, left=4)] if cells else []
    return lines


def _plain(row: Row) -> dict[str, object]:
    """A row as data, all in the metric's own units."""
    found = {"task": row.task, "metric": row.metric, "n": row.n, "a": row.mha, "b": row.method}
    of = row.difference
    return found if of is None else found | {
        "difference": of.points / 100, "low": of.low / 100, "high": of.high / 100, "p": of.p
    }  # fmt: skip


def _write(out: Path, found: Comparison, text: str, command: str) -> None:
    rows = [_plain(row) for row in found.rows]
    names = [each.name for each in dataclasses.fields(Flip)]
    flips = pd.DataFrame([dataclasses.asdict(each) for each in found.flips], columns=names)
    write_whole(out / "table.md", f"{text}\n`{command}`\n")
    write_whole(out / "table.csv", pd.DataFrame(rows).to_csv(index=False))
    write_whole(out / "flips.csv", flips.to_csv(index=False))
