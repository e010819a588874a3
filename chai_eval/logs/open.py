"""A folder, or a pattern of folders, as the logs of one run: one for each task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from chai_eval.errors import SettingError
from chai_eval.logs import lm_eval, results
from chai_eval.logs.log import Found

ALLOWED = (
    "a folder with lm-eval's logs (samples_<task>_<date>.jsonl) or with results of chai_eval (record.json), "
    "or a pattern of such folders"
)

FINDERS = (lm_eval.find, results.find)


def open_run(setting: str, given: str) -> tuple[dict[str, Found], list[str]]:
    """Find the logs of a run.

    Parameters
    ----------
    setting
        What errors and remarks call the run.
    given
        A folder, searched with all that lies below it, or a pattern of folders, `results/smollm2_mha/*/chai-*`.

    Returns
    -------
    dict of Found
        By task, the newest where there are several dates; nothing but the names of lm-eval's files is read.
    list of str
        Remarks for the user.

    Raises
    ------
    SettingError
        There are no logs, or several runs of a task.
    RunError
        A record of ours can't be read.
    """
    by_task: dict[str, list[Found]] = {}
    logs = {each.place: each for folder in _folders(setting, given) for find in FINDERS for each in find(folder)}
    for each in logs.values():
        by_task.setdefault(each.task, []).append(each)
    if not by_task:
        bare = any(any(folder.rglob("results_*.json")) for folder in _folders(setting, given))
        why = "with results but no samples of lm-eval (--log_samples writes them)" if bare else "no logs there"
        raise SettingError(f"{setting}: {given!r} given, {why}; allowed: {ALLOWED}")
    remarks, newest = [], {}
    for task, found in sorted(by_task.items()):
        runs = {each.run: each for each in found}
        if len(runs) > 1:
            places = ", ".join(str(each.place if each.place.is_dir() else each.place.parent) for each in runs.values())
            raise SettingError(
                f"{setting}: {given!r} given, which has several runs of {task} ({places}); allowed: the folder of one, "
                "or a pattern that only one matches"
            )
        newest[task] = max(found, key=lambda each: each.when)
        if len(found) > 1:
            remarks.append(f"{setting} has {len(found)} logs of {task}; the newest, of {newest[task].when}, is taken")
    return newest, remarks


def _folders(setting: str, given: str) -> Iterator[Path]:
    path = Path(given).expanduser()
    if path.is_dir():
        yield path
        return
    root, pattern = (Path(path.anchor), str(path.relative_to(path.anchor))) if path.anchor else (Path(), str(path))
    try:
        found = [each for each in sorted(root.glob(pattern)) if each.is_dir()] if "*" in pattern else []
    except (ValueError, OSError) as error:
        raise SettingError(f"{setting}: {given!r} given, {error}; allowed: {ALLOWED}") from error
    if not found:
        raise SettingError(f"{setting}: {given!r} given, no such folder; allowed: {ALLOWED}")
    yield from found
