"""Our own files give the task that lm-eval makes of them, with nothing prepared that isn't asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from chai_eval.data import documents
from chai_eval.resources import tasks_dir
from chai_eval.scoring.prepare import prepare
from chai_eval.scoring.tasks import PAPER_TASKS, load_task
from chai_eval.settings import TaskSettings
from chai_eval.task_settings import PromptSettings

pytestmark = pytest.mark.assets

LOCAL = TaskSettings(source="local")


def lm_evals(name: str) -> Any:
    """The task as lm-eval's own manager makes it of the same file."""
    manager = TaskManager(include_path=str(tasks_dir()), include_defaults=False)
    return manager.load(name)["tasks"][name]


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_its_config_is_the_one_that_lm_eval_resolves(name: str) -> None:
    theirs = lm_evals(name)
    del theirs.config.metadata["config_source"]
    theirs.config.custom_dataset = "chai_eval.data.documents.local_documents"
    assert json.dumps(load_task(name, LOCAL).dump_config(), default=str) == json.dumps(
        theirs.dump_config(), default=str
    )


@pytest.mark.parametrize("name", ["hellaswag", "arc_easy"])
def test_examples_are_drawn_as_lm_eval_draws_them(name: str) -> None:
    ours = prepare(load_task(name, LOCAL), limit=20, seed=3, prompts=PromptSettings(num_fewshot=2))
    theirs = lm_evals(name)
    theirs.set_config("num_fewshot", 2)
    theirs.set_fewshot_seed(3)
    theirs.build_all_requests(limit=20)
    assert [each.args for each in ours.task.instances] == [each.args for each in theirs.instances]


def test_of_hellaswag_no_more_is_prepared_than_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []
    whole = documents._with_hellaswag_query

    def counted(rows: Any) -> Any:
        prepared.append(len(rows))
        return whole(rows)

    monkeypatch.setattr(documents, "_with_hellaswag_query", counted)
    assert prepare(load_task("hellaswag", LOCAL), limit=1, seed=3).n_documents == 1
    assert sum(prepared) == documents.HellaSwag.BLOCK
