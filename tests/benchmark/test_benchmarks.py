"""Benchmarks run, check what they time, and say whether a promise is kept; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chai_eval.benchmark import all as all_of_them
from chai_eval.benchmark import attention, cache_bytes, decode, membership, prefill
from chai_eval.benchmark.attention_shapes import LayerTensors, layer_tensors
from chai_eval.benchmark.common import Row, table
from chai_eval.measure.statistics import Ratio


def test_decode_and_prefill_write_what_they_timed(tmp_path: Path) -> None:
    few = ["--repetitions", "3", "--out", str(tmp_path)]
    rows = decode.main(["--keys", "40,70", *few]) + prefill.main(["--queries", "33", *few])
    assert len(rows) == 2 * 2 + 1
    assert all(row.limit == 64 / 36 for row in rows)
    record = json.loads((tmp_path / "decode.json").read_text())
    assert [row["details"]["keys"] for row in record["rows"]] == [40, 70, 40, 70]
    assert len(record["rows"][0]["details"]["seconds"]["clustered"]) == 3
    assert record["threads"] == torch.get_num_threads()


def test_a_wrong_result_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_tensors(4, 1, 50, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    attention.check(layer, causal=False)
    monkeypatch.setattr(LayerTensors, "clustered", lambda each: each.value[:, :, :1])
    with pytest.raises(AssertionError, match="off"):
        attention.check(layer, causal=False)


def test_the_cache_of_the_papers_model_is_what_the_formula_says(tmp_path: Path) -> None:
    (row,) = cache_bytes.main(["--length", "32", "--models", "llama7b", "--no-process", "--out", str(tmp_path)])
    assert row.met
    assert row.reached.value == pytest.approx(1 / (1 - 0.19140625), rel=0.01)


def test_memberships_that_are_timed_are_scikit_learns(tmp_path: Path) -> None:
    (row,) = membership.main(["--requests", "5", "--shapes", "32:4", "--repetitions", "1", "--out", str(tmp_path)])
    assert row.details["equal_partitions"] == 5 * membership.LAYERS


def test_the_table_says_what_is_promised_and_whether_it_is_kept() -> None:
    kept = Row("a", "b", "c", Ratio(1.75, 1.7, 1.8), 1.7, 1.78)
    broken = Row("a", "b", "c", Ratio(1.5, None, None), 1.7, 1.78)
    unpromised = Row("a", "b", "c", Ratio(1.5, None, None))
    lines = table([kept, broken, unpromised]).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == ["yes", "NO", "–"]
    assert "98.3 %" in lines[0]


def test_the_table_that_is_written_has_the_rows_of_every_record(tmp_path: Path) -> None:
    (first,) = membership.main(["--requests", "5", "--shapes", "32:4", "--repetitions", "1", "--out", str(tmp_path)])
    (second,) = prefill.main(["--queries", "32", "--repetitions", "1", "--out", str(tmp_path)])
    assert table(all_of_them.recorded(tmp_path)) == table([second, first])


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for main in (all_of_them.main, decode.main):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path / "file" / "records")])
        assert "which can't be made (Not a directory); allowed: a folder" in capsys.readouterr().err
