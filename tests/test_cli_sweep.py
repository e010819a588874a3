"""What a sweep loads, scores, skips and says, with stand-ins for models, tasks and scoring that count."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig

from chai_eval.cli import main
from chai_eval.errors import RunError
from chai_eval.methods import Method
from chai_eval.session import LoadedModel, Session
from chai_eval.settings import ModelSettings
from chai_eval.store.code import NumericCode


class Standing:
    """Counts loads and scorings; `broken` maps (task, method) to the error that ends its scoring."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.scored: Counter[tuple[str, str]] = Counter()
        self.broken: dict[tuple[str, str], BaseException] = {}

    def load(self, settings: ModelSettings) -> LoadedModel:
        self.loads.append(settings.name)
        layers, heads = (32, 32) if settings.name == "llama7b" else (30, 9)
        config = LlamaConfig(num_hidden_layers=layers, num_attention_heads=heads, hidden_size=64 * heads)
        model = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"), config=config)
        return LoadedModel(model, None, f"weights of {settings.name}", "architecture", "vocabulary", NumericCode.of())

    def prepare(self, task: str, *, limit: int | None, seed: int, **_: Any) -> Any:
        return SimpleNamespace(
            task_name=task, n_documents=4, n_requests=8, prompts_hash=task, config_hash=task, limit=limit, seed=seed
        )

    def score(self, runner: Any, method: Method, prepared: Any, **_: Any) -> Any:
        name = (prepared.task_name, method.name)
        if name in self.broken:
            raise self.broken[name]
        self.scored[name] += 1
        right = [1.0, 1.0, 1.0, 0.0 if method.name == "mha" else 1.0]
        samples = pd.DataFrame({"doc_id": range(4), "doc_hash": list("abcd"), "acc": right, "acc_norm": right})
        metric = {"value": sum(right) / 4, "stderr": 0.1}
        return SimpleNamespace(samples=samples, metrics={"acc": metric, "acc_norm": metric}, batch={})


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Standing:
    one = Standing()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("chai_eval.scoring.tasks.load_task", lambda name, _: name)
    monkeypatch.setattr("chai_eval.scoring.prepare.prepare", one.prepare)
    monkeypatch.setattr("chai_eval.scoring.evaluate.score", one.score)
    monkeypatch.setattr("chai_eval.evaluation.Evaluation.fidelity", lambda _: None)
    monkeypatch.setattr("chai_eval.run.check_tokens", lambda *_: None)
    monkeypatch.setattr("chai_eval.methods.base.Method.check", lambda self, model: None)
    monkeypatch.setattr("chai_eval.methods.chai.CHAI.check", lambda self, model: None)
    return one


def sweep(standing: Standing, *arguments: str) -> int:
    return main(["-m", *arguments], session=Session(loader=standing.load))


FOUR_BY_TWO = ("method.probe_tokens=1,3,5,8", "task=piqa,boolq")


def test_four_settings_on_two_tasks_load_the_model_once_and_score_each_baseline_once(standing: Standing) -> None:
    assert sweep(standing, *FOUR_BY_TWO) == 0
    assert standing.loads == ["smollm2_mha"]
    assert standing.scored == {
        ("piqa", "mha"): 1,
        ("boolq", "mha"): 1,
        ("piqa", "chai"): 4,
        ("boolq", "chai"): 4,
    }


