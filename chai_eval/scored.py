"""One result: found by its key, or scored, journalled and recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from chai_eval.checksum import DamagedError
from chai_eval.errors import RunError, SettingError, failure_line
from chai_eval.scoring.ranks import Ranks
from chai_eval.session import LoadedModel
from chai_eval.settings import Settings
from chai_eval.store import (
    SCORER,
    Journal,
    ResultFolder,
    check_writable,
    read_record,
    read_samples,
    result_key,
    write_record,
)
from chai_eval.store.provenance import git_revision, machine, versions

if TYPE_CHECKING:
    from chai_eval.methods import Method
    from chai_eval.scoring.lm import Scored
    from chai_eval.scoring.prepare import PreparedTask

log = logging.getLogger(__name__)

# Packages whose version can change a number: model code, its arithmetic, prompts and metrics.
KEY_PACKAGES = ("torch", "transformers", "lm-eval")


@dataclass(frozen=True)
class Result:
    """A finished result as it stands on the disk."""

    folder: ResultFolder
    record: Mapping[str, Any]
    samples: pd.DataFrame


def result(
    settings: Settings, loaded: LoadedModel, method: Method, prepared: PreparedTask, ranks: Ranks | None = None
) -> Result:
    """Return the result of a method on a task: an earlier one of the same key, or a new one.

    An unfinished earlier one is gone on with, a damaged one is set aside. Where another process is scoring the same
    result, this one waits and takes what that one recorded.

    Parameters
    ----------
    ranks
        Processes that score it together: the first decides, locks and writes, and all return the same.

    Raises
    ------
    SettingError
        Where it has to be scored, and `results_dir` can't be written.
    RunError
        Where scoring fails; `status` then says why.
    """
    ranks = ranks or Ranks()
    parts = key_parts(settings, loaded, method, prepared)
    name = prepared.task_name
    folder = ResultFolder(settings.results_dir, settings.model.name, name, method.name, result_key(parts))
    with ranks.together(), ExitStack() as kept:
        if len(set(ranks.gather(folder.key))) > 1:
            raise RunError(f"{name}, {method.name}: the {ranks.size} processes differ in model, documents or versions")
        if ranks.broadcast(ranks.first and _unfinished(folder, kept, ranks)):
            _score(settings, loaded, method, prepared, folder, parts, ranks)
        else:
            log.info("%s, %s: finished before, taken from %s", name, method.name, folder.path)
        found: Result = ranks.broadcast(_read(folder) if ranks.first else None)
    return found


def _unfinished(folder: ResultFolder, kept: ExitStack, ranks: Ranks) -> bool:
    """Whether there is anything to score; the folder is held then, as long as `kept` is open."""
    finished = _finished(folder)
    if finished and not folder.journal.exists():
        return False
    try:
        check_writable(folder.results_dir)
        kept.enter_context(folder.held(ranks.pulse))
    except (SettingError, RunError):
        if finished:  # where nothing can be written, what a kill has left beside it stays
            return False
        raise
    if not _finished(folder, mend=True):
        return True
    # Killed between writing the record and this.
    folder.tidy()
    return False


def _finished(folder: ResultFolder, *, mend: bool = False) -> bool:
    """Whether there is a finished result, undamaged; a damaged one is set aside where `mend` (it must be held)."""
    try:
        if read_record(folder.path) is None:
            return False
        read_samples(folder.path)
    except DamagedError as error:
        if mend:
            log.warning("%s: %s; set aside as %s, scored anew", error.path, error.said, folder.set_aside())
        return False
    return True


def key_parts(settings: Settings, loaded: LoadedModel, method: Method, prepared: PreparedTask) -> dict[str, Any]:
    """Everything that can change a number of this result; batch size and device are not among it."""
    model = settings.model
    found = versions()
    return {
        "model": {
            "source": _source(model.path),
            "revision": model.revision,
            "weights": model.weights,
            "fingerprint": loaded.fingerprint,
            "architecture": loaded.architecture,
            "tokenizer": loaded.vocabulary,
            "dtype": loaded.dtype,
        },
        "method": {"name": method.name, **method.settings()},
        "task": {"name": prepared.task_name, "config": prepared.config_hash, "prompts": prepared.prompts_hash},
        "limit": settings.task.limit,
        "seed": settings.seed,
        # Only where it is not as it was before one could choose: results from then keep their keys.
        **({"scoring": settings.scoring} if settings.scoring != "packed" else {}),
        "versions": {package: found[package] for package in KEY_PACKAGES},
        "code": loaded.code.version(*SCORER, *method.modules),
    }


def _source(path: str | None) -> str | None:
    """A local directory counts by where it is, not by how it was typed."""
    return str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path


def _score(
    settings: Settings,
    loaded: LoadedModel,
    method: Method,
    prepared: PreparedTask,
    folder: ResultFolder,
    parts: Mapping[str, Any],
    ranks: Ranks,
) -> None:
    from chai_eval.methods.costs import described_costs
    from chai_eval.scoring.evaluate import score

    started = time.monotonic()
    note = {"config": settings.as_config(), "n_requests": prepared.n_requests}
    before = folder.begin(note) if ranks.first else 0.0
    try:
        with _journal(folder, prepared, ranks) as journal:
            scores = score(
                loaded.model,
                loaded.tokenizer,
                method,
                prepared,
                scoring=settings.scoring,
                batch_tokens=settings.batch_tokens,
                journal=journal,
                ranks=ranks,
            )
        if scores is None:
            return
        record = {
            "model": folder.model,
            "task": folder.task,
            "method": folder.method,
            "key": folder.key,
            "n_documents": prepared.n_documents,
            "metrics": scores.metrics,
            "costs": described_costs(method, loaded.model),
            "config": settings.as_config(),
            "key_parts": parts,
            "versions": versions(),
            "git": git_revision(),
            "machine": machine(),
            "device": loaded.device,
            "batch": scores.batch,
            "processes": ranks.size,
            "wall_seconds": round(before + time.monotonic() - started, 3),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_record(folder.path, record, scores.samples)
    except Exception as error:
        if ranks.first:
            folder.fail(failure_line(error))
        raise
    folder.tidy()


def _journal(folder: ResultFolder, prepared: PreparedTask, ranks: Ranks) -> AbstractContextManager[Scored]:
    """The journal, or in all processes but the first a copy of what it holds."""
    from chai_eval.scoring.lm import InMemory

    if not ranks.first:
        return nullcontext(InMemory(ranks.broadcast(None)))
    journal = Journal(folder.journal)
    ranks.broadcast(journal.entries())
    before_this = f", going on after {len(journal)} of them" if len(journal) else ""
    log.info("%s, %s: scoring %d requests%s", folder.task, folder.method, prepared.n_requests, before_this)
    return journal


def _read(folder: ResultFolder) -> Result:
    record = read_record(folder.path)
    assert record is not None, "only read once it is finished"
    return Result(folder, record, read_samples(folder.path))
