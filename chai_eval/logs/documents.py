"""Questions and choices of our results, which hold hashes of them: built again from the documents on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chai_eval.errors import RunError, SettingError
from chai_eval.schema import defaults, read
from chai_eval.settings import TaskSettings


def texts_of(record: Mapping[str, Any]) -> dict[int, tuple[str, Sequence[str] | None]]:
    """The prompt and the choices of each document of a result, by doc_id.

    Returns
    -------
    dict
        Empty where they can't be had here, or would be others than those that were scored: tasks other than the
        paper's five, a chat template, no documents on this machine. Nothing is fetched.
    """
    from chai_eval.data.assets import is_fetched
    from chai_eval.data.documents import DOCUMENTS
    from chai_eval.scoring.prepare import prepare
    from chai_eval.scoring.tasks import PAPER_TASKS, load_task

    config, task = record["config"], record["task"]
    given = {name: config[name] for name in defaults(TaskSettings) if name in config}
    at_hand = given.get("data_dir") is not None or is_fetched(DOCUMENTS)
    # Task files of the user's own may run Python: a record doesn't say that they may.
    if task not in PAPER_TASKS or not at_hand or given.get("include_path") or given.get("apply_chat_template"):
        return {}
    try:
        settings = read(TaskSettings, {**given, "task": task, "source": "local"})
        prepared = prepare(
            load_task(task, settings), limit=settings.limit, seed=config["seed"], prompts=settings.prompts
        )
    except (SettingError, RunError):
        return {}
    if prepared.prompts_hash != record["key_parts"]["task"]["prompts"]:
        return {}
    found: dict[int, tuple[str, list[str]]] = {}
    for each in prepared.task.instances:
        found.setdefault(each.doc_id, (each.args[0], []))[1].append(each.args[1])
    return dict(found)
