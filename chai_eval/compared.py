"""How close a method stays to plain attention on a task: found beside the method's result, or computed and stored."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from chai_eval.scoring.ranks import Ranks
from chai_eval.store import ResultFolder, read_fidelity, write_fidelity

if TYPE_CHECKING:
    from chai_eval.methods import Method
    from chai_eval.scoring.evaluate import PreparedTask
    from chai_eval.scoring.fidelity import Fidelity
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

    What an earlier run stored is taken where it is about as many documents; else it is computed and takes its place.

    Parameters
    ----------
    folder
        Of the method's finished result; `record.json` there gets it as `fidelity`, `fidelity.parquet` the documents.
    ranks
        Processes that do it together: the first decides, locks and writes, and all return the same.

    Returns
    -------
    mapping or None
        As the record has it; None where none is wanted, or no document has a token to predict.

    Raises
    ------
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
        stored: Mapping[str, Any] | None = ranks.broadcast(read_fidelity(folder.path, count) if ranks.first else None)
    return stored


def _missing(folder: ResultFolder, count: int, kept: ExitStack, ranks: Ranks) -> bool:
    """Whether there is anything to compute; the folder is held then, as long as `kept` is open."""
    if read_fidelity(folder.path, count) is not None:
        return False
    kept.enter_context(folder.held(ranks.pulse))
    return read_fidelity(folder.path, count) is None


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
        write_fidelity(folder.path, _summary(found, count), found.samples)
        folder.tidy()


def _summary(found: Fidelity, asked: int) -> dict[str, Any]:
    """As plain JSON values, which have no nan: null where there is no interval."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    means = {
        name: {"value": number(mean.value), "low": number(mean.low), "high": number(mean.high)}
        for name, mean in (("divergence", found.divergence), ("agreement", found.agreement))
    }
    return {
        "asked": asked,
        "documents": found.sequences,
        "tokens": found.tokens,
        **means,
        "perplexity": number(found.perplexity),
        "baseline_perplexity": number(found.baseline_perplexity),
    }
