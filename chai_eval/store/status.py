"""What stands in a results folder: finished, running, partial (how far), failed (why)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chai_eval.errors import RunError
from chai_eval.store.folder import ATTEMPT, FAILURE, JOURNAL, ResultFolder
from chai_eval.store.record import RECORD, read_record


@dataclass(frozen=True)
class ResultStatus:
    """One result as `python -m chai_eval status` lists it.

    `state` is finished, running, partial, failed or unreadable; `detail` says how far or why.
    """

    folder: ResultFolder
    state: str
    detail: str
    record: dict[str, Any] | None = None


def list_results(results_dir: Path) -> list[ResultStatus]:
    """Every result below `results_dir`, sorted by model, task and method."""
    return [_status(folder) for folder in _folders(results_dir)]


def _folders(results_dir: Path) -> Iterator[ResultFolder]:
    known = (RECORD, ATTEMPT, FAILURE, JOURNAL)
    for path in sorted(results_dir.glob("*/*/*-*")):
        if path.is_dir() and any((path / name).exists() for name in known):
            model, task, last = path.relative_to(results_dir).parts
            method, _, key = last.rpartition("-")
            yield ResultFolder(results_dir, model, task, method, key)


def _status(folder: ResultFolder) -> ResultStatus:
    try:
        record = read_record(folder.path)
    except RunError as error:
        return ResultStatus(folder, "unreadable", str(error))
    if record is not None:
        return ResultStatus(folder, "finished", f"{record['n_documents']} documents", record)
    holder = folder.holder()
    if holder is not None:
        return ResultStatus(folder, "running", f"{_progress(folder)}, {holder}")
    failure = _read(folder.path / FAILURE)
    if failure is not None:
        return ResultStatus(folder, "failed", f"{failure.get('why', 'unknown')} ({_progress(folder)})")
    return ResultStatus(folder, "partial", _progress(folder))


def _progress(folder: ResultFolder) -> str:
    try:
        with folder.journal.open("rb") as file:
            scored = sum(line.endswith(b"\n") for line in file)
    except OSError:
        scored = 0
    total = _read(folder.path / ATTEMPT).get("n_requests")
    return f"{scored} of {total} requests" if total else f"{scored} requests"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {} if path.name == ATTEMPT else None
