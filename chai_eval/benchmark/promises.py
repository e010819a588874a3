"""What the project promises: the rows of the design's last section that are ratios."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """How many times as good as its peer something is to be, or, where `of_limit`, that share of the most there can be.

    `what` is the rows' own name; `where` must stand in a row's setting, between its commas.
    """

    what: str
    reach: float
    where: frozenset[str] = frozenset()
    of_limit: bool = False


PROMISES = (
    Promise("scoring under MHA", 2.0),
    Promise("scoring under CHAI", 0.9),
    Promise("decode attention", 1.7, frozenset({"float32", "cpu"})),
    # PyTorch's decode path in bfloat16 is slow on a CPU.
    Promise("decode attention", 4.0, frozenset({"bfloat16", "cpu"})),
    Promise("prefill attention", 1.75, frozenset({"float32", "cpu"})),
    Promise("decode at low rank", 0.85, frozenset({"float32", "cpu"}), of_limit=True),
    Promise("K,V bytes", 0.99, of_limit=True),
    # For so many requests at once: fewer leave more of the time to the number of operations, more leave less.
    Promise("membership of a layer", 10.0, frozenset({"64 requests", "cpu"})),
)


def promised(what: str, setting: str, limit: float | None) -> float | None:
    """The ratio that is promised of a row, None where none is."""
    parts = set(re.split("[,;] ", setting))
    for each in PROMISES:
        if each.what == what and each.where <= parts:
            return each.reach if not each.of_limit else None if limit is None else each.reach * limit
    return None
