"""`chai-eval report`: tables, figures and a page from stored records; nothing is loaded, nothing is scored."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from chai_eval.calibration.figures import INSTALL, to_be_drawn
from chai_eval.errors import RunError, SettingError
from chai_eval.files import write_whole
from chai_eval.page.figures import Drawn, draw_all
from chai_eval.page.html import Content, page
from chai_eval.page.svg import drawing, on_page, save
from chai_eval.report.changed import changes
from chai_eval.report.columns import Table
from chai_eval.report.decision import Decision, decide
from chai_eval.report.experiments import experiment_tables
from chai_eval.report.heads import heads_of
from chai_eval.report.pairs import pairs
from chai_eval.report.records import Records, read_records
from chai_eval.report.sources import record_table
from chai_eval.report.tabulate import (
    claim_table,
    frontier_table,
    measured_table,
    pooled_table,
    ranking_table,
    score_table,
)
from chai_eval.report_settings import FOLDERS, ReportSettings


def report(settings: ReportSettings, command: str) -> tuple[Path, list[Decision], list[str]]:
    """Write a report; return its folder, what it decides of each model, and what it had to leave out.

    The same records and the same command give the same files.

    Raises
    ------
    SettingError
        Folders without any record; figures that can't be drawn.
    RunError
        A folder that can't be written.
    """
    drawn = to_be_drawn(settings.figures)
    records = read_records(settings.results_dir, settings.out)
    if not any((records.tasks, records.frontiers, records.measurements, records.benchmarks, records.analyses)):
        given = ", ".join(map(str, settings.results_dir))
        raise SettingError(f"results_dir: {given} has no record of a run; allowed: {FOLDERS}")
    left_out = records.left_out
    found = pairs(records.tasks, left_out)
    models = _models(records, [each.model for each in found])
    heads = {model: heads_of(model, records.analyses, left_out) for model in models}
    decisions = [decide(model, settings.saving, records, found, heads[model]) for model in models]
    tables = [score_table(found), pooled_table(found), frontier_table(records), measured_table(records)]
    tables += [ranking_table(each.ranking) for each in decisions if each.ranking is not None]
    tables += experiment_tables(records)
    shown, claims, sources = [each for each in tables if each.lines], claim_table(found), record_table(records)
    with drawing("report"):
        figures = draw_all(records, found, command) if drawn else []
    content = Content(
        decisions,
        claims,
        [each for each in shown if not each.name.startswith("ranking")],
        sources,
        [(each, on_page(each)) for each in figures],
        None if drawn else f"No figures, for want of matplotlib: {INSTALL}",
        changes(found, settings.documents),
        [each for each in heads.values() if each is not None],
        left_out,
        command,
    )
    _write(settings.out, page(content), [*shown, *([claims] if claims.lines else []), sources], figures)
    return settings.out, decisions, left_out


def _models(records: Records, paired: Sequence[str]) -> list[str]:
    """Models that can be decided about: those with most results first."""
    points = [each.content["model"]["name"] for each in records.frontiers for _ in each.content["points"]]
    return sorted({*paired, *points}, key=lambda each: (-paired.count(each), -points.count(each), each))


def _write(out: Path, html: str, tables: Sequence[Table], figures: Sequence[Drawn]) -> None:
    try:
        for each in tables:
            for end, text in (("md", each.markdown()), ("csv", each.csv()), ("tex", each.latex())):
                write_whole(out / "tables" / f"{each.name}.{end}", text)
        for drawn in figures:
            save(drawn, out / "figures")
        write_whole(out / "index.html", html)
    except OSError as error:
        raise RunError(f"out: {out} can't be written ({error.strerror or error})") from error


def main(settings: ReportSettings, command: str) -> None:
    """Make a report, print what it decides and where it lies; raises as `report` does."""
    out, decisions, left_out = report(settings, command)
    for each in decisions:
        sys.stdout.write(f"{each.model}: use {each.method}? {each.answer}. {each.headline}\n")
        sys.stdout.write("".join(f"  {sentence}\n" for sentence in each.sentences))
    sys.stdout.write("".join(f"left out: {line}\n" for line in left_out))
    sys.stdout.write(f"{out / 'index.html'}\n")
