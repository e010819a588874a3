"""`chai-eval measure`, and `measure=` within a run that scores: what is printed and what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from chai_eval.cli import main
from chai_eval.measure.ceiling import Ceiling
from chai_eval.store.record import read_record, read_samples

TINY = ("model=tiny_llama_random", "measure.lengths=[16]", "measure.new_tokens=3", "measure.repetitions=3")


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and a ceiling that is known without minutes of copying."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("chai_eval.measure.grid.measure_ceiling", lambda *_, **__: Ceiling(1e10, 1e10, 1e11))
    return tmp_path


def recorded(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    (path,) = folder.glob("results/tiny_llama_random/measure/*")
    record = read_record(path)
    assert record is not None
    return record, read_samples(path)


def test_a_measurement_is_printed_and_recorded_with_its_raw_samples(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", *TINY, "measure=latency", "measure.batch_sizes=[1,2]"]) == 0
    printed = capsys.readouterr().out
    record, samples = recorded(small)
    assert [each["name"] for each in record["contenders"]] == ["mha (sdpa)", "mha (eager)", "mha (rows)", "chai"]
    for each in record["contenders"]:
        assert printed.count(f"| {each['name']} ") == 2 * 2  # two points in two tables
    assert record["config"]["measure"]["batch_sizes"] == [1, 2]
    assert record["model"]["weights"] == "random"
    assert "random weights" in printed
    assert len(samples) == 2 * 4 * 3 * 3
    own = samples[(samples.contender == "chai") & (samples.batch == 2) & (samples.phase == "prefill")]
    assert main(["status"]) == 0
    listed = capsys.readouterr().out
    assert "mha (sdpa), mha (eager), mha (rows), chai" in listed
    assert "| finished | latency, 2 grid points" in listed
    point = next(point for point in record["points"] if point["batch"] == 2)
    assert point["results"]["chai"]["ttft"]["median"] == pytest.approx(own.seconds.median())


def test_methods_are_measured_side_by_side(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", *TINY, "measure=latency", "measure.rivals=[sdpa]", "method=chai,v_reuse"]) == 0
    record, samples = recorded(small)
    assert [each["name"] for each in record["contenders"]] == ["mha (sdpa)", "chai", "v_reuse"]
    assert samples.turn.max() == 2
    grid = [*TINY, "measure=latency", "measure.rivals=[]"]
    assert main(["measure", *grid, "method.probe_tokens=3,5", "results_dir=other"]) == 0
    assert "| chai probe_tokens=3 " in capsys.readouterr().out


def test_layers_that_were_left_out_are_said(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", *TINY, "measure=latency", "layers=2", "method.clusters=[8,3]"]) == 0
    assert "2 of its 4 layers only" in capsys.readouterr().out
    assert recorded(small)[0]["model"]["layers"] == 2


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        (
            "measure.batch_sizes=[99999999999999999999]",
            "measure.batch_sizes: 99999999999999999999 given; allowed: whole",
        ),
        (
            "measure.seed=99999999999999999999",
            "measure.seed: 99999999999999999999 given; allowed: whole numbers from 0",
        ),
        ("measure.lengths=[0]", "measure.lengths: 0 given; allowed: whole numbers from 1"),
        (
            "measure.lengths=[4000]",
            "measure.lengths: 4000 given, with 3 new tokens more than the model's 2048 positions",
        ),
        ("measure.new_tokens=-1", "measure.new_tokens: -1 given; allowed: whole numbers from 1"),
        ("measure=fast", "measure: 'fast' is unknown"),
        ("measure=off", "measure"),
        ("measure.length=[4]", "length: 'length' is unknown"),
        ("method.probe_tokens=0", "method.probe_tokens: 0 given"),
        ("-x", "-x: unknown option"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    small: Path, capsys: pytest.CaptureFixture[str], argument: str, line: str
) -> None:
    assert main(["measure", *TINY, argument]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err
    assert err.count("\n") == 1
    assert list(small.iterdir()) == []


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is scored at once."""
    samples = pd.DataFrame({"doc_id": [0, 1], "doc_hash": ["a", "b"], "acc": [1.0, 0.0], "acc_norm": [1.0, 0.0]})
    metric = {"value": 0.5, "stderr": 0.1}
    scores = SimpleNamespace(samples=samples, metrics={"acc": metric, "acc_norm": metric}, batch={})
    prepared = SimpleNamespace(task_name="piqa", n_documents=2, n_requests=4, prompts_hash="p", config_hash="c")
    monkeypatch.setattr("chai_eval.scoring.tasks.load_task", lambda name, _: name)
    monkeypatch.setattr("chai_eval.scoring.prepare.prepare", lambda *_, **__: prepared)
    monkeypatch.setattr("chai_eval.scoring.evaluate.score", lambda *_, **__: scores)
    monkeypatch.setattr("chai_eval.evaluation.Evaluation.fidelity", lambda _: None)


@pytest.mark.usefixtures("scoring")
def test_a_run_that_scores_prints_and_records_what_it_measured_as_well(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "task=piqa", "measure=latency"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("acc_norm") < printed.index("TTFT ms") < printed.index("TPOT ms")
    assert recorded(small)[0]["kind"] == "measure"


@pytest.mark.usefixtures("scoring")
def test_a_run_measures_nothing_unless_told_to(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=tiny_llama_random", "task=piqa"]) == 0
    assert "TTFT" not in capsys.readouterr().out
    assert not list(small.glob("results/*/measure"))


@pytest.mark.usefixtures("scoring")
def test_a_grid_that_does_not_fit_the_model_is_said_before_anything_is_scored(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "task=piqa", "measure=full", "measure.lengths=[2047]"]) == 2
    assert "measure.lengths: 2047 given" in capsys.readouterr().err
    assert list(small.iterdir()) == []


@pytest.mark.usefixtures("scoring")
def test_a_measurement_that_fails_does_not_take_the_scores_with_it(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no clock")

    monkeypatch.setattr("chai_eval.run.measured", fail)
    assert main([*TINY, "task=piqa", "measure=latency"]) == 1
    out, err = capsys.readouterr()
    assert "acc_norm" in out
    assert "measure: OSError: no clock" in err


def test_what_is_recorded_is_plain_json(small: Path) -> None:
    assert main(["measure", *TINY, "measure=memory", "measure.rivals=[]", "measure.new_tokens=1"]) == 0
    (path,) = small.glob("results/tiny_llama_random/measure/*/record.json")
    (point,) = json.loads(path.read_text())["points"]
    memory = point["results"]["chai"]["memory"]
    assert memory["prefill"]["cache"]["kind"] == "clustered"
    fresh = memory["fresh_process"]  # a tiny model's cache is lost in what else comes and goes: no more than its kinds
    assert min(fresh["before_bytes"], fresh["prefill"]["peak_bytes"], fresh["prefill"]["settled_bytes"]) > 0
