"""Experiments that score: data against the results they were made of, the paper beside, interrupted and repeated."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

from chai_eval.cli import main
from chai_eval.experiments import scores
from chai_eval.report.paper import paper_figure, verdict
from chai_eval.report.statistics import Difference, paired_difference
from chai_eval.resources import paper_dir
from chai_eval.settings import MethodSettings
from chai_eval.store.record import read_record, read_samples
from chai_eval.store.status import list_results
from tests.experiments.conftest import Do

FEW = ("task=[piqa,arc_easy]", "limit=6", "fidelity=4", "batch_tokens=256")


def documents(prepared: Path) -> str:
    return f"data_dir={prepared / 'documents'}"


def ends(found: Difference) -> list[float]:
    return [found.points, found.low, found.high]


def result(folder: Path, label: str, task: str, which: str) -> pd.DataFrame:
    record = read_record(folder)
    assert record is not None
    return read_samples(folder.parents[2] / record["sources"][label][task][which])


def test_data_are_those_of_the_results(do: Do, prepared: Path) -> None:
    folder = do("probe_tokens", *FEW, documents(prepared))
    frame = pd.read_csv(folder / "data.csv").set_index(["run", "task"])
    against = pd.read_csv(folder / "against.csv").set_index(["run", "task"])
    for label in ("1 token", "16 tokens"):
        scored: dict[str, list[Any]] = {"mha": [], "own": [], "five": []}
        for task in ("piqa", "arc_easy"):
            mha = result(folder, label, task, "mha")["acc_norm"].to_numpy()
            own = result(folder, label, task, "method")["acc_norm"].to_numpy()
            five = result(folder, "5 tokens", task, "method")["acc_norm"].to_numpy()
            for name, values in (("mha", mha), ("own", own), ("five", five)):
                scored[name].append(values)
            found, expected = frame.loc[(label, task)], paired_difference(mha, own)
            assert found["score"] == pytest.approx(100 * own.mean(), rel=1e-5)
            assert found[["difference", "low", "high"]].tolist() == pytest.approx(ends(expected), rel=1e-4)
        together = {name: np.concatenate(values) for name, values in scored.items()}
        for table, first in ((frame, "mha"), (against, "five")):
            expected = paired_difference(together[first], together["own"])
            found = table.loc[(label, "all")]
            assert found["n"] == 12
            assert found["p"] == pytest.approx(expected.p, rel=1e-4)
            assert found[["difference", "low", "high"]].tolist() == pytest.approx(ends(expected), rel=1e-4)
    assert (frame["compared"].dropna() >= 4).all()
    assert frame.loc[("5 tokens", "all"), "held"] == pytest.approx(1 - (3 + 5 + 5) / 64, rel=1e-4)


def test_predictions_are_compared_document_by_document(do: Do, prepared: Path) -> None:
    folder = do("v_reuse", "task=[piqa,arc_easy]", *FEW[1:], documents(prepared))
    found = pd.read_csv(folder / "against.csv").set_index(["run", "task"]).loc[("V-reuse", "all")]
    record = read_record(folder)
    assert record is not None
    divergence = {
        label: np.concatenate([
            pd.read_parquet(folder.parents[2] / each["method"] / "fidelity.parquet")["divergence"]
            for each in record["sources"][label].values()
        ])
        for label in ("CHAI", "V-reuse")
    }  # fmt: skip
    low, high = ttest_rel(divergence["V-reuse"], divergence["CHAI"]).confidence_interval()
    assert found["kl_difference"] == pytest.approx((divergence["V-reuse"] - divergence["CHAI"]).mean(), rel=1e-4)
    assert found[["kl_difference_low", "kl_difference_high"]].tolist() == pytest.approx([low, high], rel=1e-4)


def test_methods_at_equal_savings_save_what_was_asked(do: Do, prepared: Path) -> None:
    methods = "experiment.methods=[chai,chai_static,output_aware]"
    few = ("task=piqa", *FEW[1:], documents(prepared))
    folder = do("cluster_counts", *few, methods, "experiment.savings=[0.125,0.25]")
    frame = pd.read_csv(folder / "data.csv")
    assert set(frame["method"]) == {"chai", "chai_static", "output_aware"}
    for run, own in frame.groupby("run"):
        asked = float(str(run).split()[-2])
        assert own["saving"].iloc[0] == pytest.approx(asked, abs=1.6)  # a merge saves 1/64 of the cache


@pytest.mark.parametrize("name", ["accuracy_llama7b", "accuracy_llama33b", "accuracy_opt66b"])
def test_the_papers_tables_are_made_of_another_model(name: str, do: Do, prepared: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = do(name, "task=piqa", *FEW[1:], documents(prepared))
    table = (folder / "table.md").read_text()
    model = name.partition("_")[2]
    assert table.splitlines()[0].endswith("(quick)")
    assert f"Beside the paper: not comparable: the paper's figures are of {model}." in table
    assert f"`python -m chai_eval +experiment={name} model=tiny_llama_random" in table
    frame = pd.read_csv(folder / "data.csv")
    with (paper_dir() / "tables.csv").open(newline="") as file:
        rows = {(row["model"], row["method"], row["task"]): row["value"] for row in csv.DictReader(file)}
    for each in frame[frame["task"] == "piqa"].to_dict("records"):
        if (model, each["method"], "piqa") in rows:
            assert float(each["paper"]) == float(rows[model, each["method"], "piqa"])
    for ending in ("svg", "png"):
        assert (folder / f"{name}.{ending}").stat().st_size > 1000
    drawn = (folder / f"{name}.svg").read_text()
    assert "quick=true" in drawn
    assert "(quick)" in drawn
    record = json.loads((folder / "record.json").read_text())
    assert record["quick"] is True
    assert set(record["files"]) >= {"data.csv", "table.md", f"{name}.svg"}
    assert all(each.model != "experiments" for each in list_results(Path("results")))


def test_an_interrupted_experiment_goes_on_to_the_same_files(
    do: Do, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ("task=piqa", *FEW[1:], documents(prepared))
    whole = tmp_path / do("v_reuse", *typed)
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path / "again")
    real, calls = scores.run, []

    def killed(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(scores, "run", killed)
    assert main(["+experiment=v_reuse", "model=tiny_llama_random", "device=cpu", "quick=true", *typed]) == 130
    assert not Path("results/experiments").exists()
    again = do("v_reuse", *typed)
    names = sorted(each.name for each in whole.iterdir())
    assert names == sorted(each.name for each in again.iterdir())
    for name in names:
        assert (again / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_run_that_fails_fails_the_experiment_in_one_line(
    do: Do, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        do("v_reuse", "task=hellaswag", documents(prepared))
    line = capsys.readouterr().err.splitlines()[-1]
    assert "hellaswag" in line
    assert not Path("results/experiments").exists()


def test_verdicts() -> None:
    assert verdict((-1.0, -3.0, 1.0), -2.0) == "agrees"
    assert verdict((-1.0, -3.0, 1.0), -4.25) == "differs by +3.25 points"
    assert verdict((19.1, 19.1, 19.1), 21.4) == "differs by -2.30 points"
    for ours, paper in (((0.0, float("nan"), float("nan")), 1.0), ((0.0, -1.0, 1.0), None), ((0.0, -1.0, 1.0), "< 3")):
        assert verdict(ours, paper).startswith("not comparable: ")


def test_the_papers_ranges_are_shown_as_it_gives_them() -> None:
    assert paper_figure("llama7b", MethodSettings("dejavu", {"sparsity": 0.1}), "piqa") == "-7.4 to -3.18"
    assert paper_figure("llama7b", MethodSettings("dejavu", {"sparsity": 0.5}), "piqa") is None
    assert paper_figure("llama7b", MethodSettings("v_reuse", {}), "piqa") == pytest.approx(61.93 - 79.8)
