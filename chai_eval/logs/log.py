"""What a run left of one task: its metrics, and what each document contributed to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

# Questions and the texts of choices, by doc_id.
Texts = Callable[[], Mapping[int, tuple[str, Sequence[str] | None]]]


def no_texts() -> Mapping[int, tuple[str, Sequence[str] | None]]:
    """None beside what the samples hold."""
    return {}


@dataclass(frozen=True)
class TaskLog:
    """One task of a run.

    Attributes
    ----------
    source
        What was run, in words.
    metrics
        By name, with the filter in brackets where it has one: `acc`, `exact_match (strict-match)`.
    samples
        One row per document (and `filter`, where there are several): doc_id, doc_hash and prompt_hash where they are
        known, a column for each metric; and of what was asked and answered, as far as it is known: `question`,
        `choices` (texts), `loglikelihoods` and `lengths` (characters) of these, `response` (what was generated).
    version
        Of the task's definition.
    expected
        How many documents the run scored, where `samples` has another number of them.
    texts
        Questions and choices that the samples don't hold.
    """

    task: str
    source: str
    metrics: Mapping[str, float]
    samples: pd.DataFrame
    version: str | None = None
    expected: int | None = None
    texts: Texts = no_texts


@dataclass(frozen=True)
class Found:
    """A log that lies somewhere, not read yet.

    Attributes
    ----------
    run
        What tells it from other runs of the same task: logs that share it are of different dates.
    when
        Its date; later ones sort after earlier ones.
    """

    task: str
    run: str
    when: str
    place: Path
    read: Callable[[], TaskLog]
