"""The finished record of one result, `record.json` and `samples.parquet`, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from chai_eval.errors import RunError

LAYOUT = 1
RECORD = "record.json"
SAMPLES = "samples.parquet"


def write_record(directory: Path, record: Mapping[str, Any], samples: pd.DataFrame) -> None:
    """Write a finished result; `record.json` comes last, so that where it stands the samples stand too.

    Parameters
    ----------
    directory
        Folder of the result, made when it isn't there.
    record
        JSON values; `layout` is added.
    samples
        One row per document.

    Raises
    ------
    RunError
        When the folder can't be written (a full disk); nothing half-written is left.
    """
    text = json.dumps({"layout": LAYOUT, **record}, indent=2, allow_nan=False) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / SAMPLES, lambda path: samples.to_parquet(path, index=False))
        write_whole(directory / RECORD, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise RunError(f"results_dir: {directory} can't be written: {error.strerror or error}") from error


def read_record(directory: Path) -> dict[str, Any] | None:
    """Read the record of a finished result, None when there is none.

    Raises
    ------
    RunError
        For a record of another layout or one that isn't JSON: its numbers might be misread.
    """
    path = directory / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: not a readable record ({error}); move the folder away to score again") from error
    layout = record.get("layout") if isinstance(record, dict) else None
    if layout != LAYOUT:
        raise RunError(
            f"{path}: written in layout {layout}, this version reads layout {LAYOUT}; "
            "move the folder away to score again"
        )
    return record


def read_samples(directory: Path) -> pd.DataFrame:
    """Read the per-document samples of a finished result.

    Raises
    ------
    RunError
        When the file is missing or isn't Parquet.
    """
    path = directory / SAMPLES
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: not readable ({error}); move the folder away to score again") from error


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, bring it to the disk, and rename it into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(beside)
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
