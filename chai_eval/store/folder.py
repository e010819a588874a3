"""Where a result lives, who is working on it, and how far an unfinished one came."""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, TypeGuard

from chai_eval.checksum import read_json
from chai_eval.errors import RunError, SettingError
from chai_eval.files import disk_errors, held, is_held, write_whole
from chai_eval.store.record import RECORD

log = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
ATTEMPT = "attempt.json"
FAILURE = "failed.json"
# Ends the name of a damaged result's folder, with a number after it.
SET_ASIDE = ".damaged-"

# Folder beside those of models, for what experiments make of results.
EXPERIMENTS = "experiments"

# Seconds that no clock shows.
FOREVER = 1e12


@dataclass(frozen=True)
class ResultFolder:
    """`<results_dir>/<model>/<task>/<method>-<key>/`, and the lock that belongs to it.

    While a result is being scored the folder holds the journal and a note on the attempt; when it is finished,
    the record and the samples, beside them the documents on which it was compared with plain attention, if it was.
    """

    results_dir: Path
    model: str
    task: str
    method: str
    key: str

    @property
    def path(self) -> Path:
        """Folder of the result."""
        return self.results_dir / _file_name(self.model) / _file_name(self.task) / f"{self.method}-{self.key}"

    @property
    def journal(self) -> Path:
        """Journal of the requests scored so far."""
        return self.path / JOURNAL

    @contextmanager
    def held(self, while_waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the folder for this process; a second process says who holds it, and waits (see `files.held`)."""
        say = "%s is being scored by %s; waiting for it"
        holder = self._lock.with_suffix(".holder")
        with ExitStack() as stack:
            with disk_errors(f"results_dir: {self._lock} can't be locked:", "{}"):
                stack.enter_context(
                    held(self._lock, lambda: log.warning(say, self.path, _read_holder(holder)), while_waiting)
                )
                now = datetime.now().astimezone().isoformat(timespec="seconds")
                holder.write_text(f"process {os.getpid()} on {socket.gethostname()} since {now}", encoding="utf-8")
            stack.callback(holder.unlink, missing_ok=True)
            yield

    @property
    def _lock(self) -> Path:
        """The lock file, apart from the results: what is done to a result's folder leaves it alone."""
        name = "-".join((_file_name(self.model), _file_name(self.task), self.method, self.key))
        return self.results_dir / ".locks" / f"{name}.lock"

    def holder(self) -> str | None:
        """Say which process is scoring this result, None when none is."""
        return _read_holder(self._lock.with_suffix(".holder")) if is_held(self._lock) else None

    def begin(self, note: dict[str, Any]) -> float:
        """Note an attempt at this result (for `status`), and forget how an earlier one failed.

        Gives the seconds that earlier attempts spent, up to their last scored batch.
        """
        try:
            seconds = self._seconds_spent(read_note(self.path / ATTEMPT) or {})
        except RunError:  # not what is written here
            seconds = 0.0
        started = {"started": time.time(), "seconds_before": seconds}
        with disk_errors(f"results_dir: {self.path} can't be written:", "{}"):
            write_whole(self.path / ATTEMPT, json.dumps({**note, **started}) + "\n")
            (self.path / FAILURE).unlink(missing_ok=True)
        return seconds

    def _seconds_spent(self, earlier: Mapping[str, Any]) -> float:
        started, before = earlier.get("started"), earlier.get("seconds_before")
        if not (is_seconds(started) and is_seconds(before) and self.journal.exists()):
            return 0.0
        return float(before + max(0.0, self.journal.stat().st_mtime - started))

    def fail(self, why: str) -> None:
        """Note why an attempt failed, as far as the disk allows."""
        try:
            note = {"why": why, "when": datetime.now(UTC).isoformat(timespec="seconds")}
            write_whole(self.path / FAILURE, json.dumps(note) + "\n")
        except OSError as error:
            log.warning("%s: could not note the failure: %s", self.path, error)

    def set_aside(self) -> Path:
        """Move a damaged result out of the way, and return where it lies now. The folder must be held."""
        names = (self.path.with_name(f"{self.path.name}{SET_ASIDE}{number}") for number in count(1))
        place = next(each for each in names if not each.exists())
        with disk_errors(f"results_dir: {self.path} can't be set aside:", "{}"):
            self.path.rename(place)
        return place

    def tidy(self) -> None:
        """Remove what a finished result no longer needs: every request stands in its samples."""
        for name in (JOURNAL, ATTEMPT, FAILURE):
            (self.path / name).unlink(missing_ok=True)
        for left_by_a_kill in self.path.glob(".*.tmp"):
            left_by_a_kill.unlink(missing_ok=True)


def check_writable(results_dir: Path) -> None:
    """Raise SettingError unless results can be written, before minutes go into loading a model; leaves no trace."""
    whole = results_dir.absolute()
    try:
        place = next(each for each in (whole, *whole.parents) if each.exists())
        if not place.is_dir():
            raise NotADirectoryError(0, f"{place} is a file")
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise SettingError(
            f"results_dir: {str(results_dir)!r} can't be written ({error.strerror or error}); "
            "allowed: a folder that is writable or can be made"
        ) from error


def has_results(results_dir: Path, model: str) -> bool:
    """Whether there is a finished result of a model, of which nothing needs to be written."""
    return any((results_dir / _file_name(model)).glob(f"*/*/{RECORD}"))


def is_seconds(value: Any) -> TypeGuard[float]:
    """Whether a JSON value is a time or a duration."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < FOREVER


def read_note(path: Path) -> dict[str, Any] | None:
    """Read a note on an attempt, None where there is none; RunError where it can't be read, or isn't a note."""
    try:
        note = read_json(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path}: can't be read ({error.strerror or error})") from error
    if not isinstance(note, dict):
        raise RunError(f"{path}: holds {note!r}, not a note on an attempt")
    return note


def _read_holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") or "another process"
    except OSError:
        return "another process"


def _file_name(name: str) -> str:
    return name.replace("/", "__")
