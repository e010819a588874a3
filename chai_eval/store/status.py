"""What stands in a results folder: finished, running, partial (how far), failed (why)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chai_eval.errors import RunError, failure_line
from chai_eval.store.folder import (
    ATTEMPT,
    EXPERIMENTS,
    FAILURE,
    JOURNAL,
    SET_ASIDE,
    ResultFolder,
    is_seconds,
    read_note,
)
from chai_eval.store.record import RECORD, look_over, read_record


@dataclass(frozen=True)
class Status:
    """One result, or measurement, as `python -m chai_eval status` lists it.

    `state` is finished, running, partial, failed or unreadable; `detail` says how far or why. The task of a measurement
    is `measure`, its method all that were measured.
    """

    model: str
    task: str
    method: str
    key: str
    state: str
    detail: str
    record: dict[str, Any] | None = None


def list_results(results_dir: Path) -> list[Status]:
    """Every result below `results_dir`, sorted by model, task and method."""
    found = []
    for path in sorted(results_dir.glob("*/*/*-*")):
        model, task, last = path.relative_to(results_dir).parts
        if model != EXPERIMENTS and SET_ASIDE not in last and path.is_dir() and _is_result(path):
            method, _, key = last.rpartition("-")
            state = _state(ResultFolder(results_dir, model, task, method, key))
            found.append(Status(model, task, method, key, *state))
    return found


def list_measurements(results_dir: Path) -> list[Status]:
    """Every measurement below `results_dir`, sorted by model and key; not one that was interrupted."""
    return [_measurement(path.parent) for path in sorted(results_dir.glob(f"*/measure/*/{RECORD}"))]


def list_set_aside(results_dir: Path) -> list[Path]:
    """Every folder below `results_dir` of a result that was found damaged and made anew."""
    return sorted(results_dir.glob(f"*/*/*{SET_ASIDE}*"))


def _measurement(path: Path) -> Status:
    known = path.parts[-3], "measure"
    try:
        record = read_record(path) or {}
        names = ", ".join(str(each["name"]) for each in record["contenders"])
        about = [str(record["config"]["measure"]["kind"]), f"{len(record['points'])} grid points"]
        _, remarks = look_over(path) or (None, [])
        return Status(*known, names, path.name, "finished", ", ".join([*about, *remarks]))
    except RunError as error:
        why = failure_line(error)
    except (KeyError, TypeError) as error:
        why = f"{path / RECORD}: lacks {error}"
    return Status(*known, "", path.name, "unreadable", why)


def _is_result(path: Path) -> bool:
    try:
        return any((path / name).exists() for name in (RECORD, ATTEMPT, FAILURE, JOURNAL))
    except OSError:  # a folder that may not be read: listed, and said to be unreadable
        return True


def _state(folder: ResultFolder) -> tuple[str, str] | tuple[str, str, dict[str, Any]]:
    """State, detail, and the record where there is one."""
    try:
        found = look_over(folder.path)
        if found is None:
            return _unfinished(folder)
    except RunError as error:
        return "unreadable", failure_line(error)
    record, remarks = found
    return "finished", ", ".join([f"{record['n_documents']} documents", *remarks]), record


def _unfinished(folder: ResultFolder) -> tuple[str, str]:
    progress, holder = _progress(folder), folder.holder()
    if holder is not None:
        return "running", f"{progress}, {holder}"
    failure = read_note(folder.path / FAILURE)
    if failure is None:
        return "partial", progress
    why = failure.get("why")
    if not isinstance(why, str):
        raise RunError(f"{folder.path / FAILURE}: why is {why!r}, not a text")
    return "failed", f"{why} ({progress})"


def _progress(folder: ResultFolder) -> str:
    try:
        with folder.journal.open("rb") as file:
            scored = sum(line.endswith(b"\n") for line in file)
    except FileNotFoundError:
        scored = 0
    except OSError as error:
        raise RunError(f"{folder.journal}: can't be read ({error.strerror or error})") from error
    attempt = read_note(folder.path / ATTEMPT)
    if attempt is None:
        return f"{scored} requests"
    for name in ("started", "seconds_before"):
        if not is_seconds(attempt.get(name)):
            raise RunError(f"{folder.path / ATTEMPT}: {name} is {attempt.get(name)!r}, not seconds")
    total = attempt.get("n_requests")
    if total is not None and (isinstance(total, bool) or not isinstance(total, int)):
        raise RunError(f"{folder.path / ATTEMPT}: n_requests is {total!r}, not a count")
    return f"{scored} of {total} requests" if total else f"{scored} requests"
