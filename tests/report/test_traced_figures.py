"""Every figure that the pages publish stands in a record that they name."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from scipy.stats import ttest_rel

ROOT = Path(__file__).resolve().parents[2]
RECORD = re.compile(r"results/(?:records|paper)/[\w./*-]+")
FIGURE = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?![\w.]*\w)")
WITH_INTERVAL = re.compile(rf"({FIGURE.pattern}) \(({FIGURE.pattern})\s+to\s+({FIGURE.pattern})\)")
# A paired difference: "0.0074 more (-0.0355 to 0.0502, paired)".
DIFFERENCE = re.compile(rf"({FIGURE.pattern})\s+more\s+\(({FIGURE.pattern})\s+to\s+({FIGURE.pattern}),\s+paired\)")
# What each page publishes stands below this heading; the table of machines has a test of its own.
PAGES = {"README.md": ("## What we measured", "### Latency and memory"), "results/README.md": ("# ", None)}


def blocks(page: str) -> Iterator[tuple[str, tuple[Path, ...]]]:
    """List items, paragraphs and tables, each with the records that it names; else a table those of the paragraph
    before it, all others the first of their section."""
    start, end = PAGES[page]
    text = (ROOT / page).read_text()
    text = text[text.index(start) :].partition(end or "\0")[0]
    for section in re.split(r"\n(?=#+ )", text):
        first = named(section)[:1]
        before: tuple[Path, ...] = ()
        for block in re.split(r"\n\n|\n(?=- )", section):
            own = named(block)
            yield block, own or (before if block.startswith("|") else ()) or first
            before = own


def named(text: str) -> tuple[Path, ...]:
    return tuple(place for each in RECORD.findall(text) for place in sorted(ROOT.glob(each.rstrip("./"))))


@cache
def groups(record: Path) -> tuple[tuple[float, ...], ...]:
    """Numbers that belong together: those of an object of JSON, or of a row of a table."""
    files = sorted(record.rglob("*.*")) if record.is_dir() else [record]
    return tuple(each for file in files for each in groups_of(file) if each)


@cache
def paired(record: Path) -> tuple[tuple[float, ...], ...]:
    """Differences of a frontier's points with their intervals, sequence by sequence."""
    if not (record / "samples.parquet").exists():
        return ()
    samples = pd.read_parquet(record / "samples.parquet")
    losses = {point: own["divergence"].to_numpy() for point, own in samples.groupby("point")}
    found = []
    for one, other in itertools.permutations(losses, 2):
        low, high = ttest_rel(losses[one], losses[other]).confidence_interval()
        found.append((float((losses[one] - losses[other]).mean()), float(low), float(high)))
    return tuple(found)


def groups_of(file: Path) -> Iterator[tuple[float, ...]]:
    if file.suffix == ".json":
        yield from objects(json.loads(file.read_text()))
    elif file.suffix == ".csv":
        yield from (tuple(numbers(row)) for row in csv.reader(file.read_text().splitlines()))
    elif file.suffix == ".md":
        yield from (tuple(numbers(FIGURE.findall(line))) for line in file.read_text().splitlines())


def objects(value: Any) -> Iterator[tuple[float, ...]]:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    own = tuple(float(each) for each in inner if isinstance(each, int | float) and not isinstance(each, bool))
    yield own
    for each in inner:
        yield from objects(each)


def numbers(cells: Sequence[str]) -> Iterator[float]:
    for cell in cells:
        try:
            yield float(cell)
        except ValueError:
            continue


def stands(figure: str, among: Sequence[float]) -> bool:
    """Whether a number rounds to a figure as it is, in per cent, or as what is left of one."""
    digits = len(figure.partition(".")[2])
    written = figure.lstrip("+-")
    return any(
        f"{abs(each):.{digits}f}" == written for value in among for each in (value, 100 * value, 100 * (1 - value))
    )


def signed(figure: str, number: float) -> bool:
    return f"{number:.{len(figure.partition('.')[2])}f}" == figure.lstrip("+")


def pages() -> list[str]:
    return [page for page in PAGES if (ROOT / page).exists()]


@pytest.mark.parametrize("page", pages())
def test_every_figure_stands_in_the_record_that_its_block_or_section_names(page: str) -> None:
    missing, found = [], 0
    for block, records in blocks(page):
        every = [number for record in records for group in groups(record) for number in group]
        with_interval = {figure for triple in DIFFERENCE.findall(block) for figure in triple}
        for figure in FIGURE.findall(block):
            if figure in with_interval:  # asked for with its interval, below
                continue
            found += 1
            if not stands(figure, every):
                missing.append((figure, block[:80]))
    assert found > 20
    assert not missing


@pytest.mark.parametrize("page", pages())
def test_every_figure_stands_beside_its_interval(page: str) -> None:
    missing = []
    for block, records in blocks(page):
        together = [group for record in records for group in groups(record)]
        for triple in WITH_INTERVAL.findall(block):
            if not any(all(stands(figure, group) for figure in triple) for group in together):
                missing.append(triple)
        differences = [group for record in records for group in paired(record)]
        for triple in DIFFERENCE.findall(block):
            if not any(
                all(signed(figure, each) for figure, each in zip(triple, group, strict=True)) for group in differences
            ):
                missing.append(triple)
    assert not missing


def test_the_tables_of_the_readme_hold_their_records_cell_by_cell() -> None:
    readme = (ROOT / "README.md").read_text()
    record = json.loads((ROOT / "results/records/fidelity/smollm2_mha-balanced-c4_sample.jsonl.json").read_text())
    rows = {cells[0]: cells[1:] for cells in table(readme, "| method                             | K,V saved")}
    assert rows.keys() == record["methods"].keys()
    for name, cells in rows.items():
        own = record["methods"][name]
        saved = "–" if own["kv_saving"] is None else f"{100 * own['kv_saving']:.1f} %"
        low, value, high = (own["divergence"][each] for each in ("low", "value", "high"))
        assert cells == [
            saved, f"{value:.4f}", f"{low:.4f} to {high:.4f}", f"{100 * own['agreement']['value']:.1f} %",
            f"{own['perplexity']:.2f} (MHA {own['baseline_perplexity']:.2f})",
        ]  # fmt: skip
    points = json.loads((ROOT / "results/records/frontier/smollm2_mha-256/frontier.json").read_text())["points"]
    losses = {(point["method"], f"{point['kl']:.4f}") for point in points}
    for _, chai, output_aware, kv_rank, others in table(readme, "| K,V bytes saved"):
        columns = {"chai": chai, "output_aware": output_aware, "kv_rank": kv_rank}
        assert {(name, loss) for name, loss in columns.items() if loss != "–"} <= losses
        assert set(re.findall(r"(\w+)(?:, \d bits)? (\d\.\d+)", others)) <= losses


def table(text: str, head: str) -> list[list[str]]:
    lines = text[text.index(head) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
