"""The paper beside what was measured: figure by figure, and claim by claim, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from chai_eval.report import paper
from chai_eval.report.pairs import Pair
from chai_eval.report.paper import published
from chai_eval.report.ranking import beside, task_losses
from chai_eval.report.statistics import Difference
from chai_eval.settings import MethodSettings

# The paper's model that has most figures: shown where a model isn't the paper's.
SHOWN = "llama7b"

INCONSISTENT = (
    "The paper's published cluster counts save 19.1 % (LLaMA-7B) and 26.5 % (LLaMA-33B) of the K,V cache; neither is "
    "the headline's 21.4 %.",
    "Its abstract says that at most 3.2 points are lost, its body says 3.7 once.",
    "Its V-reuse ablation is measured against CHAI (77.8 and 47.0), not against MHA.",
)


@dataclass(frozen=True)
class Claim:
    """What the paper says, its figure, ours, and whether they agree, in words."""

    says: str
    paper: str
    ours: str
    verdict: str


def verdict(pair: Pair) -> tuple[float | None, str]:
    """The paper's difference in points for a method on a task, and what ours makes of it."""
    model = pair.result.record["config"]["model"].get("paper")
    method = MethodSettings(pair.method, pair.result.method_settings)
    value = paper.paper_figure(model or SHOWN, method, pair.task)
    difference = pair.row.difference
    if value is None:
        return None, "the paper has no figure"
    if isinstance(value, str):
        return None, f"not comparable: the paper gives a range over its tasks ({value} on {model or SHOWN})"
    if model is None:
        return value, f"not comparable: the paper's figure is of {SHOWN}"
    if difference is None or math.isnan(difference.low):
        return value, "not comparable: ours has no interval"
    said = paper.verdict((difference.points, difference.low, difference.high), value)
    why = {
        "agrees": ": the paper's difference lies in our interval",
        "differs": "; the paper's lies outside our interval",
    }
    return value, said + why.get(said.split()[0], "")


def claims(model: str, found: Sequence[Pair]) -> list[Claim]:
    """The paper's claims that records of a model can be held against."""
    own = [each for each in found if each.model == model]
    groups: dict[str, list[Pair]] = {}
    for each in own:
        groups.setdefault(each.label, []).append(each)
    return [*_static(groups), *_values(groups), *_probes(groups), *_largest(groups)]


def _of(groups: dict[str, list[Pair]], method: str) -> list[Pair]:
    """A method's results at its usual settings, or the setting with most documents."""
    own = [each for each in groups.values() if each[0].method == method]
    return min(own, key=lambda each: (each[0].unusual, -sum(one.row.n for one in each), each[0].label), default=[])


def _mean(tasks: Sequence[str], first: str, second: str) -> float | None:
    """The paper's mean difference between two methods on LLaMA-7B, over those of some tasks that it has both for."""
    both = [(published(SHOWN, first, task), published(SHOWN, second, task)) for task in tasks]
    known = [one - other for one, other in both if one is not None and other is not None]
    return float(np.mean(known)) if known else None


def _static(groups: dict[str, list[Pair]]) -> Iterator[Claim]:
    yield from _against(
        groups, "chai", "chai_static", "CHAI loses less than CHAI-static: clusters by request beat fixed"
    )


def _values(groups: dict[str, list[Pair]]) -> Iterator[Claim]:
    yield from _against(groups, "chai", "v_reuse", "Sharing values too (V-reuse) loses more than CHAI")


def _against(groups: dict[str, list[Pair]], better: str, worse: str, says: str) -> Iterator[Claim]:
    """Whether one method's scores, and its KL, are better than another's, as the paper says."""
    one, other = _of(groups, better), _of(groups, worse)
    found = beside(one, other) if one and other else None
    if found is None:
        return
    difference, documents, _ = found
    mean = _mean([each.task for each in one], better, worse)
    paper = "–" if mean is None else f"{mean:+.2f} points for CHAI on {SHOWN}, mean over tasks"
    ours = f"{_points(difference)} for CHAI over {documents} documents"
    yield Claim(f"{says} (scores)", paper, ours, _direction(difference.low, difference.high))
    losses = {each.method: each for each in task_losses([*one, *other])}
    if better in losses and worse in losses:
        low, high = losses[worse].more_than(losses[better])
        if math.isfinite(low):
            said = f"KL {losses[better].kl[0]:.3g} against {losses[worse].kl[0]:.3g}: {low:+.3g} to {high:+.3g} more"
            yield Claim(f"{says} (predictions)", "no figure", said, _direction(low, high))


def _probes(groups: dict[str, list[Pair]]) -> Iterator[Claim]:
    """Whether five probe tokens do better than fewer, and as well as more."""
    by_length: dict[int, list[Pair]] = {}
    for own in groups.values():
        length = own[0].result.method_settings.get("probe_tokens")
        if own[0].method == "chai" and isinstance(length, int):
            by_length.setdefault(length, own)
    if 5 not in by_length:
        return
    for length in sorted(set(by_length) - {5}):
        losses = task_losses([*by_length[5], *by_length[length]])
        by_label = {each.settings: each for each in losses}
        five, other = (by_label.get(by_length[each][0].label) for each in (5, length))
        if five is None or other is None:
            continue
        low, high = other.more_than(five)
        if not math.isfinite(low):
            continue
        ours = f"KL {five.kl[0]:.3g} with 5, {other.kl[0]:.3g} with {length}: {low:+.3g} to {high:+.3g} more"
        if length < 5:
            yield Claim(f"Five probe tokens beat {length}", "5 tokens", ours, _direction(low, high))
        else:
            said = "agrees: more do not help" if high >= 0 else "disagrees: more lose less, and that is told from none"
            yield Claim(f"Five probe tokens are enough: {length} do not help", "5 tokens", ours, said)


def _largest(groups: dict[str, list[Pair]]) -> Iterator[Claim]:
    own = [each for each in _of(groups, "chai") if each.row.difference is not None and each.right is not None]
    if not own:
        return
    worst = min(own, key=lambda each: each.row.difference.points)  # type: ignore[union-attr]
    difference = worst.row.difference
    assert difference is not None
    if difference.high < -3.2:
        said = "disagrees: more is lost, and that is told from 3.2"
    elif difference.low >= -3.2:
        said = "agrees: less is lost, and that is told from 3.2"
    else:
        said = "can't be told: 3.2 lies in our interval"
    yield Claim(
        "CHAI loses at most 3.2 points on any task", "-3.2 points at most", f"{worst.task}: {_points(difference)}", said
    )


def _points(difference: Difference) -> str:
    return f"{difference.points:+.2f} points ({difference.low:+.2f} to {difference.high:+.2f})"


def _direction(low: float, high: float) -> str:
    if low > 0:
        return "agrees"
    return "disagrees: it is the other way round" if high < 0 else "can't be told: zero lies in our interval"