def test_a_sweep_that_is_typed_again_scores_nothing_and_says_so(
    standing: Standing, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(standing, *FOUR_BY_TWO)
    first = capsys.readouterr().out
    standing.scored.clear()
    assert sweep(standing, *FOUR_BY_TWO) == 0
    again = capsys.readouterr()
    assert standing.scored == {}
    assert again.err.count("finished before") == 16
    assert again.out == first


def test_a_sweep_over_models_loads_each_once_and_keeps_results_apart(standing: Standing, tmp_path: Path) -> None:
    assert sweep(standing, "model=smollm2,smollm2_mha", "method.probe_tokens=3,5", "task=piqa") == 0
    assert standing.loads == ["smollm2", "smollm2_mha"]
    assert standing.scored == {("piqa", "mha"): 2, ("piqa", "chai"): 4}
    assert sorted(path.name for path in (tmp_path / "results").glob("[!.]*")) == ["smollm2", "smollm2_mha"]


def test_a_failing_job_does_not_end_the_others_and_the_last_line_names_it(
    standing: Standing, capsys: pytest.CaptureFixture[str]
) -> None:
    standing.broken["piqa", "chai"] = RunError("logits: not finite in layer 3")
    assert sweep(standing, "method.probe_tokens=1,3", "task=piqa,boolq") == 1
    out, error = capsys.readouterr()
    last = error.splitlines()[-1]
    assert last.startswith("2 of 4 jobs failed: ")
    assert "method.probe_tokens=1 task=piqa (piqa: logits: not finite in layer 3)" in last
    assert "boolq" not in last
    assert out.count("| boolq ") == 4  # twice in a table of its own, twice in that of the sweep


def test_a_failing_task_does_not_end_the_others(standing: Standing, capsys: pytest.CaptureFixture[str]) -> None:
    standing.broken["boolq", "mha"] = ValueError("no such thing\nat all")
    assert main(["task=[piqa,boolq,arc_easy]"], session=Session(loader=standing.load)) == 1
    out, error = capsys.readouterr()
    assert "| piqa " in out
    assert "| arc_easy " in out
    assert "| boolq " not in out
    assert error.splitlines()[-1] == "boolq: ValueError: no such thing at all (unexpected; debug=true shows where)"
    assert "Traceback" not in error


def test_debug_shows_the_traceback_of_an_unexpected_error(
    standing: Standing, capsys: pytest.CaptureFixture[str]
) -> None:
    standing.broken["piqa", "mha"] = ValueError("no such thing")
    assert main(["task=piqa", "debug=true"], session=Session(loader=standing.load)) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupted_sweep_ends_with_one_line(standing: Standing, capsys: pytest.CaptureFixture[str]) -> None:
    standing.broken["boolq", "chai"] = KeyboardInterrupt()
    assert sweep(standing, *FOUR_BY_TWO) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("interrupted: ")
    standing.broken.clear()
    assert sweep(standing, *FOUR_BY_TWO) == 0
    assert standing.scored["boolq", "mha"] == 1


def test_documents_that_cannot_be_had_fail_their_own_job_only(
    standing: Standing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str, settings: Any) -> str:
        if name == "boolq":
            raise RunError("task: boolq can't be loaded from the hub")
        return name

    monkeypatch.setattr("chai_eval.scoring.tasks.load_task", load)
    assert sweep(standing, "task=piqa,boolq") == 1
    out, error = capsys.readouterr()
    assert "| piqa " in out
    assert error.splitlines()[-1] == "1 of 2 jobs failed: task=boolq (task: boolq can't be loaded from the hub)"


@pytest.mark.parametrize("typed", ["task=[piqa,boolq]", "task=piqa,boolq", "task='piqa,boolq'"])
def test_several_tasks_are_one_run_with_one_table(
    standing: Standing, typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed], session=Session(loader=standing.load)) == 0
    out = capsys.readouterr().out
    assert out.count("| task ") == 1
    assert "| piqa " in out
    assert "| boolq " in out


def test_the_table_goes_to_stdout_and_nothing_else_does(standing: Standing, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=llama7b", "task=piqa", "limit=4"], session=Session(loader=standing.load)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line and not line.startswith("|")] == [
        "model",
        "method",
        "costs",
        "documents",
        "results",
    ]
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert cells[:6] == ["piqa", "acc_norm", "4", "75.00", "100.00", "+25.00"]
    assert cells[7] == "-2.00"


@pytest.mark.parametrize(
    ("typed", "limit"),
    [
        ([], 100),
        (["limit=7"], 7),
        (["limit=null"], None),
        (["model=llama7b"], None),
        (["model=llama7b", "limit=7"], 7),
    ],
    ids=str,
)
def test_only_embedded_models_have_a_limit_of_their_own(
    standing: Standing, typed: list[str], limit: int | None, tmp_path: Path
) -> None:
    from chai_eval.store.record import read_record

    assert main(["task=piqa", "method=mha", *typed], session=Session(loader=standing.load)) == 0
    (record,) = tmp_path.glob("results/*/piqa/mha-*/record.json")
    found = read_record(record.parent)
    assert found is not None
    assert found["config"]["limit"] == limit


def test_status_lists_what_a_sweep_left(standing: Standing, capsys: pytest.CaptureFixture[str]) -> None:
    standing.broken["boolq", "chai"] = RunError("out of luck")
    sweep(standing, "task=piqa,boolq")
    capsys.readouterr()
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {(task, method, state) for _, task, method, _, state, _ in cells} == {
        ("piqa", "mha", "finished"),
        ("piqa", "chai", "finished"),
        ("boolq", "mha", "finished"),
        ("boolq", "chai", "failed"),
    }
    assert any("out of luck" in line for line in lines)
