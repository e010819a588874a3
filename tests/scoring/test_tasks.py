"""Tasks by name, held against lm-eval's own definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pyarrow.parquet as pq
import pytest
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from chai_eval.data.assets import fetch
from chai_eval.data.documents import DOCUMENTS
from chai_eval.errors import RunError, SettingError
from chai_eval.resources import tasks_dir
from chai_eval.schema import read
from chai_eval.scoring import tasks
from chai_eval.scoring.tasks import PAPER_TASKS, load_task, primary_metric, task_names
from chai_eval.settings import TaskSettings

STOCK = {
    "piqa": "piqa/piqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "boolq": "super_glue/boolq/default.yaml",
}
PIQA = {"goal": "open a jar", "sol1": "turn the lid", "sol2": "turn the table", "label": 0}


def stock_task(name: str) -> ConfigurableTask:
    """lm-eval's own task file over the same columns, without the hub."""
    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / STOCK[name])
    config = {key: value for key, value in config.items() if key not in ("tag", "dataset_kwargs")}
    split = config.get("test_split") or config["validation_split"]
    rows = datasets.Dataset(datasets.table.InMemoryTable(pq.read_table(fetch(DOCUMENTS) / f"{name}.parquet")))
    # Few-shot examples aren't ours to compare: no training split without the hub.
    config["training_split"] = None
    config["validation_split"] = split if config.get("test_split") is None else None
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: {split: rows}})


def requests(task: Any, limit: int) -> list[tuple[Any, ...]]:
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return [(request.doc_id, request.idx, request.args) for request in task.instances]


@pytest.mark.assets
@pytest.mark.parametrize("name", PAPER_TASKS)
def test_requests_equal_those_of_the_stock_task(name: str) -> None:
    ours, stock = load_task(name, TaskSettings(source="local")), stock_task(name)
    assert requests(ours, limit=200) == requests(stock, limit=200)


@pytest.mark.assets
def test_every_hellaswag_query_and_ending_equals_the_stock_tasks() -> None:
    ours, stock = load_task("hellaswag").eval_docs, stock_task("hellaswag").eval_docs
    for column in ("query", "choices", "gold", "label"):
        assert ours[column][:] == stock[column][:]


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_task_files_say_what_the_stock_files_say(name: str) -> None:
    ours = load_yaml(tasks_dir() / f"{name}.yaml")
    stock = load_yaml(Path(lm_eval.__file__).parent / "tasks" / STOCK[name])
    for key in ("task", "output_type", "doc_to_text", "doc_to_target", "doc_to_choice", "metadata"):
        assert ours[key] == stock[key]
    assert [metric["metric"] for metric in ours["metric_list"]] == ["acc", "acc_norm"]


@pytest.mark.assets
def test_task_files_work_in_lm_eval_itself_on_a_users_own_files(tmp_path: Path) -> None:
    (tmp_path / "piqa.jsonl").write_text(json.dumps(PIQA))
    manager = TaskManager(include_path=str(tasks_dir()), include_defaults=False, metadata={"data_dir": str(tmp_path)})
    assert list(manager.load("piqa")["tasks"]["piqa"].eval_docs) == [PIQA]


def test_data_dir_takes_the_place_of_the_assets(tmp_path: Path) -> None:
    (tmp_path / "piqa.jsonl").write_text(json.dumps(PIQA))
    assert list(load_task("piqa", TaskSettings(data_dir=tmp_path)).eval_docs) == [PIQA]


def test_a_tasks_config_does_not_depend_on_where_its_files_lie(tmp_path: Path) -> None:
    dumped = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "piqa.jsonl").write_text(json.dumps(PIQA))
        dumped.append(json.dumps(load_task("piqa", TaskSettings(data_dir=folder)).dump_config(), default=str))
    assert dumped[0] == dumped[1]
    assert str(tmp_path) not in dumped[0]
    assert str(tasks_dir()) not in dumped[0]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("paper", ["piqa", "hellaswag", "arc_challenge", "arc_easy", "boolq"]),
        ("piqa", ["piqa"]),
        ("boolq,piqa", ["boolq", "piqa"]),
        ("[boolq, piqa]", ["boolq", "piqa"]),
        (["piqa", "winogrande"], ["piqa", "winogrande"]),
        (["boolq", "paper"], ["boolq", "piqa", "hellaswag", "arc_challenge", "arc_easy"]),
        ("ai2_arc", ["arc_challenge", "arc_easy"]),
    ],
)
def test_choices_expand_to_single_tasks_each_once(choice: str | list[str], names: list[str]) -> None:
    assert task_names(choice) == names


def test_nested_groups_expand_to_their_leaves() -> None:
    # Hendrycks et al. 2021: 57 subjects.
    names = task_names("mmlu")
    assert len(names) == len(set(names)) == 57
    assert "mmlu_abstract_algebra" in names


def test_a_group_that_changes_its_tasks_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^task: group tinyBenchmarks changes tinyArc; allowed: its tasks by name$"):
        task_names("tinyBenchmarks")


@pytest.mark.parametrize("function", [task_names, load_task])
def test_an_unknown_name_is_one_line_with_close_ones(function: Any) -> None:
    with pytest.raises(
        SettingError,
        match=r"^task: 'winogrand' is not known \(did you mean winogrande, .*; allowed: paper, .*any task of lm-eval",
    ) as raised:
        function("winogrand")
    assert "\n" not in str(raised.value)


def test_no_task_at_all_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^task: "):
        task_names([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "piqa", "source": "disk"}, r"^source: 'disk' .*allowed: auto, local, hub$"),
        ({"name": "winogrande", "source": "local"}, r"^source: local has no files for task winogrande; allowed: "),
        ({"name": "piqa", "source": "hub", "data_dir": "."}, r"^data_dir: given together with source=hub; allowed: "),
        ({"name": "piqa", "data_dir": "/no/such"}, r"^data_dir: /no/such is not a directory; allowed: "),
    ],
)
def test_a_wrong_source_is_one_line(settings: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        load_task(settings.pop("name"), read(TaskSettings, settings))


def test_an_unreachable_hub_is_one_line_that_names_the_local_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'baber/piqa'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(RunError, match=r"^task: piqa can't be loaded from the hub .*source=local") as raised:
        load_task("piqa", TaskSettings(source="hub"))
    assert "\n" not in str(raised.value)


def test_without_assets_and_hub_the_assets_are_what_the_error_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *args: Any) -> None:
        raise RunError("assets: no network" if args else "hub: no network")

    monkeypatch.setattr(tasks, "_from_files", fail)
    monkeypatch.setattr(tasks, "_from_hub", fail)
    with pytest.raises(RunError, match="^assets: no network$"):
        load_task("piqa")


@pytest.mark.parametrize(
    ("name", "metric"), [("piqa", "acc_norm"), ("arc_easy", "acc_norm"), ("boolq", "acc"), ("winogrande", None)]
)
def test_the_primary_metric_is_acc_norm_but_for_boolq(name: str, metric: str | None) -> None:
    assert primary_metric(name) == metric
