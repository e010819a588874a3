"""The answer to "should I?": methods ranked at the saving asked for, and whether the ranking is decisive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from chai_eval.report.facts import Fact, facts, p_text, pooled_of
from chai_eval.report.heads import Heads
from chai_eval.report.pairs import Pair
from chai_eval.report.ranking import Ranked, Ranking, beside, ranking
from chai_eval.report.records import Records

# What the question is about, where it is among what was recorded.
ASKED = "chai"


@dataclass(frozen=True)
class Decision:
    """What a reader sees first about a model.

    Attributes
    ----------
    answer : str
        Yes, No, or Not decided.
    headline : str
        The answer's reason.
    sentences : tuple of str
        The ranking, how far it is decisive, what scores say.
    """

    model: str
    method: str
    saving: float
    answer: str
    headline: str
    sentences: tuple[str, ...]
    ranking: Ranking | None
    facts: tuple[Fact, ...]


def decide(model: str, saving: float, records: Records, found: Sequence[Pair], heads: Heads | None) -> Decision:
    """Decide about CHAI on a model where it was recorded, else about the model's first method."""
    names = list(dict.fromkeys(each.method for each in found if each.model == model))
    ranked = ranking(model, saving, records.frontiers, found)
    ranked_names = [each.loss.method for each in ranked.places] if ranked else []
    asked = next((each for each in (ASKED, *names, *ranked_names) if each in (*names, *ranked_names)), ASKED)
    four = tuple(facts(model, asked, records, found, heads))
    share = f"{100 * saving:.0f} % of the K,V bytes saved"
    if ranked is None:
        said = f"No record compares methods on {model} at {share}."
        return Decision(model, asked, saving, "Not decided", said, _scores(model, asked, found), None, four)
    answer, headline, why = _answer(asked, ranked, share)
    scores = (*_scores(model, asked, found), *_beside(asked, ranked, found))
    sentences = (why, f"{_order(ranked)} {_told(ranked)}", *scores)
    return Decision(model, asked, saving, answer, headline, sentences, ranked, four)


def _answer(asked: str, ranked: Ranking, share: str) -> tuple[str, str, str]:
    """Yes, No or Not decided; the reason in a line; the figures behind it."""
    own, first = ranked.of(asked), ranked.places[0]
    figures = f"{_figures(first)}, on {ranked.text}."
    if own is None:
        said = f"At {share}, {first.loss.method} loses least; {asked} has no record that saves so much."
        return "Not decided", said, figures
    if own is first and len(ranked.places) == 1:
        return "Not decided", f"At {share}, {asked} is the only method recorded: there is nothing to rank.", figures
    other = ranked.places[1] if own is first else first
    worse = other if own is first else own
    low, high = worse.loss.more_than(first.loss)
    apart = f"the difference is {low:.3g} to {high:.3g} (95 %, paired)" if math.isfinite(low) else "no interval"
    figures = f"{_figures(own)}; {_figures(other)}; {apart}, on {ranked.text}."
    if low <= 0:
        said = f"{asked} can't be told from {other.loss.method}, which comes {'next' if own is first else 'first'}"
        return "Not decided", f"At {share}, {said}.", figures
    times = _times(worse.loss.kl[0], first.loss.kl[0])
    if own is first:
        said = f"{asked} loses least of {len(ranked.places)} methods; {other.loss.method}, next, {times} as much"
        return "Yes", f"At {share}, {said}.", figures
    return "No", f"At {share}, {asked} loses {times} as much as {other.loss.method}: take that instead.", figures


def _figures(each: Ranked) -> str:
    return f"{each.loss.method} saves {100 * each.loss.saved:.0f} % at KL {each.loss.kl[0]:.3g} nats per token"


def _times(value: float, least: float) -> str:
    times = value / least if least else float("inf")
    if times < 10:
        return f"{times:.1f} times"
    if times < 100:
        return f"{times:.0f} times"
    # One digit that counts, cut: an interval stands beside it.
    digit = 10 ** math.floor(math.log10(min(times, 1e6)))
    return f"more than {int(min(times, 1e6) // digit * digit)} times"


def _order(ranked: Ranking) -> str:
    return f"Least lost first: {', '.join(each.loss.method for each in ranked.places)}."


def _told(ranked: Ranking) -> str:
    """Which neighbours of the ranking can't be told apart."""
    if len(ranked.places) == 1:
        return "There is nothing to compare it with."
    close = [
        f"{each.loss.method} from {before.loss.method} ({each.more[0]:+.3g} to {each.more[1]:+.3g})"
        for before, each in zip(ranked.places, ranked.places[1:], strict=False)
        if not each.told and each.more is not None
    ]
    if not close:
        return "The ranking is decisive: each loses more than the one before it, by paired 95 % intervals."
    rest = "; the other steps are decisive" if len(close) < len(ranked.places) - 1 else ""
    return f"The ranking is not decisive everywhere: paired 95 % intervals can't tell {', '.join(close)}{rest}."


def _scores(model: str, method: str, found: Sequence[Pair]) -> tuple[str, ...]:
    """What the tasks' scores say of a method."""
    pooled = pooled_of(model, method, found)
    if pooled is None:
        return ()
    lost = pooled.difference
    p = f", exact McNemar p {p_text(pooled.difference.p)}" if pooled.difference.p is not None else ""
    said = (
        f"In scores, {pooled.label} changes plain attention's by {lost.points:+.2f} points over {pooled.documents} "
        f"documents of {pooled.tasks} tasks ({lost.low:+.2f} to {lost.high:+.2f}, 95 %{p}): "
    )
    if lost.low <= 0 <= lost.high:
        return (said + "these documents do not tell it from no change.",)
    return (said + f"a {'loss' if lost.points < 0 else 'gain'} that these documents tell from none.",)


def _beside(method: str, ranked: Ranking, found: Sequence[Pair]) -> tuple[str, ...]:
    """What scores say of a method beside the one that loses least."""
    first, own = ranked.places[0], ranked.of(method)
    if own is None or own is first or own.scores is None or first.scores is None:
        return ()
    ours, best = (
        [each for each in found if each.model == ranked.model and each.label == label]
        for label in (own.scores.label, first.scores.label)
    )
    compared = beside(ours, best)
    if compared is None:
        return ()
    difference, documents, _ = compared
    told = "can't tell them apart" if difference.low <= 0 <= difference.high else "tell them apart"
    return (
        f"Beside {first.scores.label}, {own.scores.label} scores {difference.points:+.2f} points on the same "
        f"{documents} documents ({difference.low:+.2f} to {difference.high:+.2f}, 95 %): scores {told}.",
    )


def scores_text(each: Ranked) -> str:
    """The scores of a ranked method, as a table has them."""
    pooled = each.scores
    if pooled is None:
        return "–"
    lost = pooled.difference
    return f"{lost.points:+.2f} ({lost.low:+.2f} to {lost.high:+.2f})"
