"""Tasks by name: the user's own, the paper's five from local files, running text, any other of lm-eval from the hub."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from chai_eval.errors import RunError, SettingError, closest
from chai_eval.hub import hub
from chai_eval.resources import tasks_dir
from chai_eval.scoring.own_tasks import load_own, own_index, unreadable
from chai_eval.settings import TaskSettings
from chai_eval.task_settings import NONE_OWN, IncludedTasks

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

PAPER_TASKS = ("piqa", "hellaswag", "arc_challenge", "arc_easy", "boolq")
# The perplexity of text that the user names, per byte: per word it overflows for text with few spaces in it.
TEXT = "text"
PRIMARY_METRICS = dict.fromkeys(PAPER_TASKS, "acc_norm") | {"boolq": "acc", TEXT: "byte_perplexity"}
ALL_DEFAULT = TaskSettings()
_LOCAL_FUNCTIONS = ("chai_eval.data.documents.local_documents", "chai_eval.data.text.text_documents")


def primary_metric(name: str) -> str | None:
    """The metric a task is compared by; None for a task that isn't ours: its first metric then."""
    return PRIMARY_METRICS.get(name)


def is_own(name: str, included: IncludedTasks) -> bool:
    """Whether a name is of a task in the user's own folders, which go before lm-eval's and the paper's five."""
    return name != TEXT and name in own_index(included)


def task_names(choice: str | Iterable[str], included: IncludedTasks = NONE_OWN) -> list[str]:
    """Names of single tasks behind a choice, each once, in the order given.

    A choice is `paper` (the paper's five), `text`, a task, group or tag of lm-eval or of the user's own, several with
    commas between (`piqa,boolq` or `[piqa,boolq]`), or a list of these. SettingError for a name that lm-eval doesn't
    know, a group that changes the settings of its tasks, or no name at all.
    """
    parts = [choice] if isinstance(choice, str) else [str(part) for part in choice]
    names = [name.strip() for part in parts for name in part.strip().strip("[]").split(",") if name.strip()]
    if not names:
        raise SettingError(f"task: {choice!r} names no task; allowed: paper, {', '.join(PAPER_TASKS)}, lm-eval's tasks")
    expanded = [task for name in names for task in _expand(name, included)]
    return list(dict.fromkeys(expanded))


def check_text(names: Sequence[str], text: str | None) -> None:
    """Raise SettingError unless text is given where the task `text` is among those to score, and only there."""
    if text is None and TEXT in names:
        from chai_eval.data.text import AS_IT_STANDS

        raise SettingError(f"text: None given with task=text; allowed: {AS_IT_STANDS}")
    if text is not None and TEXT not in names:
        raise SettingError(f"text: {text!r} given without task=text; allowed: null, or task=text")


def load_task(name: str, settings: TaskSettings = ALL_DEFAULT) -> Task:
    """A single lm-eval task, by a name of `task_names`, with its stock prompt; one of the user's own as it is.

    The settings say where its documents come from; `limit` counts for `text` alone. `source=local`: the paper's five,
    from the assets or from `data_dir`, which has `<task>.parquet`, `.jsonl` or `.json` in the hub's columns. `hub`: as
    lm-eval defines it. `auto`: local for the five, the hub where the assets can't be had, and for any other.

    SettingError where a setting is wrong, `data_dir` lacks the task's file or a column, `text` can't be read, or a task
    file would run Python that isn't allowed; RunError where the documents can't be fetched.
    """
    _check_source(name, settings)
    if is_own(name, settings.included):
        return _portable(load_own(name, settings.included))
    if name == TEXT:
        check_text([name], settings.text)
        return _from_files(name, {"text": settings.text, "limit": settings.limit})
    if name not in PAPER_TASKS or settings.source == "hub":
        return _from_hub(name)
    if settings.data_dir is not None:
        return _from_files(name, {"data_dir": str(settings.data_dir.absolute())})
    try:
        return _from_files(name, None)
    except RunError as no_assets:
        if settings.source == "local":
            raise
        try:
            task = _from_hub(name)
        except RunError:
            raise no_assets from None
        sys.stderr.write(f"{no_assets}\n{name} is read from the hub instead\n")
        return task


def _check_source(name: str, settings: TaskSettings) -> None:
    data_dir, source = settings.data_dir, settings.source
    if data_dir is not None and source == "hub":
        raise SettingError("data_dir: given together with source=hub; allowed: source=local, source=auto")
    if data_dir is not None and not data_dir.is_dir():
        raise SettingError(
            f"data_dir: {data_dir} is not a directory; allowed: a directory with <task>.parquet or .jsonl"
        )
    if name not in (*PAPER_TASKS, TEXT) and not is_own(name, settings.included):
        if source == "local":
            raise SettingError(
                f"source: local has no files for task {name}; "
                f"allowed: source=hub, or the tasks {', '.join(PAPER_TASKS)}"
            )
        _check_known(name, settings.included)


