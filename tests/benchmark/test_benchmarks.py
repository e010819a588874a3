"""Benchmarks run, check what they time, and say whether a promise is kept; no time is asserted."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from chai_eval.benchmark import all as all_of_them
from chai_eval.benchmark import attention, command, low_rank, membership, model
from chai_eval.benchmark.attention import LayerTensors, Shape, layer_tensors
from chai_eval.benchmark.low_rank import LowRankTensors
from chai_eval.benchmark.records import PUBLISHED, Row, records, rows_of, rows_table
from chai_eval.benchmark.scoring import TaskFigures
from chai_eval.measure.figures import Measured
from chai_eval.measure.serialise import from_json, to_json
from chai_eval.measure.statistics import Ratio
from chai_eval.measure.table import tables

ROOT = Path(__file__).resolve().parents[2]


def test_decode_and_prefill_write_what_they_timed(tmp_path: Path) -> None:
    few = ["--repetitions", "3", "--out", str(tmp_path)]
    rows = attention.decode(["--keys", "40,70", *few]) + attention.prefill(["--queries", "33", *few])
    assert len(rows) == 2 * 2 + 1
    assert all(row.limit == 64 / 36 for row in rows)
    record = json.loads((tmp_path / "decode.json").read_text())
    assert [row["details"]["keys"] for row in record["rows"]] == [40, 70, 40, 70]
    assert len(record["rows"][0]["details"]["seconds"]["clustered"]) == 3
    assert record["threads"] == torch.get_num_threads()


def test_a_wrong_result_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_tensors(Shape(1, 50, 4, "float32", "cpu"), seed=0)
    layer.check(causal=False)
    monkeypatch.setattr(LayerTensors, "clustered", lambda each: each.value[:, :, :1])
    with pytest.raises(AssertionError, match="off"):
        layer.check(causal=False)


def test_decoding_at_low_rank_is_checked_before_it_is_timed_and_held_against_the_bytes_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--keys", "500", "--dtypes", "float32", "--rank", "32", "--repetitions", "3", "--out", str(tmp_path)]
    (row,) = low_rank.main(few)
    assert row.limit == 256 / (32 + 128)
    assert row.reach == 0.85 * row.limit
    assert len(row.details["seconds"]["low rank"]) == 3
    layer = low_rank.low_rank_tensors(low_rank.Shape(50, 64, "bfloat16", "cpu"), seed=0)
    layer.check()
    monkeypatch.setattr(LowRankTensors, "reduced", LowRankTensors.plain)  # whole keys are not what is cached
    with pytest.raises(AssertionError, match="off"):
        layer.check()


def test_the_cache_of_the_papers_model_is_what_the_formula_says(tmp_path: Path) -> None:
    (row,) = model.cache_bytes(["--length", "32", "--models", "llama7b", "--no-process", "--out", str(tmp_path)])
    assert row.met
    assert row.reached.value == pytest.approx(1 / (1 - 0.19140625), rel=0.01)


def test_memberships_that_are_timed_are_scikit_learns(tmp_path: Path) -> None:
    (row,) = membership.main(["--requests", "5", "--shapes", "32:4", "--repetitions", "1", "--out", str(tmp_path)])
    assert row.details["equal_partitions"] == 5 * membership.LAYERS


def test_the_table_says_what_is_promised_and_whether_it_is_kept() -> None:
    setting = "32 → 4, d_h 128, 4 keys, float32, cpu"
    kept = Row("decode attention", setting, "c", Ratio(1.75, 1.7, 1.8), 1.78)
    broken = Row("decode attention", setting, "c", Ratio(1.5, None, None), 1.78)
    unpromised = Row("decode attention", setting.replace("cpu", "cuda"), "c", Ratio(1.5, None, None))
    lines = rows_table([kept, broken, unpromised]).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == ["yes", "NO", "–"]
    assert [line.split("|")[6].strip() for line in lines] == ["≥ 1.70×", "≥ 1.70×", "–"]
    assert "98.3 %" in lines[0]


def test_the_table_that_is_written_has_the_rows_of_every_record(tmp_path: Path) -> None:
    (first,) = membership.main(["--requests", "5", "--shapes", "32:4", "--repetitions", "1", "--out", str(tmp_path)])
    (second,) = attention.prefill(["--queries", "32", "--repetitions", "1", "--out", str(tmp_path)])
    assert rows_table(all_of_them.recorded(tmp_path)) == rows_table([second, first])


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for main in (all_of_them.main, attention.decode):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path / "file" / "records")])
        assert "which can't be made (Not a directory); allowed: a folder" in capsys.readouterr().err


def test_a_benchmark_that_was_interrupted_takes_the_rows_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []
    seconds_in_turn = attention.seconds_in_turn

    def interrupted(*given: Any, **more: Any) -> Any:
        timed.append("shape")
        if len(timed) == 2:
            raise KeyboardInterrupt
        return seconds_in_turn(*given, **more)

    monkeypatch.setattr(attention, "seconds_in_turn", interrupted)
    given = ["--keys", "40,70", "--dtypes", "float32", "--repetitions", "3", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        attention.decode(given)
    (part,) = (tmp_path / "decode.parts").iterdir()
    first = json.loads(part.read_text())["found"]["reached"]
    rows = attention.decode(given)
    assert len(timed) == 3
    assert vars(rows[0].reached) == first
    assert [path.name for path in tmp_path.iterdir()] == ["decode.json"]


def test_the_command_runs_what_it_is_told_and_says_in_one_line_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--keys", "40", "--dtypes", "float32", "--repetitions", "1", "--out", str(tmp_path)]
    assert command.main(["decode", *few]) == 0
    assert (tmp_path / "decode.json").exists()
    capsys.readouterr()
    assert command.main(["speed"]) == 2
    assert capsys.readouterr().err.startswith("benchmark: 'speed' given; allowed: decode, prefill, ")
    (tmp_path / "decode.json").write_text("{")
    assert command.main(["machines", str(tmp_path)]) == 1
    assert "move it away, its benchmark makes another" in capsys.readouterr().err
    assert command.main(["--help"]) == 0
    assert all(f"  {name} " in (shown or "") for shown in [capsys.readouterr().out] for name in command.BENCHMARKS)


def test_every_benchmark_is_where_the_command_looks_for_it() -> None:
    for where, _ in command.BENCHMARKS.values():
        module, function = where.split(":")
        assert callable(getattr(import_module(f"chai_eval.benchmark.{module}"), function))


@pytest.mark.parametrize("path", sorted((ROOT / PUBLISHED).rglob("*.json")), ids=lambda path: path.stem)
def test_published_records_are_read_and_their_promises_are_those_of_the_table(path: Path) -> None:
    (record,) = records([path])
    for row, written in zip(rows_of(record), record["rows"], strict=True):
        assert vars(row.reached) == written["reached"]
        assert (row.reach, row.met) == (written["reach"], written["met"])
    if "measured" in record:
        assert to_json(from_json(Measured, record["measured"])) == record["measured"]
        assert "TTFT ms" in tables(record["measured"])
    if "tasks" in record:
        assert to_json(from_json(dict[str, TaskFigures], record["tasks"]), dict[str, TaskFigures]) == record["tasks"]
