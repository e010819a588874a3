"""Documents whose answer a method changed, side by side: the text from local files, where it is the text scored."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chai_eval.data.assets import is_fetched
from chai_eval.data.documents import DOCUMENTS, local_documents
from chai_eval.errors import RunError, SettingError
from chai_eval.report.pairs import Pair
from chai_eval.report.records import TaskResult

# Characters of a passage or a choice that are shown.
LONGEST = 420
KINDS = ("lost", "gained", "moved")

# Question, choices and the right one, of a document as lm-eval has it.
Parts = tuple[str, list[str], int]
PARTS: dict[str, Callable[[Mapping[str, Any]], Parts]] = {
    "piqa": lambda doc: (doc["goal"], [doc["sol1"], doc["sol2"]], int(doc["label"])),
    "hellaswag": lambda doc: (doc["query"], doc["choices"], int(doc["label"])),
    "arc_easy": lambda doc: _arc(doc),
    "arc_challenge": lambda doc: _arc(doc),
    "boolq": lambda doc: (f"{doc['passage']}\n{doc['question']}?", ["no", "yes"], int(doc["label"])),
}


@dataclass(frozen=True)
class Changed:
    """A document that is answered otherwise.

    Attributes
    ----------
    kind : str
        `lost` (plain attention was right), `gained` (the method is), `moved` (neither is).
    before, after : int
        The choices of plain attention and of the method.
    margin : float
        By how much the difference of the two choices' scores moved, in nats.
    question, choices, gold
        None where the text isn't at hand; `why` says so then.
    """

    task: str
    doc_id: int
    kind: str
    before: int
    after: int
    margin: float
    question: str | None = None
    choices: tuple[str, ...] | None = None
    gold: int | None = None
    why: str | None = None


@dataclass(frozen=True)
class Changes:
    """What a method changed on a model: how many documents of each kind, of how many; some of them."""

    model: str
    label: str
    counts: Mapping[str, int]
    documents: int
    shown: tuple[Changed, ...]


def changes(found: Sequence[Pair], show: int) -> list[Changes]:
    """For each model and method, how many answers changed; of those lost and gained, the `show` that moved most.

    They are shown in the proportion in which they were lost and gained.
    """
    texts = Texts()
    grouped: dict[tuple[str, str], list[Pair]] = {}
    for each in found:
        grouped.setdefault((each.model, each.label), []).append(each)
    return [entry for (model, label), own in grouped.items() if (entry := _of(model, label, own, show, texts))]


def _of(model: str, label: str, own: Sequence[Pair], show: int, texts: Texts) -> Changes | None:
    differing: list[tuple[Pair, Changed]] = []
    documents = 0
    for pair in own:
        both = [predictions(each, pair.row.metric) for each in (pair.baseline, pair.result)]
        if both[0] is None or both[1] is None or pair.right is None:
            continue
        documents += len(both[0])
        differing += [(pair, each) for each in _differing(pair, both[0], both[1])]
    if not documents:
        return None
    counts = {kind: sum(each.kind == kind for _, each in differing) for kind in KINDS}
    told = counts["lost"] + counts["gained"]
    lost = round(show * counts["lost"] / told) if told else 0
    wanted = {"lost": lost, "gained": show - lost}
    chosen = [one for kind, most in wanted.items() for one in _in_turn(differing, kind)[:most]]
    return Changes(model, label, counts, documents, tuple(texts.fill(pair, each) for pair, each in chosen))


def _in_turn(differing: Sequence[tuple[Pair, Changed]], kind: str) -> list[tuple[Pair, Changed]]:
    """Those of a kind, of each task in turn the one that moved most: scores of different tasks don't compare."""
    of_kind = [each for each in differing if each[1].kind == kind]
    ordered = sorted(of_kind, key=lambda each: (each[1].task, -each[1].margin, each[1].doc_id))
    turns: dict[str, int] = {}
    placed = []
    for each in ordered:
        turn = turns[each[1].task] = turns.get(each[1].task, 0) + 1
        placed.append((turn, each))
    return [each for _, each in sorted(placed, key=lambda one: (one[0], one[1][1].task))]


