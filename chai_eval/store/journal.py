"""The journal of a result: every scored request, appended as it is done, so that a kill loses one batch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from chai_eval.files import disk_errors

log = logging.getLogger(__name__)


class Journal(Mapping[str, Any]):
    """Scored requests in a JSON Lines file: `{"request": key, "scored": payload, "check": checksum}`.

    Opening reads what an earlier process left. A last line without its end is what a kill leaves and is cut off.
    Any other line that doesn't match its own checksum is reported by number and its request counts as not
    scored. One process at a time may have a journal open (`ResultFolder.held` sees to that).

    The file and its folder are made at the first append; without a path all is kept in memory alone. RunError where
    there is something at the path that can't be read as a file.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._scored: dict[str, Any] = {}
        self._file: BinaryIO | None = None
        self._intact_bytes = 0
        if self._path is not None:
            with disk_errors(f"results_dir: {path} can't be read:", "{}"):
                if self._path.exists():
                    self._read(self._path)

    def __getitem__(self, request_key: str) -> Any:
        return self._scored[request_key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scored)

    def __len__(self) -> int:
        return len(self._scored)

    def append_many(self, scored: Iterable[tuple[str, Any]]) -> None:
        """Append requests' keys with JSON payloads (log-likelihood and whether it is the greedy one, or a text).

        They are on the disk then; RunError when the file can't be written.
        """
        pairs = list(scored)
        if pairs and self._path is not None:
            with disk_errors(f"results_dir: {self._path} can't be written:", "{}"):
                self._write(self._path, b"".join(_line(key, payload) for key, payload in pairs))
        self._scored.update(pairs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, path: Path, lines: bytes) -> None:
        if self._file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            # What follows a torn line would be joined to it and lost with it.
            self._file.truncate(self._intact_bytes)
        self._file.write(lines)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                self._intact_bytes += len(line)
                entry = _entry(line)
                if entry is None:
                    log.warning("%s: line %d is corrupt; its request is scored again", path, number)
                else:
                    self._scored[entry[0]] = entry[1]


def _checksum(key: str, payload: Any) -> str:
    text = json.dumps([key, payload], separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _line(key: str, payload: Any) -> bytes:
    entry = {"request": key, "scored": payload, "check": _checksum(key, payload)}
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _entry(line: bytes) -> tuple[str, Any] | None:
    try:
        entry = json.loads(line)
        key, payload, check = entry["request"], entry["scored"], entry["check"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (key, payload) if isinstance(key, str) and check == _checksum(key, payload) else None
