"""What stands in a results folder: finished, running, partial (how far), failed (why)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chai_eval.checksum import DamagedError, read_json
from chai_eval.errors import RunError, failure_line
from chai_eval.store.folder import ATTEMPT, FAILURE, JOURNAL, SET_ASIDE, ResultFolder, is_seconds
from chai_eval.store.record import RECORD, look_over, read_record


@dataclass(frozen=True)
class ResultStatus:
    """One result as `python -m chai_eval status` lists it.

    `state` is finished, running, partial, failed or unreadable; `detail` says how far or why.
    """

    folder: ResultFolder
    state: str
    detail: str
    record: dict[str, Any] | None = None


@dataclass(frozen=True)
class MeasurementStatus:
    """One measurement as `python -m chai_eval status` lists it: finished or unreadable."""

    model: str
    contenders: tuple[str, ...]
    key: str
    state: str
    detail: str


def list_results(results_dir: Path) -> list[ResultStatus]:
    """Every result below `results_dir`, sorted by model, task and method."""
    return [_status(folder) for folder in _folders(results_dir)]


def list_measurements(results_dir: Path) -> list[MeasurementStatus]:
    """Every measurement below `results_dir`, sorted by model and key; not one that was interrupted."""
    return [_measurement(path.parent) for path in sorted(results_dir.glob(f"*/measure/*/{RECORD}"))]


def list_set_aside(results_dir: Path) -> list[Path]:
    """Every folder below `results_dir` of a result that was found damaged and made anew."""
    return sorted(results_dir.glob(f"*/*/*{SET_ASIDE}*"))


def _measurement(path: Path) -> MeasurementStatus:
    model, key = path.parts[-3], path.name
    try:
        record = read_record(path) or {}
        names = tuple(str(each["name"]) for each in record["contenders"])
        found = [str(record["config"]["measure"]["kind"]), f"{len(record['points'])} grid points"]
        _, remarks = look_over(path) or (None, [])
        detail = ", ".join([*found, *remarks])
        return MeasurementStatus(model, names, key, "finished", detail)
    except RunError as error:
        return MeasurementStatus(model, (), key, "unreadable", failure_line(error))
    except (KeyError, TypeError) as error:
        return MeasurementStatus(model, (), key, "unreadable", f"{path / RECORD}: lacks {error}")


def _folders(results_dir: Path) -> Iterator[ResultFolder]:
    for path in sorted(results_dir.glob("*/*/*-*")):
        if SET_ASIDE not in path.name and path.is_dir() and _is_result(path):
            model, task, last = path.relative_to(results_dir).parts
            method, _, key = last.rpartition("-")
            yield ResultFolder(results_dir, model, task, method, key)


def _is_result(path: Path) -> bool:
    try:
        return any((path / name).exists() for name in (RECORD, ATTEMPT, FAILURE, JOURNAL))
    except OSError:  # a folder that may not be read: listed, and said to be unreadable
        return True


def _status(folder: ResultFolder) -> ResultStatus:
    try:
        found = look_over(folder.path)
        if found is None:
            return _unfinished(folder)
        record, remarks = found
        return ResultStatus(folder, "finished", ", ".join([f"{record['n_documents']} documents", *remarks]), record)
    except RunError as error:
        return ResultStatus(folder, "unreadable", failure_line(error))


def _unfinished(folder: ResultFolder) -> ResultStatus:
    progress = _progress(folder)
    holder = folder.holder()
    if holder is not None:
        return ResultStatus(folder, "running", f"{progress}, {holder}")
    failure = _note(folder.path / FAILURE)
    if failure is None:
        return ResultStatus(folder, "partial", progress)
    why = failure.get("why")
    if not isinstance(why, str):
        raise RunError(f"{folder.path / FAILURE}: why is {why!r}, not a text")
    return ResultStatus(folder, "failed", f"{why} ({progress})")


def _progress(folder: ResultFolder) -> str:
    try:
        with folder.journal.open("rb") as file:
            scored = sum(line.endswith(b"\n") for line in file)
    except FileNotFoundError:
        scored = 0
    except OSError as error:
        raise RunError(f"{folder.journal}: can't be read ({error.strerror or error})") from error
    attempt = _note(folder.path / ATTEMPT)
    if attempt is None:
        return f"{scored} requests"
    for name in ("started", "seconds_before"):
        if not is_seconds(attempt.get(name)):
            raise RunError(f"{folder.path / ATTEMPT}: {name} is {attempt.get(name)!r}, not seconds")
    total = attempt.get("n_requests")
    if total is not None and (isinstance(total, bool) or not isinstance(total, int)):
        raise RunError(f"{folder.path / ATTEMPT}: n_requests is {total!r}, not a count")
    return f"{scored} of {total} requests" if total else f"{scored} requests"


def _note(path: Path) -> dict[str, Any] | None:
    """A small JSON file beside the journal, None where there is none."""
    try:
        note = read_json(path)
    except FileNotFoundError:
        return None
    except DamagedError:
        raise
    except OSError as error:
        raise RunError(f"{path}: can't be read ({error.strerror or error})") from error
    if not isinstance(note, dict):
        raise RunError(f"{path}: holds {note!r}, not a note on an attempt")
    return note
