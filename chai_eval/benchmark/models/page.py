"""The page that says which models are right, which are refused and why, and which couldn't be built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chai_eval.benchmark.models.build import WINDOW
from chai_eval.benchmark.models.compare import LENGTHS, METHODS, MODES
from chai_eval.benchmark.models.verdict import FAILED, REFUSED, RIGHT, TOLERANCE, UNBUILT, WRONG, Verdict
from chai_eval.markdown import markdown
from chai_eval.store.provenance import versions

PACKAGES = ("transformers", "torch")


def page(found: Sequence[Verdict]) -> str:
    """The page as Markdown."""
    by_verdict = {
        verdict: [each for each in found if each.verdict == verdict]
        for verdict in (WRONG, FAILED, RIGHT, REFUSED, UNBUILT)
    }
    known = versions()
    counts = ", ".join(f"{len(each)} {verdict}" for verdict, each in by_verdict.items())
    parts = [
        "# Models",
        f"Of {len(found)} causal types of transformers: {counts}.",
        "Made by `python -m chai_eval benchmark models`, with "
        f"{', '.join(f'{name} {known[name]}' for name in PACKAGES if name in known)}; not edited by hand.",
        _how(),
    ]
    for verdict, each in by_verdict.items():
        if each:
            parts += [f"## {verdict[0].upper()}{verdict[1:]}", _table(verdict, each)]
    return "\n\n".join(parts) + "\n"


def _how() -> str:
    modes = ", ".join(mode.name for mode in MODES)
    lengths = ", ".join(map(str, LENGTHS))
    return (
        "Each type is built small from its config, with random weights, four layers and every window or chunk "
        f"{WINDOW} tokens wide. The stock model says what follows each token of texts of {lengths} tokens, each run "
        f"alone; then the methods say it, at settings that change nothing ({', '.join(METHODS)}; CHAI with every head "
        f"its own cluster), in these ways: {modes}. *Right* means that no log-probability differs by more than "
        f"{TOLERANCE:g} (of itself, where it is below -1); *refused*, that `method.check(model)` says the line beside "
        "it. *Looks back* names the fields of the config that bound how far this model looked."
    )


def _table(verdict: str, found: Sequence[Verdict]) -> str:
    if verdict == RIGHT:
        lines = []
        for each in found:
            worst, where = max((off, f"{method} {mode}") for method, mode, off in each.differences)
            lines.append([each.kind, each.model, ", ".join(each.bounds) or "–", f"{worst:.0e}", where, _notes(each)])
        columns = ["type", "model", "looks back", "largest difference", "in", "but"]
    else:
        lines = [[each.kind, each.model, _cell(each.why)] for each in found]
        columns = ["type", "model", "why"]
    return "\n".join(markdown(columns, lines, left=len(columns)))


def _notes(each: Verdict) -> str:
    refused = Counter(outcome.reason for outcome in each.outcomes.values() if outcome.verdict == REFUSED)
    notes = list(dict.fromkeys(note for outcome in each.outcomes.values() for note in outcome.notes))
    return _cell("; ".join([*refused, *notes]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