def predictions(result: TaskResult, metric: str) -> NDArray[np.int64] | None:
    """The choice of each document by lm-eval's rule for a metric; None where there are no choices."""
    judged = _judged(result, metric)
    return None if judged is None else np.array([int(np.argmax(each)) for each in judged], dtype=np.int64)


def _judged(result: TaskResult, metric: str) -> list[NDArray[np.float64]] | None:
    """What choices are judged by: log-likelihoods, by their length in characters for `acc_norm`."""
    samples = result.samples
    if metric not in ("acc", "acc_norm") or not {"loglikelihoods", "lengths"} <= set(samples):
        return None
    judged = []
    for likelihoods, lengths in zip(samples["loglikelihoods"], samples["lengths"], strict=True):
        judged.append(np.asarray(likelihoods, float) / (np.asarray(lengths, float) if metric == "acc_norm" else 1.0))
    return judged


def _differing(pair: Pair, before: NDArray[np.int64], after: NDArray[np.int64]) -> list[Changed]:
    assert pair.right is not None
    first, second = (_judged(each, pair.row.metric) or [] for each in (pair.baseline, pair.result))
    found = []
    for at in np.flatnonzero(before != after):
        was, now = int(before[at]), int(after[at])
        right = pair.right[0][at], pair.right[1][at]
        kind = "lost" if right[0] > right[1] else "gained" if right[0] < right[1] else "moved"
        moved = (first[at][was] - first[at][now]) - (second[at][was] - second[at][now])
        found.append(Changed(pair.task, int(pair.result.samples["doc_id"].iloc[at]), kind, was, now, float(moved)))
    return found


class Texts:
    """Documents of the five tasks from local files; a text is shown only where it is the one that was scored."""

    @cache  # noqa: B019 - it lives as long as one report is made
    def _documents(self, task: str, data_dir: str | None) -> Any:
        if data_dir is None and not is_fetched(DOCUMENTS):
            raise RunError("the documents have not been fetched: python -m chai_eval.data")
        (documents,) = local_documents(task=task, data_dir=data_dir).values()
        return documents

    def fill(self, pair: Pair, changed: Changed) -> Changed:
        """A changed document with its text, or with why there is none."""
        try:
            question, choices, gold = self._parts(pair, changed.doc_id)
        except (RunError, SettingError) as error:
            return replace(changed, why=f"The text is not at hand: {error}")
        shown = tuple(shorten(each) for each in choices)
        return replace(changed, question=shorten(question), choices=shown, gold=gold)

    def _parts(self, pair: Pair, doc_id: int) -> Parts:
        task, config = pair.task, pair.result.record["config"]
        if task not in PARTS or config.get("source") == "hub" or config.get("include_path"):
            raise RunError("records hold hashes of documents, and these were not read from local files")
        documents = self._documents(task, config.get("data_dir"))
        samples = pair.result.samples
        (expected,) = samples.loc[samples["doc_id"] == doc_id, "doc_hash"]
        if doc_id >= len(documents) or doc_hash(documents[doc_id]) != expected:
            raise RunError("the document on this machine is not the one that was scored")
        return PARTS[task](documents[doc_id])


def doc_hash(document: Mapping[str, Any]) -> str:
    """The hash by which lm-eval names a document."""
    return hashlib.sha256(json.dumps(dict(document), indent=2, ensure_ascii=False).encode()).hexdigest()


def shorten(text: str) -> str:
    """A text of a few lines at most; of a long one beginning and end, which has the question."""
    text = " ".join(text.split())
    if len(text) <= LONGEST:
        return text
    end = text[-LONGEST // 3 :].partition(" ")[2]
    return f"{textwrap.shorten(text, LONGEST - len(end) - 5, placeholder='')} … {end}"


def _arc(doc: Mapping[str, Any]) -> Parts:
    return doc["question"], list(doc["choices"]["text"]), list(doc["choices"]["label"]).index(doc["answerKey"])
