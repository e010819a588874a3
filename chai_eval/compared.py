"""How close a method stays to plain attention on a task: found beside the method's result, or computed and stored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from chai_eval.checksum import DamagedError
from chai_eval.scoring.ranks import Ranks
from chai_eval.store import ResultFolder, check_writable, read_fidelity, write_fidelity

if TYPE_CHECKING:
    from chai_eval.methods import Method
    from chai_eval.scoring.fidelity import Fidelity
    from chai_eval.scoring.prepare import PreparedTask
    from chai_eval.session import LoadedModel
    from chai_eval.settings import Settings

log = logging.getLogger(__name__)


def compared(
    settings: Settings,
    loaded: LoadedModel,
    method: Method,
    prepared: PreparedTask,
    folder: ResultFolder,
    ranks: Ranks | None = None,
) -> Mapping[str, Any] | None:
    """Return how close a method's next-token distributions are to plain attention's on a task's first documents.

    What an earlier run stored is taken where it is about as many documents or more, the first of which count then;
    else it is computed and takes its place.

    Parameters
    ----------
    folder
        Of the method's finished result; `record.json` there gets it as `fidelity`, `fidelity.parquet` the documents.
    ranks
        Processes that do it together: the first decides, locks and writes, and all return the same.

    Returns
    -------
    mapping or None
        As the record has it where it is about as many; None where none is wanted, or nothing is predicted.

    Raises
    ------
    SettingError
        Where it has to be made, and `results_dir` can't be written.
    RunError
        Where the comparison fails; the scores stay.
    """
    ranks = ranks or Ranks()
    count = prepared.n_documents if settings.fidelity is None else min(settings.fidelity, prepared.n_documents)
    if count == 0:
        return None
    with ranks.together(), ExitStack() as kept:
        if ranks.broadcast(ranks.first and _missing(folder, count, kept, ranks)):
            _compare(settings, loaded, method, prepared, folder, count, ranks)
        stored: Mapping[str, Any] | None = ranks.broadcast(_stored(folder, prepared, count) if ranks.first else None)
    return stored


def _missing(folder: ResultFolder, count: int, kept: ExitStack, ranks: Ranks) -> bool:
    """Whether there is anything to compute; the folder is held then, as long as `kept` is open."""
    try:
        if read_fidelity(folder.path, count) is not None:
            return False
    except DamagedError:
        pass  # another process may be at it: said below
    check_writable(folder.results_dir)
    kept.enter_context(folder.held(ranks.pulse))
    try:
        return read_fidelity(folder.path, count) is None
    except DamagedError as error:
        log.warning("%s: %s; compared anew", error.path, error.said)
        return True


def _stored(folder: ResultFolder, prepared: PreparedTask, count: int) -> dict[str, Any] | None:
    """What stands in the folder about the first documents of the task."""
    from chai_eval.scoring.fidelity import summary
    from chai_eval.scoring.task_fidelity import first_requests

    samples = read_fidelity(folder.path, count)
    if samples is None:
        return None
    # By their numbers: documents without a token to predict have no row.
    samples = samples[samples["doc_id"].isin([each.doc_id for each in first_requests(prepared)[:count]])]
    return _described(summary(samples), count) if len(samples) else None


def _compare(
    settings: Settings,
    loaded: LoadedModel,
    method: Method,
    prepared: PreparedTask,
    folder: ResultFolder,
    count: int,
    ranks: Ranks,
) -> None:
    from chai_eval.scoring.task_fidelity import task_fidelity

    log.info("%s, %s: comparing next tokens with mha on %d documents", folder.task, folder.method, count)
    found = task_fidelity(
        loaded.model, loaded.tokenizer, method, prepared, count, batch_tokens=settings.batch_tokens, ranks=ranks
    )
    if found is None:
        log.info("%s, %s: no document has a token to predict", folder.task, folder.method)
    elif ranks.first:
        write_fidelity(folder.path, _described(found, count), found.samples)
        folder.tidy()


def _described(found: Fidelity, asked: int) -> dict[str, Any]:
    """As the record has it."""
    from chai_eval.scoring.fidelity import plain

    return {"asked": asked, "documents": found.sequences, "tokens": found.tokens, **plain(found)}
