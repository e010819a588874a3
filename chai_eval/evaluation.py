"""A method on a task: its scores, and how close it stays to plain attention; found on the disk, or made and stored."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from chai_eval.checksum import DamagedError
from chai_eval.errors import RunError, SettingError, failure_line
from chai_eval.scoring.ranks import Ranks
from chai_eval.session import LoadedModel
from chai_eval.settings import Settings
from chai_eval.store.code import SCORER
from chai_eval.store.folder import ResultFolder, check_writable
from chai_eval.store.journal import Journal
from chai_eval.store.key import result_key
from chai_eval.store.provenance import git_revision, machine, versions
from chai_eval.store.record import read_fidelity, read_record, read_samples, write_fidelity, write_record

if TYPE_CHECKING:
    from chai_eval.methods import Method
    from chai_eval.scoring.fidelity import Fidelity
    from chai_eval.scoring.prepare import PreparedTask
    from chai_eval.scoring.runner import Runner

log = logging.getLogger(__name__)

# Packages whose version can change a number: model code, its arithmetic, prompts and metrics.
KEY_PACKAGES = ("torch", "transformers", "lm-eval")


@dataclass(frozen=True)
class Result:
    """A finished result as it stands on the disk."""

    folder: ResultFolder
    record: Mapping[str, Any]
    samples: pd.DataFrame


@dataclass(frozen=True)
class Evaluation:
    """A method to be evaluated on a task, by processes that do it together.

    The first of them decides, locks and writes, and all get the same. What another process is making is waited for.
    """

    settings: Settings
    loaded: LoadedModel
    method: Method
    prepared: PreparedTask
    ranks: Ranks = field(default_factory=Ranks)

    @cached_property
    def folder(self) -> ResultFolder:
        """Where the result lies, by its key."""
        settings, key = self.settings, result_key(self.key_parts)
        return ResultFolder(settings.results_dir, settings.model.name, self.prepared.task_name, self.method.name, key)

    @cached_property
    def key_parts(self) -> dict[str, Any]:
        """Everything that can change a number of the result; batch size and device are not among it."""
        settings, loaded, prepared, found = self.settings, self.loaded, self.prepared, versions()
        path = settings.model.path
        return {
            "model": {
                # A local directory counts by where it is, not by how it was typed.
                "source": str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path,
                "revision": settings.model.revision,
                "weights": settings.model.weights,
                "fingerprint": loaded.fingerprint,
                "architecture": loaded.architecture,
                "tokenizer": loaded.vocabulary,
                "dtype": loaded.dtype,
            },
            "method": {"name": self.method.name, **self.method.settings()},
            "task": {"name": prepared.task_name, "config": prepared.config_hash, "prompts": prepared.prompts_hash},
            "limit": settings.task.limit,
            "seed": settings.seed,
            # Only where it is not as it was before one could choose: results from then keep their keys.
            **({"scoring": settings.scoring} if settings.scoring != "packed" else {}),
            "versions": {package: found[package] for package in KEY_PACKAGES},
            "code": loaded.code.version(*SCORER, *self.method.modules),
        }

    def result(self) -> Result:
        """Take the scores from an earlier result of the same key, or score.

        An unfinished result is gone on with, a damaged one is set aside. SettingError where it has to be scored, and
        `results_dir` can't be written; RunError where scoring fails: `status` then says why.
        """
        folder, ranks = self.folder, self.ranks
        with ranks.together(), ExitStack() as holding:
            if len(set(ranks.gather(folder.key))) > 1:
                raise RunError(f"{self._name}: the {ranks.size} processes differ in model, documents or versions")
            if ranks.broadcast(ranks.first and self._unfinished(holding)):
                self._score()
            else:
                log.info("%s: finished before, taken from %s", self._name, folder.path)
            found = Result(folder, read_record(folder.path) or {}, read_samples(folder.path)) if ranks.first else None
            return ranks.broadcast(found)

    def fidelity(self) -> Mapping[str, Any] | None:
        """Take what the finished result says of next tokens beside plain attention's, or compare them and add it.

        What an earlier run added is taken where it is about as many documents or more, the first of which count then;
        else it is computed and takes its place.

        It is as the record has it; None where none is wanted, or nothing is predicted. Raises as `result` does; the
        scores stay.
        """
        wanted, there, ranks = self.settings.fidelity, self.prepared.n_documents, self.ranks
        count = there if wanted is None else min(wanted, there)
        if count == 0:
            return None
        with ranks.together(), ExitStack() as holding:
            if ranks.broadcast(ranks.first and self._not_compared(count, holding)):
                self._compare(count)
            return ranks.broadcast(self._fidelity_of(count) if ranks.first else None)

    @property
    def _name(self) -> str:
        return f"{self.prepared.task_name}, {self.method.name}"

    @property
    def _runner(self) -> Runner:
        from chai_eval.scoring.runner import Runner

        return Runner(self.loaded.model, self.loaded.tokenizer, self.settings.batch_tokens, self.ranks)

    def _unfinished(self, holding: ExitStack) -> bool:
        """Whether there is anything to score; the folder is held then."""
        finished = self._finished()
        if finished and not self.folder.journal.exists():
            return False
        try:
            self._hold(holding)
        except (SettingError, RunError):
            if finished:  # where nothing can be written, what a kill has left beside it stays
                return False
            raise
        if not self._finished(mend=True):
            return True
        # Killed between writing the record and this.
        self.folder.tidy()
        return False

    def _finished(self, *, mend: bool = False) -> bool:
        """Whether there is a finished result, undamaged; a damaged one is set aside where `mend` (it must be held)."""
        try:
            if read_record(self.folder.path) is None:
                return False
            read_samples(self.folder.path)
        except DamagedError as error:
            if mend:
                log.warning("%s: %s; set aside as %s, scored anew", error.path, error.said, self.folder.set_aside())
            return False
        return True

    def _hold(self, holding: ExitStack) -> None:
        check_writable(self.settings.results_dir)
        holding.enter_context(self.folder.held(self.ranks.pulse))

    def _score(self) -> None:
        from chai_eval.methods.costs import described_costs
        from chai_eval.scoring.evaluate import score

        started = time.monotonic()
        folder, prepared, ranks, config = self.folder, self.prepared, self.ranks, self.settings.as_config()
        before = folder.begin({"config": config, "n_requests": prepared.n_requests}) if ranks.first else 0.0
        try:
            with Journal(folder.journal if ranks.first else None) as journal:
                known = ranks.broadcast(dict(journal))
                if not ranks.first:
                    journal.append_many(known.items())
                after = f", going on after {len(known)} of them" if known else ""
                log.info("%s: scoring %d requests%s", self._name, prepared.n_requests, after)
                scores = score(self._runner, self.method, prepared, scoring=self.settings.scoring, journal=journal)
            if scores is None:
                return
            record = {
                "model": folder.model,
                "task": folder.task,
                "method": folder.method,
                "key": folder.key,
                "n_documents": prepared.n_documents,
                "metrics": scores.metrics,
                "costs": described_costs(self.method, self.loaded.model),
                "config": config,
                "key_parts": self.key_parts,
                "versions": versions(),
                "git": git_revision(),
                "machine": machine(),
                "device": self.loaded.device,
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

    def _not_compared(self, count: int, holding: ExitStack) -> bool:
        """Whether there is anything to compare; the folder is held then."""
        if self._compared(count):
            return False
        self._hold(holding)
        return not self._compared(count, warn=True)

    def _compared(self, count: int, *, warn: bool = False) -> bool:
        """Whether there is an undamaged comparison; before it is held, another process may be writing it."""
        try:
            return read_fidelity(self.folder.path, count) is not None
        except DamagedError as error:
            if warn:
                log.warning("%s: %s; compared anew", error.path, error.said)
            return False

    def _compare(self, count: int) -> None:
        from chai_eval.scoring.fidelity import task_fidelity

        log.info("%s: comparing next tokens with mha on %d documents", self._name, count)
        found = task_fidelity(self._runner, self.method, self.prepared, count)
        if found is None:
            log.info("%s: no document has a token to predict", self._name)
        elif self.ranks.first:
            write_fidelity(self.folder.path, _described(found, count), found.samples)
            self.folder.tidy()

    def _fidelity_of(self, count: int) -> dict[str, Any] | None:
        """What the result says about the first documents of the task."""
        from chai_eval.scoring.fidelity import first_requests, summary

        samples = read_fidelity(self.folder.path, count)
        if samples is None:
            return None
        # By their numbers: documents without a token to predict have no row.
        samples = samples[samples["doc_id"].isin([each.doc_id for each in first_requests(self.prepared)[:count]])]
        return _described(summary(samples), count) if len(samples) else None


def _described(found: Fidelity, asked: int) -> dict[str, Any]:
    """As the record has it."""
    from chai_eval.scoring.fidelity import plain

    return {"asked": asked, "documents": found.sequences, "tokens": found.tokens, **plain(found)}
