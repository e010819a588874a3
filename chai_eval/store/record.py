"""The finished record of one result, `record.json` and what stands beside it, each written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from chai_eval.errors import RunError

LAYOUT = 1
RECORD = "record.json"
SAMPLES = "samples.parquet"
FIDELITY = "fidelity.parquet"


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
    _write(directory, {"layout": LAYOUT, **record}, SAMPLES, samples)


def write_fidelity(directory: Path, fidelity: Mapping[str, Any], samples: pd.DataFrame) -> None:
    """Add to a finished result how close it is to plain attention, in place of what an earlier run added.

    The folder must be held, so that no other process changes the record meanwhile.

    Parameters
    ----------
    fidelity
        JSON values; `asked` says on how many documents it was wanted, `documents` how many `samples` has.
    samples
        One row per document.

    Raises
    ------
    RunError
        Where there is no finished result, or the folder can't be written.
    """
    record = read_record(directory)
    if record is None:
        raise RunError(f"{directory / RECORD}: it is missing; the same command scores again")
    _write(directory, {**record, "fidelity": dict(fidelity)}, FIDELITY, samples)


def read_fidelity(directory: Path, asked: int) -> pd.DataFrame | None:
    """Read how close a result is to plain attention; None where nobody asked that about so many documents or more.

    Also None where the documents that belong to it are missing or are those of another number: a kill left them.

    Returns
    -------
    DataFrame or None
        As `write_fidelity` was given it: of all the documents that were asked about, not `asked` of them alone.

    Raises
    ------
    RunError
        For a record that can't be read.
    """
    record = read_record(directory)
    fidelity = None if record is None else record.get("fidelity")
    there = fidelity.get("asked") if isinstance(fidelity, dict) else None
    if fidelity is None or not isinstance(there, int) or there < asked:
        return None
    try:
        samples = pd.read_parquet(directory / FIDELITY)
    except (OSError, ValueError):
        return None
    return samples if len(samples) == fidelity.get("documents") else None


def _write(directory: Path, record: Mapping[str, Any], name: str, samples: pd.DataFrame) -> None:
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / name, lambda path: samples.to_parquet(path, index=False))
        write_whole(directory / RECORD, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise RunError(f"results_dir: {directory} can't be written: {error.strerror or error}") from error


def read_record(directory: Path) -> dict[str, Any] | None:
    """Read the record of a finished result, None when there is none.

    Raises
    ------
    RunError
        For a record of another layout, one that isn't JSON, or a result that lacks its numbers: they might be misread.
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
    # Records of another kind than results have fields of their own.
    if "kind" not in record and (flaw := _flaw(record)):
        raise RunError(f"{path}: not a readable record ({flaw}); move the folder away to score again")
    return record


def _flaw(record: Mapping[str, Any]) -> str | None:
    """Say which field that everyone reads is missing or of a wrong type, None where all are well."""
    count, metrics = record.get("n_documents"), record.get("metrics")
    if isinstance(count, bool) or not isinstance(count, int):
        return f"n_documents is {count!r}, not a count" if "n_documents" in record else "n_documents is missing"
    if not isinstance(metrics, dict) or not metrics:
        return f"metrics is {metrics!r}, not a group of scores" if "metrics" in record else "metrics is missing"
    for name, metric in metrics.items():
        value = metric.get("value") if isinstance(metric, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"metrics: {name} is {metric!r}, without a number as its value"
    return None


def read_samples(directory: Path) -> pd.DataFrame:
    """Read the per-document samples of a finished result.

    Raises
    ------
    RunError
        When the file is missing or isn't Parquet.
    """
    with _readable_samples(directory) as path:
        return pd.read_parquet(path)


def check_samples(directory: Path) -> None:
    """Make sure that the samples of a finished result are there and whole, without reading all of them.

    Raises
    ------
    RunError
        When the file is missing or isn't Parquet.
    """
    with _readable_samples(directory) as path:
        pq.read_metadata(path)  # stands at the end of the file


@contextmanager
def _readable_samples(directory: Path) -> Iterator[Path]:
    path = directory / SAMPLES
    try:
        if path.exists() and not path.is_file():
            raise IsADirectoryError(0, "not a file")
        yield path
    except (OSError, ValueError) as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
        raise RunError(f"{path}: not readable ({reason}); move the folder away to score again") from error


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
