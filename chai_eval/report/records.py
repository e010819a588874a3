"""What stands under folders of results, read from the disk alone: no model is loaded, nothing is scored."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from chai_eval.checksum import DamagedError, read_document
from chai_eval.errors import RunError, failure_line
from chai_eval.evaluation import Result
from chai_eval.store.folder import SET_ASIDE, ResultFolder
from chai_eval.store.record import RECORD, read_fidelity, read_record, read_samples

log = logging.getLogger(__name__)

# What a result of a task has to have for a report to make anything of it.
NEEDED = ("model", "task", "method", "key", "config", "key_parts", "n_documents", "metrics")


@dataclass(frozen=True)
class TaskResult(Result):
    """A method's result on a task.

    Attributes
    ----------
    path : Path
        Its folder.
    fidelity : DataFrame or None
        One row a document that was compared with plain attention, where any was.
    """

    path: Path = Path()
    fidelity: pd.DataFrame | None = None

    @property
    def place(self) -> tuple[str, str, str]:
        """Model, task and method."""
        return str(self.record["model"]), str(self.record["task"]), str(self.record["method"])

    @property
    def method_settings(self) -> dict[str, Any]:
        """Settings of the method, resolved."""
        return {name: value for name, value in self.record["key_parts"]["method"].items() if name != "name"}


@dataclass(frozen=True)
class Stored:
    """A record of another kind: where it lies, what it says, and the tables beside it, by their names."""

    path: Path
    content: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)


@dataclass
class Records:
    """All that was found.

    Attributes
    ----------
    tasks : list of TaskResult
    frontiers, analyses, measurements, benchmarks, fidelities, experiments : list of Stored
    left_out : list of str
        What can't be used and why, a line each.
    """

    tasks: list[TaskResult] = field(default_factory=list)
    frontiers: list[Stored] = field(default_factory=list)
    analyses: list[Stored] = field(default_factory=list)
    measurements: list[Stored] = field(default_factory=list)
    benchmarks: list[Stored] = field(default_factory=list)
    fidelities: list[Stored] = field(default_factory=list)
    experiments: list[Stored] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read_records(folders: Sequence[Path], out: Path) -> Records:
    """Read every record below some folders, whatever code wrote it; what is damaged is named and left out.

    Parameters
    ----------
    out : Path
        A folder that is passed over: an earlier report's.
    """
    found, keys = Records(), set[tuple[str, ...]]()
    for path in _json_files(folders, out):
        try:
            if path.name == RECORD:
                _read_result(path.parent, found, keys)
            else:
                _read_other(path, found)
        except RunError as error:
            found.left_out.append(failure_line(error))
        except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            found.left_out.append(f"{path}: not a record as this version reads it ({failure_line(error)})")
    return found


def _json_files(folders: Sequence[Path], out: Path) -> Iterator[Path]:
    """JSON files in a fixed order, each once; hidden folders and results that were set aside are passed over."""
    seen, skipped = set[Path](), out.resolve()
    for folder in folders:
        for path in sorted(folder.rglob("*.json"), key=lambda each: (len(each.parts), each.as_posix())):
            within, whole = path.relative_to(folder).parts, path.resolve()
            hidden = any(part.startswith(".") or SET_ASIDE in part for part in within)
            if not hidden and whole not in seen and skipped not in whole.parents:
                seen.add(whole)
                yield path


def _read_result(folder: Path, found: Records, keys: set[tuple[str, ...]]) -> None:
    record = read_record(folder)
    assert record is not None  # the file is there
    others = {"measure": found.measurements, "experiment": found.experiments}
    if (kind := record.get("kind")) in others:
        data = folder / "data.csv"
        tables = {"data": pd.read_csv(data, keep_default_na=False, na_values=[""])} if data.exists() else {}
        others[kind].append(Stored(folder, record, tables))
        return
    if lacking := [name for name in NEEDED if name not in record]:
        raise RunError(f"{folder / RECORD}: lacks {', '.join(lacking)}")
    place = str(record["model"]), str(record["task"]), str(record["method"]), str(record["key"])
    if place in keys:  # a copy
        return
    samples, close = read_samples(folder), None
    try:
        close = read_fidelity(folder, 0)
    except DamagedError as error:
        found.left_out.append(f"{error.path}: {error.said}; the scores beside it are used without it")
    keys.add(place)
    # The folder's own name, not where it lies: a record may have been copied to any place.
    found.tasks.append(TaskResult(ResultFolder(folder.parents[2], *place), record, samples, folder, close))


def _read_other(path: Path, found: Records) -> None:
    content = read_document(path).content
    if path.name == "frontier.json":
        samples = pd.read_parquet(path.with_name("samples.parquet"))
        found.frontiers.append(Stored(path.parent, content, {"samples": samples}))
    elif path.name == "analysis.json":
        tables = {each.stem: pd.read_parquet(each) for each in sorted(path.parent.glob("*.parquet"))}
        found.analyses.append(Stored(path.parent, content, tables))
    elif "benchmark" in content and "rows" in content:
        found.benchmarks.append(Stored(path, content))
    elif "preset" in content and "methods" in content:
        found.fidelities.append(Stored(path, content))
