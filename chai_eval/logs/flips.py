"""Documents that one run has right and the other wrong: what was asked, and what each answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chai_eval.logs.log import Texts
from chai_eval.logs.pairs import Pairs

LOST, GAINED = "A right, B wrong", "A wrong, B right"
UNKNOWN = "–"
# Characters of a text that a line shows: of a longer one its beginning and its end.
EXCERPT = 90


@dataclass(frozen=True)
class Flip:
    """A document of a task that one run has right and the other wrong under a metric, with the answers of both."""

    task: str
    metric: str
    kind: str
    doc_id: int
    question: str
    a: str
    b: str


def flips(task: str, metric: str, pairs: Pairs, texts: Texts) -> list[Flip]:
    """The documents that flipped under a metric of 0 and 1: those that B lost, then those that it gained, by doc_id.

    Parameters
    ----------
    texts
        Questions and choices by doc_id of A, asked for where neither log holds them.
    """
    column = metric.partition(" (")[0]
    scores = [frame[column].to_numpy(dtype=float) for frame in (pairs.first, pairs.second)]
    found = []
    for kind, sign in ((LOST, -1), (GAINED, 1)):
        for one, two in pairs.places:
            if scores[1][two] - scores[0][one] == sign:
                rows = _row(pairs.first, one), _row(pairs.second, two)
                question, choices = _texts(rows, texts)
                answers = [answer(row, column, choices) for row in rows]
                found.append(Flip(task, metric, kind, rows[0]["doc_id"], question or UNKNOWN, *answers))
    return found


def answer(row: dict[str, Any], metric: str, choices: Sequence[str] | None) -> str:
    """What was answered, by the metric: the choice that it takes as such, or what was generated."""
    likelihoods = row.get("loglikelihoods")
    if likelihoods is None:
        return row.get("response", UNKNOWN)
    weights: Any = 1
    if metric == "acc_norm":
        weights = row.get("lengths")
    elif metric == "acc_bytes":
        weights = None if choices is None else [len(each.encode()) for each in choices]
    elif metric == "acc_mutual_info":
        weights = None  # the likelihoods of choices by themselves are not kept
    if weights is None:
        return UNKNOWN
    with np.errstate(divide="ignore", invalid="ignore"):
        index = int(np.argmax(np.asarray(likelihoods, dtype=float) / np.asarray(weights, dtype=float)))
    return f"choice {index + 1}" if choices is None else choices[index].strip()


def excerpt(text: str) -> str:
    """A text on one line of a table, without what a terminal would take as a command."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split()).replace("|", r"\|")
    half = EXCERPT // 2
    return line if len(line) <= EXCERPT else f"{line[:half].rstrip()} … {line[-half:].lstrip()}"


def _row(frame: Any, place: int) -> dict[str, Any]:
    """A row's fields that are known."""
    known = frame.iloc[place].dropna()
    return {str(name): value for name, value in known.items()}


def _texts(rows: Sequence[dict[str, Any]], texts: Texts) -> tuple[str | None, Sequence[str] | None]:
    question, choices = (next((row[name] for row in rows if name in row), None) for name in ("question", "choices"))
    if question is not None:
        return question, choices
    return texts().get(rows[0]["doc_id"], (None, choices))
