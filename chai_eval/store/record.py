"""The finished record of one result, `record.json` and what stands beside it, each written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from chai_eval.checksum import DamagedError, Document, read_document, say_unchecked, sealed, sha256_of, write_document
from chai_eval.errors import RunError, failure_line
from chai_eval.files import disk_errors, write_whole

LAYOUT = 1
RECORD = "record.json"
SAMPLES = "samples.parquet"
FIDELITY = "fidelity.parquet"


def write_record(directory: Path, record: Mapping[str, Any], samples: pd.DataFrame) -> None:
    """Write a finished result, its folder too; `record.json` comes last: where it stands the samples stand too.

    To the record, of JSON values, `layout` is added; samples have a row per document. RunError when the folder can't be
    written (a full disk); nothing half-written is left.
    """
    _write(directory, Document({"layout": LAYOUT, **record}, {}), SAMPLES, samples)


def write_fidelity(directory: Path, fidelity: Mapping[str, Any], samples: pd.DataFrame) -> None:
    """Add to a finished result how close it is to plain attention, in place of what an earlier run added.

    The folder must be held, so that no other process changes the record meanwhile. Of the JSON values `asked` says on
    how many documents it was wanted, `documents` how many `samples`, their rows, has. RunError where there is no
    finished result, or the folder can't be written.
    """
    found = _document(directory)
    if found is None:
        raise RunError(f"{directory / RECORD}: it is missing; the same command scores again")
    _write(directory, Document({**found.content, "fidelity": dict(fidelity)}, found.files), FIDELITY, samples)


def _write(directory: Path, found: Document, name: str, samples: pd.DataFrame) -> None:
    """Write a table, then the record with its checksum; one that had none gets none, as nobody knows what it held."""
    sealed(found.content, {})  # what JSON can't hold is refused before anything is written
    with disk_errors(f"results_dir: {directory} can't be written:", "{}"):
        write_whole(directory / name, lambda path: samples.to_parquet(path, index=False))
        files = None if found.files is None else {**found.files, name: sha256_of(directory / name)}
        write_document(directory / RECORD, found.content, files)


def read_fidelity(directory: Path, asked: int) -> pd.DataFrame | None:
    """Read how close a result is to plain attention; None where nobody asked that about so many documents or more.

    It is as `write_fidelity` was given it: of all the documents that were asked about, not `asked` of them alone. None
    also where they are of another number than the record says. DamagedError where they are missing or not those that
    the record names: damaged, or replaced by a run that was killed before it wrote the record. RunError for a record
    that can't be read.
    """
    found = _document(directory) or Document({}, None)
    fidelity = found.content.get("fidelity")
    if not isinstance(fidelity, dict) or not isinstance(fidelity.get("asked"), int) or fidelity["asked"] < asked:
        return None
    samples = _table(directory, FIDELITY, found)
    return samples if len(samples) == fidelity.get("documents") else None


def read_record(directory: Path) -> dict[str, Any] | None:
    """Read the record of a finished result, None when there is none.

    DamagedError for one that isn't what was written, or lacks its numbers; RunError for one of another layout, which
    might be misread.
    """
    found = _document(directory)
    return None if found is None else found.content


def read_samples(directory: Path) -> pd.DataFrame:
    """Read the per-document samples of a finished result; DamagedError where they aren't those that it names."""
    samples: pd.DataFrame = _table(directory, SAMPLES, _document(directory) or Document({}, None))
    return samples


def look_over(directory: Path) -> tuple[dict[str, Any], list[str]] | None:
    """Read a record and check what stands beside it, without making tables of it; raises as `read_record` does.

    Gives the record and what there is to say of the result, or None where there is no finished one.
    """
    found = _document(directory)
    if found is None:
        return None
    _table(directory, SAMPLES, found, pq.read_metadata)
    remarks = [] if found.files is not None else ["without checksums"]
    if "fidelity" in found.content:
        try:
            _table(directory, FIDELITY, found, pq.read_metadata)
        except DamagedError as error:
            remarks.append(f"{FIDELITY} {error.said}, compared again when it is asked for")
    return found.content, remarks


def _document(directory: Path) -> Document | None:
    path = directory / RECORD
    try:
        found = read_document(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path}: not a readable record ({error.strerror or error})") from error
    except DamagedError as error:
        raise _damaged(path, error.said, "a readable record") from error
    layout = found.content.get("layout")
    if layout != LAYOUT:
        raise RunError(
            f"{path}: written in layout {layout}, this version reads layout {LAYOUT}; "
            "move the folder away to score again"
        )
    # Records of another kind than results have fields of their own.
    if "kind" not in found.content and (flaw := _flaw(found.content)):
        raise _damaged(path, flaw, "a readable record")
    if found.files is None:
        say_unchecked("results")
    return found


def _damaged(path: Path, flaw: str, what: str = "readable") -> DamagedError:
    return DamagedError(path, f"not {what} ({flaw})", "the command that made it, given again, makes it anew")


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


def _table(directory: Path, name: str, found: Document, parse: Callable[[BytesIO], Any] = pd.read_parquet) -> Any:
    path = directory / name
    try:
        data = found.read(directory, name)
    except DamagedError as error:
        raise _damaged(path, error.said) from error
    except FileNotFoundError as error:
        raise _damaged(path, "it is missing") from error
    except OSError as error:
        raise RunError(f"{path}: not readable ({error.strerror or error})") from error
    try:
        return parse(BytesIO(data))
    except Exception as error:  # of bytes that are not Parquet, pyarrow raises nearly anything
        raise _damaged(path, failure_line(error)) from error
