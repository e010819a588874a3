"""From a run of a tiny model to its page: texts found by lm-eval's own hashes, and commands that can be typed again."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from chai_eval.cli import main
from chai_eval.cli.overrides import jobs_of
from chai_eval.measure.ceiling import Ceiling
from chai_eval.report.changed import changes, predictions
from chai_eval.report.commands import command_of, measure_command
from chai_eval.report.facts import facts
from chai_eval.report.pairs import pairs
from chai_eval.report.records import Records, read_records
from chai_eval.settings import Settings
from tests.page.made import HARMFUL, documents

GRID = ("measure.lengths=[16,24]", "measure.new_tokens=3", "measure.repetitions=3", "measure.rivals=[sdpa]")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = tmp_path_factory.mktemp("run")
    documents(folder / "data", 24)
    given = ["model=tiny_llama_random", "task=piqa", f"data_dir={folder / 'data'}", "fidelity=3", "limit=24"]
    assert main(["-m", *given, "method=chai,v_reuse", f"results_dir={folder / 'results'}"]) == 0
    with pytest.MonkeyPatch.context() as patched:  # a ceiling that is known without minutes of copying
        patched.setattr("chai_eval.measure.grid.measure_ceiling", lambda *_, **__: Ceiling(1e10, 1e10, 1e11))
        assert main(["measure", "model=tiny_llama_random", *GRID, f"results_dir={folder / 'results'}"]) == 0
    return read_records([folder / "results"], folder / "out")


def test_answers_are_those_that_lm_eval_judged(records: Records) -> None:
    labels = np.arange(24) % 2
    for each in records.tasks:
        for metric in ("acc", "acc_norm"):
            found = predictions(each, metric)
            assert found is not None
            assert ((found == labels) == each.samples[metric].to_numpy(bool)).all()


def test_the_text_of_a_changed_document_is_found_by_its_hash(records: Records) -> None:
    left_out: list[str] = []
    found = changes(pairs(records.tasks, left_out), 100)
    assert not left_out
    assert {each.label for each in found} == {"chai", "v_reuse"}
    shown = [doc for each in found for doc in each.shown]
    assert shown
    for doc in shown:
        assert doc.why is None
        assert doc.question == f"{HARMFUL} goal {doc.doc_id}"
        assert doc.choices == (f"one {doc.doc_id}", f"two <b>{doc.doc_id}</b>")
        assert doc.gold == doc.doc_id % 2
        assert doc.before != doc.after


def test_text_that_is_not_what_was_scored_is_not_shown(records: Records) -> None:
    (data_dir,) = {each.record["config"]["data_dir"] for each in records.tasks}
    file = Path(data_dir) / "piqa.jsonl"
    before = file.read_text()
    found = [doc.doc_id for each in changes(pairs(records.tasks, []), 100) for doc in each.shown]
    try:
        file.write_text(before.replace(f'goal {found[0]}"', f'another goal {found[0]}"'))
        shown = [doc for each in changes(pairs(records.tasks, []), 100) for doc in each.shown]
    finally:
        file.write_text(before)
    for doc in shown:
        assert (doc.question is None) == (doc.doc_id == found[0])
        assert (doc.why or "").endswith("is not the one that was scored") == (doc.doc_id == found[0])


def test_typing_the_command_of_a_record_gives_its_settings(records: Records) -> None:
    assert {each.place[2] for each in records.tasks} == {"mha", "chai", "v_reuse"}
    for each in records.tasks:
        config = each.record["config"]
        assert again(command_of(config, each.place[1])) == {**config, "results_dir": "results"}


@pytest.mark.parametrize(
    "typed",
    [
        ["model=llama7b", "method=chai", "task=boolq"],
        ["model=smollm2_mha", "method.probe_tokens=3", "method.clusters=[[9,17],[3,13]]", "task=piqa", "limit=7"],
        ["model=smollm2", "method=kv_rank", "method.saving=0.3", "task=arc_easy", "dtype=bfloat16", "limit=null"],
        [
            "model=smollm2_mha",
            "method=dejavu",
            "method.selector=predictor",
            "task=piqa",
            "scoring=decode",
            "fidelity=null",
        ],
        ["model=smollm2_mha", "method.with=[{name:dejavu,sparsity:0.1}]", "task=piqa", "num_fewshot=2"],
        ["model=opt125m", "task=piqa", "system_instruction=a, b and 'c'", "apply_chat_template=true"],
    ],
)
def test_the_command_of_settings_gives_them_again(typed: list[str]) -> None:
    config = settings(typed).as_config()
    assert again(command_of(config, config["task"])) == config


def test_latency_and_memory_are_those_of_the_models_own_measurement(records: Records) -> None:
    (measured,) = records.measurements
    alike, lost, memory, latency = facts("tiny_llama_random", "chai", records, pairs(records.tasks, []), None)
    points = measured.content["points"]
    ratios = [each["results"]["chai"]["times_as_fast_as"]["mha (sdpa)"]["tpot"]["value"] for each in points]
    assert latency.value == f"{min(ratios):.2f}× to {max(ratios):.2f}× a token"
    plain, ours = (
        points[-1]["results"][name]["memory"]["prefill"]["cache"]["allocated_bytes"] for name in ("mha (sdpa)", "chai")
    )
    assert memory.value == f"{100 * (ours / plain - 1):+.1f} %"
    assert memory.elsewhere is latency.elsewhere is None
    assert "24 documents of 1 tasks" in lost.says
    assert alike.make == "python -m chai_eval analyse model=tiny_llama_random"
    elsewhere = facts("another", "chai", records, [], None)
    assert [each.elsewhere for each in elsewhere[2:]] == [None, "tiny_llama_random"]
    assert elsewhere[2].make == "python -m chai_eval measure model=another method=chai"


def test_typing_the_command_of_a_measurement_measures_the_same(records: Records) -> None:
    (measured,) = records.measurements
    python, option, package, command, *given = shlex.split(measure_command(measured.content))
    assert (python, option, package, command) == ("python", "-m", "chai_eval", "measure")
    (job,) = jobs_of(["measure=full", *given], multirun=True)
    config = measured.content["config"]
    assert job.settings.as_config()["measure"] == config["measure"]
    assert job.settings.as_config()["method"] == config["method"]


def settings(typed: list[str]) -> Settings:
    return jobs_of(typed, multirun=False)[0].settings


def again(command: str) -> dict[str, object]:
    python, option, package, *given = shlex.split(command)
    assert (python, option, package) == ("python", "-m", "chai_eval")
    return settings(given).as_config()
