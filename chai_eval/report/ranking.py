"""Which method loses least where a share of the K,V bytes is saved, by paired comparisons on the same text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from chai_eval.report.pairs import Pair
from chai_eval.report.records import Stored
from chai_eval.report.statistics import Difference, paired_difference
from chai_eval.student import student_interval

# By how much a saving may fall short: counts of heads are whole numbers.
SHORT_OF = 0.005


@dataclass(frozen=True)
class Loss:
    """What a method at one setting loses on a text.

    Attributes
    ----------
    saved : float
        Share of the K,V bytes that it doesn't hold.
    divergence : Series
        KL(MHA ‖ method) in nats per token, by sequence or document.
    same_token : float
        Share of tokens for which both predict the same next one.
    settings : str
        What tells it from others of its name.
    """

    method: str
    saved: float
    divergence: pd.Series[float]
    same_token: float
    settings: str

    @property
    def kl(self) -> tuple[float, float, float]:
        """Mean and its 95 % interval (Student's), from 0."""
        low, high = student_interval(self.divergence, unknown=math.inf)
        return float(self.divergence.mean()), max(low, 0.0), high

    def more_than(self, other: Loss) -> tuple[float, float]:
        """95 % interval of how much more this one loses than another, over what both have read."""
        return student_interval((self.divergence - other.divergence).dropna(), unknown=math.inf)


@dataclass(frozen=True)
class Pooled:
    """A method on all documents of several tasks together: score minus plain attention's, in percentage points.

    `unusual` is how many of its settings aren't the usual ones.
    """

    label: str
    saved: float | None
    tasks: int
    documents: int
    difference: Difference
    unusual: int = 0


@dataclass(frozen=True)
class Ranked:
    """A method's place: `more` is how much more it loses than the one before it, with a 95 % interval."""

    place: int
    loss: Loss
    more: tuple[float, float] | None
    scores: Pooled | None

    @property
    def told(self) -> bool:
        """Whether it can be told from the one before it."""
        return self.more is None or self.more[0] > 0


@dataclass(frozen=True)
class Ranking:
    """Methods of a model that save so much, least lost first; `text` says what they were compared on."""

    model: str
    saving: float
    text: str
    places: tuple[Ranked, ...]
    source: Stored | None = None

    def of(self, method: str) -> Ranked | None:
        """The place of a method."""
        return next((each for each in self.places if each.loss.method == method), None)


def ranking(model: str, saving: float, frontiers: Sequence[Stored], found: Sequence[Pair]) -> Ranking | None:
    """Rank a model's methods by a frontier where there is one of two methods or more, else by tasks' documents."""
    own = [each for each in found if each.model == model]
    by_frontier = [
        (losses, each)
        for each in frontiers
        if each.content["model"]["name"] == model and (losses := best_of_each(frontier_losses(each), saving))
    ]
    by_tasks = best_of_each(task_losses(own), saving)
    losses, source = max(by_frontier, key=lambda each: (len(each[0]), len(each[0][0].divergence)), default=([], None))
    if source is not None and (len(losses) > 1 or len(by_tasks) <= 1):
        about = source.content["points"][0]
        tokens = source.content["settings"]["tokens"]
        text = f"{about['sequences']} sequences of {tokens} tokens of {source.content['text']}"
    elif by_tasks:
        losses, source = by_tasks, None
        text = f"the first {len(by_tasks[0].divergence)} documents of the tasks that were compared token by token"
    else:
        return None
    places, pooled = [], {each.label: each for each in pool(own)}
    for number, loss in enumerate(losses):
        more = None if number == 0 else loss.more_than(losses[number - 1])
        places.append(Ranked(number + 1, loss, more, _scores_of(loss.method, own, pooled, saving)))
    return Ranking(model, saving, text, tuple(places), source)


def best_of_each(losses: Sequence[Loss], saving: float) -> list[Loss]:
    """Of each method that saves so much, the setting that loses least; least first."""
    enough = [each for each in losses if each.saved >= saving - SHORT_OF and math.isfinite(each.kl[0])]
    best: dict[str, Loss] = {}
    for each in sorted(enough, key=lambda each: (each.kl[0], each.method)):
        best.setdefault(each.method, each)
    return list(best.values())


def frontier_losses(frontier: Stored) -> list[Loss]:
    """Every point of a frontier."""
    rows = {str(name): own.reset_index(drop=True) for name, own in frontier.tables["samples"].groupby("point")}
    return [
        Loss(
            each["method"], 1 - each["held"], rows[each["point"]]["divergence"].astype(float), each["same_token"],
            _brief(each["settings"]),
        )
        for each in frontier.content["points"]
    ]  # fmt: skip


def task_losses(found: Sequence[Pair]) -> list[Loss]:
    """Methods on all documents of tasks whose tokens were compared; those that hold all bytes save nothing."""
    losses = []
    for label, own in _by_label(found).items():
        held = own[0].share("held")
        compared = [
            each.result.fidelity.assign(task=each.task).set_index(["task", "doc_id"])
            for each in own
            if each.result.fidelity is not None and "doc_id" in each.result.fidelity
        ]
        if compared:
            rows = pd.concat(compared)
            same = float(np.average(rows["agreement"], weights=rows["tokens"]))
            saved = 0.0 if held is None else 1 - held
            losses.append(Loss(own[0].method, saved, rows["divergence"].astype(float), same, label))
    return losses


def pool(found: Sequence[Pair]) -> list[Pooled]:
    """Each method on the documents of all its tasks whose score is a mean over documents."""
    pooled = []
    for label, own in _by_label(found).items():
        both = [each.right for each in own if each.right is not None]
        if not both:
            continue
        before, after = (np.concatenate([each[side] for each in both]) for side in (0, 1))
        held = own[0].share("held")
        pooled.append(
            Pooled(
                label, None if held is None else 1 - held, len(both), before.size, paired_difference(before, after),
                own[0].unusual,
            )
        )  # fmt: skip
    return pooled


def beside(one: Sequence[Pair], other: Sequence[Pair]) -> tuple[Difference, int, int] | None:
    """Scores of one method minus another's, on documents that both were asked; with their number and that of tasks."""
    theirs = {each.task: each for each in other if each.right is not None}
    parts = [
        (theirs[each.task].right[1], each.right[1])  # type: ignore[index]
        for each in one
        if each.right is not None and each.task in theirs and _same_documents(each, theirs[each.task])
    ]
    if not parts:
        return None
    before, after = (np.concatenate([each[side] for each in parts]) for side in (0, 1))
    return paired_difference(before, after), before.size, len(parts)


def _same_documents(one: Pair, other: Pair) -> bool:
    first, second = one.result.samples["doc_hash"], other.result.samples["doc_hash"]
    return one.row.metric == other.row.metric and first.tolist() == second.tolist()


def _by_label(found: Sequence[Pair]) -> dict[str, list[Pair]]:
    grouped: dict[str, list[Pair]] = {}
    for each in found:
        grouped.setdefault(each.label, []).append(each)
    return grouped


def _scores_of(method: str, found: Sequence[Pair], pooled: dict[str, Pooled], saving: float) -> Pooled | None:
    """Scores of a method at the setting that saves enough and comes next to what was asked for."""
    labels = {each.label for each in found if each.method == method}
    enough = [
        pooled[each] for each in sorted(labels) if each in pooled and (pooled[each].saved or 0.0) >= saving - SHORT_OF
    ]
    return min(
        enough, key=lambda each: (round(each.saved or 0, 2), each.unusual, -each.tasks, each.label), default=None
    )


def _brief(settings: str) -> str:
    """Settings of a point that are a number or a word."""
    given = json.loads(settings)
    plain = {name: value for name, value in given.items() if isinstance(value, int | float | str)}
    return ", ".join(f"{name} {value}" for name, value in plain.items() if name != "name")