def _check_known(name: str, included: IncludedTasks) -> None:
    known = _stock_tasks().all_tasks
    if name in known:
        return
    own = list(own_index(included))
    ours = ", ".join(("paper", *PAPER_TASKS, TEXT, *own[:10]))
    hint = closest(name, ["paper", TEXT, *own, *known], 5)
    if passed_over := unreadable(included):
        hint += f", and {passed_over}"
    raise SettingError(f"task: {name!r} is not known{hint}; allowed: {ours}, any task of lm-eval")


@lru_cache(maxsize=1)
def _stock_tasks() -> TaskManager:
    # Reading lm-eval's 14,000 task files takes seconds, so only runs that need more than the five pay for it.
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _from_files(name: str, metadata: dict[str, Any] | None) -> Task:
    from chai_eval.scoring.local_task import LocalTask

    with _without_kwargs_advice():
        return _portable(LocalTask.of(tasks_dir() / f"{name}.yaml", metadata or {}))


def _from_hub(name: str) -> Task:
    manager = _stock_tasks()
    try:
        with hub():
            loaded = manager.load(name)["tasks"]
    except Exception as error:  # a task may run code of its own: whatever it raises, the user gets one line
        lines = str(error).strip().splitlines() or [""]
        instead = "; source=local needs no hub" if name in PAPER_TASKS else "; the first run of it needs the network"
        raise RunError(
            f"task: {name} can't be loaded from the hub ({type(error).__name__}: {lines[0]}){instead}"
        ) from error
    if name not in loaded:
        raise SettingError(f"task: {name} is a group; allowed: its tasks {', '.join(sorted(loaded))}")
    return _portable(loaded[name])


def _portable(task: Task) -> Task:
    """Leave out of the task's config what depends on where files lie and changes no number."""
    if getattr(task, "UNSAFE_CODE", False):
        raise SettingError(f"task: {task.config.task} runs code that the model writes; allowed: tasks that don't")
    metadata = getattr(task.config, "metadata", None)
    if isinstance(metadata, dict):
        for key in ("data_dir", "text", "limit", "config_source"):
            metadata.pop(key, None)
    # A dumped config would hold the source text of the function, and a result's key change with its comments.
    function = getattr(task.config, "custom_dataset", None)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
    if name in _LOCAL_FUNCTIONS:
        task.config.custom_dataset = name
    return task


@contextmanager
def _without_kwargs_advice() -> Iterator[None]:
    # lm-eval warns about --metadata for every task with a `custom_dataset`.
    logger = logging.getLogger("lm_eval.api.task")

    def other(record: logging.LogRecord) -> bool:
        return "Custom kwargs can be passed" not in record.getMessage()

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _expand(name: str, included: IncludedTasks) -> list[str]:
    own = own_index(included).get(name)
    if own is not None and name in ("paper", TEXT):
        raise SettingError(f"include_path: {own.yaml_path} is called {name}; allowed: any name but paper and text")
    if name == "paper":
        return list(PAPER_TASKS)
    if own is None and name in (*PAPER_TASKS, TEXT):
        return [name]
    if own is None:
        _check_known(name, included)
    return _members(name, name, included)


def _members(name: str, within: str, included: IncludedTasks) -> list[str]:
    """Single tasks of a task, group or tag."""
    entry = own_index(included).get(name) or _stock_tasks().task_index.get(name)
    if entry is None:
        raise SettingError(f"task: {within} has a member {name} that lm-eval doesn't know; allowed: its tasks by name")
    kind = entry.kind.name
    if kind == "TAG":
        return [task for member in sorted(entry.tags) for task in _members(member, within, included)]
    if kind != "GROUP":
        return [name]
    return _group_members(entry.cfg or {}, within, included)


def _group_members(group: Mapping[str, Any], within: str, included: IncludedTasks) -> list[str]:
    from lm_eval.config.group import GroupConfig

    # A task loaded by its own name would lose what its group sets for it, and score something else.
    of_group = set(GroupConfig.__dataclass_fields__) | {"tag"}
    if changed := sorted(set(group) - of_group):
        raise SettingError(f"task: group {within} sets {', '.join(changed)} for its tasks; allowed: its tasks by name")
    names: list[str] = []
    members = group.get("task") or []
    for member in [members] if isinstance(members, str) else members:
        if isinstance(member, str):
            names += _members(member, within, included)
        elif "group" in member and "task" in member:
            names += _group_members(member, within, included)
        elif set(member) in ({"task"}, {"group"}):
            names += _members(next(iter(member.values())), within, included)
        else:
            raise SettingError(
                f"task: group {within} changes {member.get('task') or member.get('group')}; allowed: its tasks by name"
            )
    return names
