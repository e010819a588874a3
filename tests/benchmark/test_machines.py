"""What several machines reached stands side by side, from their records and from nothing else."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from chai_eval.benchmark import machines
from chai_eval.benchmark.records import PUBLISHED, Row
from chai_eval.measure.statistics import Ratio

ROOT = Path(__file__).resolve().parents[2]


def record(
    value: float,
    finished: str,
    *,
    what: str = "decode",
    setting: str = "4 keys",
    threads: int = 2,
    limit: float | None = 1.78,
    **machine: Any,
) -> dict[str, Any]:
    row = asdict(Row(what, setting, "sdpa", Ratio(value, value - 0.1, value + 0.1), limit))
    return {"rows": [row], "threads": threads, "finished": finished, "machine": {"gpus": [], "cpu": "A", **machine}}


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "---" not in line]


def test_each_machine_has_a_column_of_what_it_reached() -> None:
    new = {"instructions": "AVX512", "multiplies_bfloat16": True}
    found = [record(2.0, "2026", instructions="AVX2", multiplies_bfloat16=False), record(3.0, "2026", threads=1, **new)]
    header, row = cells(machines.side_by_side(found))
    assert header[5:] == ["A, AVX2, 2 threads", "A, AVX512 with bfloat16, 1 thread"]
    assert row == ["decode", "4 keys", "sdpa", "–", "1.78×", "2.00× (1.90 to 2.10)", "3.00× (2.90 to 3.10)"]


def test_what_a_machine_did_not_time_is_a_dash_and_the_later_of_two_records_counts() -> None:
    other = record(5.0, "2026-01-01", instructions="AVX2") | {"rows": []}
    for order in (1, -1):
        twice = [record(2.0, "2026-01-02"), record(3.0, "2026-01-01")][::order]
        (_, row) = cells(machines.side_by_side([*twice, other]))
        assert row[5:] == ["2.00× (1.90 to 2.10)"]
    gpu = record(4.0, "2026-01-01", gpus=["H200", "H200"])
    gpu["rows"][0]["setting"] = "4 keys, cuda"
    header, first, second = cells(machines.side_by_side([record(2.0, "2026-01-01"), gpu]))
    assert header[6].endswith("2 threads, H200")
    assert (first[6], second[5]) == ("–", "–")


def test_a_promise_that_a_machine_did_not_keep_is_marked() -> None:
    promised = {"what": "decode attention", "setting": "4 keys, float32, cpu"}
    found = [record(1.6, "2026", instructions="old", **promised), record(1.7, "2026", instructions="new", **promised)]
    (_, row) = cells(machines.side_by_side(found))
    assert row[3:] == ["≥ 1.70×", "1.78×", "missed: 1.60× (1.50 to 1.70)", "1.70× (1.60 to 1.80)"]


def test_rows_with_neither_promise_nor_limit_are_left_to_the_full_table() -> None:
    assert len(cells(machines.side_by_side([record(2.0, "2026", limit=None)]))) == 1


def test_folders_without_records_are_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit):
        machines.main([str(tmp_path)])
    assert f"folders: no records of benchmarks in {tmp_path}" in capsys.readouterr().err


def test_the_readme_shows_what_the_records_say() -> None:
    assert machines.main([str(ROOT / PUBLISHED)]) in (ROOT / "README.md").read_text(encoding="utf-8")
