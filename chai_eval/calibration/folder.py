"""A calibration on the disk: `calibration.json`, `calibration.safetensors`; written beside and renamed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors.torch import save
from torch import Tensor

from chai_eval.checksum import sealed
from chai_eval.errors import RunError
from chai_eval.methods.calibrated import DESCRIPTION, TENSORS


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from calibrating into a folder while the context lasts.

    Raises
    ------
    RunError
        Where one is at it, or the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise RunError(f"out: another process is calibrating into {folder}") from error
    except PermissionError as error:
        raise RunError(f"out: {folder} can't be written ({error.strerror})") from error
    with suppress(OSError):
        (folder / ".lock").unlink()


def write_calibration(folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a calibration in place of an older one, with checksums of both files.

    The description goes last: a folder without it is no calibration.

    Raises
    ------
    RunError
        A full disk, or a folder that can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = [folder / f".{name}.{os.getpid()}" for name in (TENSORS, DESCRIPTION)]
        try:
            saved = save({name: each.contiguous() for name, each in tensors.items()})
            whole = sealed(description, {TENSORS: hashlib.sha256(saved).hexdigest()})
            beside[0].write_bytes(saved)
            beside[1].write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            (folder / DESCRIPTION).unlink(missing_ok=True)
            beside[0].replace(folder / TENSORS)
            beside[1].replace(folder / DESCRIPTION)
        finally:
            for each in beside:
                each.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"out: {folder} can't be written ({error.strerror or error})") from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise RunError(f"out: {path.parent} can't be written ({error.strerror or error})") from error
    finally:
        beside.unlink(missing_ok=True)


def runs(counts: list[int]) -> list[list[int]]:
    """Counts as a run-length list of [count, layers]."""
    return [[count, len(list(run))] for count, run in groupby(counts)]
