"""Task files of the user's own, and the Python that they would run.

lm-eval imports a task file's functions as it reads it, and renders its templates in an environment from which a
template reaches all of Python. Here nothing of either runs unless the user allows it: files are looked through before
they are loaded, and templates are rendered in Jinja's sandbox, in which harmless ones give the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chai_eval.checksum import sha256_of
from chai_eval.errors import RunError, SettingError, failure_line
from chai_eval.scoring.hashes import content_hash
from chai_eval.task_settings import IncludedTasks

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry

FUNCTION = "!function"


def own_index(included: IncludedTasks) -> Mapping[str, Entry]:
    """What stands in the user's folders, by name: of several of one name that in the last folder, as in lm-eval."""
    return _own_tasks(included).task_index if included.paths else {}


def load_own(name: str, included: IncludedTasks) -> Task:
    """A task of the user's own; SettingError where it would run Python that isn't allowed, RunError for any other."""
    entry = own_index(included)[name]
    code = _code(entry.yaml_path)
    if code and not included.code:
        raise SettingError(f"include_code: False given, and {code[0]}; allowed: true, if you trust what lies there")
    try:
        with sandboxed_templates():
            task = _own_tasks(included).load(name)["tasks"][name]
    except SettingError:
        raise
    except Exception as error:  # a task may run code of its own: whatever it raises, the user gets one line
        raise RunError(f"task: {name} of {entry.yaml_path} can't be loaded ({failure_line(error)})") from error
    if code:
        task.config.metadata = {**(task.config.metadata or {}), "python": _python(included)}
    return task


def unreadable(included: IncludedTasks) -> str | None:
    """Of the user's task files the first that lm-eval passed over as it can't be read, and why."""
    from lm_eval.tasks._yaml_loader import load_yaml

    for path in _files(included):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:
            return f"{path} can't be read: {' '.join(str(error).split())[:200]}"
    return None


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Render lm-eval's templates in Jinja's sandbox; RunError where one asks for what that keeps from it."""
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    plain = utils.env
    sandbox = SandboxedEnvironment(loader=plain.loader, undefined=plain.undefined, keep_trailing_newline=True)
    sandbox.filters = plain.filters
    utils.env = sandbox
    try:
        yield
    except SecurityError as error:
        raise RunError(f"a template reaches into Python, which is never allowed: {error}") from error
    finally:
        utils.env = plain


def _folders(included: IncludedTasks) -> list[Path]:
    return [path.absolute() for path in included.paths]


def _files(included: IncludedTasks) -> list[Path]:
    """The task files that lm-eval reads."""
    return sorted(path for folder in _folders(included) for path in folder.glob("**/*.yaml"))


def _own_tasks(included: IncludedTasks) -> TaskManager:
    stamps = tuple((str(path), path.stat().st_mtime_ns) for path in _files(included))
    return _manager(tuple(map(str, _folders(included))), stamps)


@lru_cache(maxsize=8)
def _manager(folders: tuple[str, ...], stamps: tuple[Any, ...]) -> TaskManager:
    """lm-eval's view of the folders, read again when a file has changed."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(folders), include_defaults=False)


def _code(path: Path) -> list[str]:
    """What a task file and those that it includes would run, as `FILE runs …`; lm-eval's own files are trusted."""
    import lm_eval

    stock = Path(lm_eval.__file__).resolve().parent
    files = [each for each in _with_included(path) if stock not in each.parents]
    functions = [f"{file} runs {FUNCTION} {name}" for file in files for name in _functions(file)]
    return functions + [f"{path} runs the metric {name} of the library evaluate" for name in _foreign_metrics(path)]


def _with_included(path: Path, seen: tuple[Path, ...] = ()) -> list[Path]:
    from lm_eval.tasks._yaml_loader import load_yaml

    path = path.resolve()
    if path in seen:
        return []
    include = load_yaml(path, resolve_func=False, recursive=False).get("include") or []
    below = [path.parent / each for each in ([include] if isinstance(include, str) else include)]
    return [path, *(file for each in below for file in _with_included(each, (*seen, path)))]


def _functions(path: Path) -> list[str]:
    """Functions that a task file names, without importing any."""
    import yaml

    with path.open("rb") as file:
        events = list(yaml.parse(file, Loader=yaml.SafeLoader))
    return [event.value for event in events if getattr(event, "tag", None) == FUNCTION]


def _foreign_metrics(path: Path) -> list[str]:
    """Metrics that aren't lm-eval's: it takes them from the library evaluate, which runs their code."""
    from lm_eval.api import metrics
    from lm_eval.api.registry import METRIC_REGISTRY
    from lm_eval.tasks._yaml_loader import load_yaml

    assert metrics, "imported as it fills the registry"
    config = load_yaml(path, resolve_func=False)
    if config.get("process_results") is not None:
        return []  # the names of what it returns
    asked: list[dict[str, Any]] = config.get("metric_list") or []
    return [each["metric"] for each in asked if each.get("hf_evaluate") or each["metric"] not in METRIC_REGISTRY]


def _python(included: IncludedTasks) -> str:
    """Hash of all Python files in the user's folders: any of them may have a say in a score."""
    files = [(path, folder) for folder in _folders(included) for path in sorted(folder.rglob("*.py"))]
    return content_hash([(path.relative_to(folder).as_posix(), sha256_of(path)) for path, folder in files])
