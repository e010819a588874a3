"""Every file of `conf/experiment` composes; what is typed goes before what it says; mistakes are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from chai_eval.cli import main
from chai_eval.cli.configuration import choices
from chai_eval.cli.experiment import plans_of
from chai_eval.errors import RunError
from chai_eval.experiments.plan import Plan
from chai_eval.session import Session
from chai_eval.settings import Settings

NAMES = choices("experiment")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_there_is_a_file_for_each_table_and_figure() -> None:
    assert NAMES == [
        "accuracy_llama33b", "accuracy_llama7b", "accuracy_opt66b", "cluster_counts", "error_curves",
        "head_correlation", "kv_memory", "latency", "membership_changes", "probe_tokens", "v_reuse",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_file_composes_for_the_papers_model_and_for_another(name: str) -> None:
    (plan,) = plans_of([f"+experiment={name}"])
    assert plan.model in ("llama7b", "llama33b", "opt66b")
    assert plan.model == (plan.experiment.paper_model or "llama7b")
    (quick,) = plans_of([f"+experiment={name}", "model=smollm2_mha", "quick=true", "results_dir=my results"])
    assert quick.settings != plan.settings
    assert str(quick.folder) == f"my results/experiments/{name}/smollm2_mha-quick"
    assert quick.title.endswith("(quick)")


def test_what_is_typed_goes_before_quick_and_quick_before_the_file() -> None:
    limits = []
    for typed in ([], ["quick=true"], ["quick=true", "limit=3"], ["limit=3"]):
        (plan,) = plans_of(["+experiment=probe_tokens", *typed])
        assert isinstance(plan.settings, Settings)
        limits.append({plan.settings.task.limit, *(each.task.limit for each in plan.runs.values())})
    quick = limits.pop(1)
    assert limits == [{500}, {3}, {3}]
    assert max(quick) < 500
    assert [each.method.options["probe_tokens"] for each in plan.runs.values()] == [1, 2, 3, 5, 8, 16]


def test_settings_of_the_experiment_itself_can_be_typed() -> None:
    (plan,) = plans_of(["+experiment=cluster_counts", "quick=true", "experiment.savings=[0.1]"])
    assert plan.experiment.savings == (0.1,)


def test_several_experiments_are_planned_one_after_the_other() -> None:
    plans = plans_of(["+experiment=glob(accuracy*)", "model=smollm2_mha"], multirun=True)
    assert [each.experiment.name for each in plans] == NAMES[:3]
    assert plans[0].command == "python -m chai_eval +experiment=accuracy_llama33b model=smollm2_mha"


def test_of_several_experiments_those_that_fail_are_told_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []

    def carry_out(plan: Plan, _: object) -> None:
        if plan.experiment.name != "kv_memory":
            raise RunError(f"no {plan.experiment.name} today")
        done.append(plan.experiment.name)

    monkeypatch.setattr("chai_eval.experiments.command.carry_out", carry_out)
    typed = ["-m", "+experiment=error_curves,kv_memory,latency", "model=smollm2_mha"]
    assert main(typed, Session()) == 1
    assert done == ["kv_memory"]
    assert capsys.readouterr().err == (
        "2 of 3 experiments failed: error_curves (no error_curves today); latency (no latency today)\n"
    )


MISTAKES = [
    (["+experiment=accuracy"], "experiment: 'accuracy' is unknown", "v_reuse"),
    (["+experiment=latency,kv_memory"], "experiment: 'latency,kv_memory' given, several values", "-m"),
    (["+experiment=latency", "+experiment=kv_memory"], "experiment: given 2 times", "-m"),
    (["+experiment=latency", "quick=maybe"], "quick: 'maybe' given", "true, false"),
    (["+experiment=latency", "figures=maybe"], "figures: 'maybe' given", "true, false, null"),
    (["+experiment=latency", "method=mha"], "method=mha: given with an experiment, whose run 'CHAI'", "other settings"),
    (["+experiment=latency", "model=llama8b"], "model: 'llama8b' is unknown (did you mean llama7b?)", "smollm2"),
    (["+experiment=probe_tokens", "limt=5"], "limt: 'limt' is unknown (did you mean limit?)", "limit"),
    (["+experiment=probe_tokens", "limit=1,2"], "limit: '1,2' given, several values", "one value"),
    (["+experiment=error_curves", "limit=5"], "limit: 'limit' is unknown", "samples"),
    (["+experiment=cluster_counts", "experiment.savings=[2]"], "experiment.savings: [2] given", "between 0 and 1"),
    (["measure", "+experiment=latency"], "+experiment=latency: not understood here", "+experiment=NAME"),
    (["analyse", "+experiment=latency"], "+experiment=latency: not understood here", "+experiment=NAME"),
    (["quick=true"], "quick: 'quick' is unknown", "task"),
    (["+experiment=membership_changes", "model=opt125m"], "counts: no cluster counts are known", "=opt125m`"),
    (["+experiment=accuracy_opt66b"], "method.clusters: no cluster counts are known for opt66b", "model=opt66b`"),
    (["+experiment=cluster_counts"], "method.clusters: no calibration 'llama7b'", "calibrate model=llama7b"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "said", "allowed"), MISTAKES, ids=[" ".join(typed) for typed, *_ in MISTAKES])
def test_a_mistake_is_one_line(
    typed: list[str], said: str, allowed: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert main(typed) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(said)
    assert allowed in error.partition("; allowed: ")[2]
    assert list(elsewhere.iterdir()) == []


def test_help_lists_experiments_with_what_they_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert {*NAMES, "quick=true"} <= {line[0] for line in lines}
