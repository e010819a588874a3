"""Files that other processes may read, write or wait for: written whole or not at all, locked by files that stay."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from chai_eval.errors import RunError

# Seconds between signs of life of a process that waits for another.
PATIENCE = 10.0


def write_whole(path: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file beside its place, bring it to the disk, and rename it into place; its folder is made.

    A callable as content fills the file whose path it is given. After an OSError nothing half-written is left, and what
    stood at `path` still stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if callable(content):
            content(beside)
        else:
            beside.write_bytes(content.encode() if isinstance(content, str) else content)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def disk_errors(what: str, why: str = "({})") -> Iterator[None]:
    """Say of an OSError within this, in a RunError, what can't be done and, as `why` has it, the system's reason."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{what} {why.format(error.strerror or error)}") from error


@contextmanager
def held(path: Path, taken: Callable[[], object], while_waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a lock file for this process while the context lasts; its folder is made. OSError where it can't be locked.

    Where another process holds it `taken` is called, which says so, or raises; then it is waited for, and
    `while_waiting` called every few seconds. The file is never deleted: removing one that another process has just
    opened would let a third one in.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    if not _acquired(lock, 0):
        taken()
        while not _acquired(lock, PATIENCE):
            while_waiting()
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether some process holds a lock file; False where that can't be tried."""
    lock = FileLock(path)
    try:
        return path.exists() and not _acquired(lock, 0)
    except OSError:
        return False
    finally:
        lock.release()


def _acquired(lock: FileLock, seconds: float) -> bool:
    with suppress(Timeout):
        lock.acquire(timeout=seconds)
    return lock.is_locked
