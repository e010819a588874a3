"""Documents that one run has right and the other wrong: what was asked, and what each answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np

from chai_eval.logs.log import Texts
from chai_eval.logs.pairs import Pairs

LOST, GAINED = "A right, B wrong", "A wrong, B right"
UNKNOWN = "–"
# Characters of a text that a line shows, and of what it begins with where examples or a like beginning are left out.
LONGEST, LEAST = 90, 30


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
        flipped = [places for places in pairs.places if scores[1][places[1]] - scores[0][places[0]] == sign]
        first, second = (
            frame.iloc[[places[side] for places in flipped]].to_dict("records")
            for side, frame in enumerate((pairs.first, pairs.second))
        )
        for rows in zip(map(_known, first), map(_known, second), strict=True):
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


def asked(question: str) -> str:
    """A question on one line, without the examples before it: of a long one its beginning and its end."""
    blocks = question.strip().split("\n\n")
    count = next((n for n in range(1, len(blocks)) if sum(map(len, blocks[-n:])) >= LEAST), len(blocks))
    line, half = _line(" ".join(blocks[-count:])), LONGEST // 2
    return _cell(line if len(line) <= LONGEST else f"{line[:half].rstrip()} … {line[-half:].lstrip()}")


def answered(a: str, b: str) -> tuple[str, str]:
    """Two answers on a line each: of long ones what lies around the place from which they differ."""
    a, b = _line(a), _line(b)
    alike = next((at for at, (one, two) in enumerate(zip(a, b, strict=False)) if one != two), min(len(a), len(b)))
    start = max(alike - LEAST, 0) if max(len(a), len(b)) > LONGEST else 0
    cut = [f"{'… ' if start else ''}{each[start : start + LONGEST]}" for each in (a, b)]
    one, two = (
        _cell(f"{each} …" if len(whole) > start + LONGEST else each) for each, whole in zip(cut, (a, b), strict=True)
    )
    return one, two


def _line(text: str) -> str:
    # A terminal would take other characters as commands.
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _cell(line: str) -> str:
    return line.replace("|", r"\|")


def _known(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row's fields that have a value: what a log lacks in places is None or nan there."""
    return {name: each for name, each in row.items() if not (each is None or (isinstance(each, float) and isnan(each)))}


def _texts(rows: Sequence[dict[str, Any]], texts: Texts) -> tuple[str | None, Sequence[str] | None]:
    question, choices = (next((row[name] for row in rows if name in row), None) for name in ("question", "choices"))
    if question is not None:
        return question, choices
    return texts().get(rows[0]["doc_id"], (None, choices))
