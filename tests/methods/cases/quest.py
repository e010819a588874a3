"""`quest`, head by head and query by query; beside CHAI by the probabilities of representatives that chose."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from tests.attention.tiny import HeadLoop, chai_loop
from tests.methods.cases.case import Case
from tests.methods.cases.ours import COUNTS
from tests.methods.loops import every_head


def quest_loop(read: float, size: int, spare_layers: int, then: HeadLoop | None = None) -> HeadLoop:
    states: dict[str, np.ndarray] = {}

    def meet(query: np.ndarray, key: np.ndarray) -> None:
        states.update(query=query, key=key)

    def chosen(head: int, t: int) -> list[int]:
        """The pages that are read of those that were complete before the query's own."""
        query, key = states["query"][head, t], states["key"][head]
        bounds = []
        for page in range(t // size):
            keys = key[page * size : page * size + size]
            bounds.append(sum(max(q * min(of_d), q * max(of_d)) for q, of_d in zip(query, keys.T, strict=True)))
        count = math.ceil(Fraction(str(read)) * len(bounds))
        return sorted(range(len(bounds)), key=lambda page: (-bounds[page], page))[:count]

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        heads, n, _ = probabilities.shape
        found = np.zeros_like(probabilities)
        for head, t in np.ndindex(heads, n):
            pages = range(t // size) if layer < spare_layers else chosen(head, t)
            keys = [key for page in pages for key in range(page * size, page * size + size)]
            keys += range(t // size * size, t + 1)
            raised = np.exp(scores[head, t, keys] - scores[head, t, keys].max())
            found[head, t, keys] = raised / raised.sum()
        return every_head(found, values) if then is None else then(layer, found, scores, values)

    layer_output.meet = meet  # type: ignore[attr-defined]
    return layer_output


PAGES = {"read": 0.5, "page_size": 4, "spare_layers": 1}

CASES = {
    "quest": Case("quest", {"spare_layers": 0}, lambda: quest_loop(0.25, 16, 0)),
    "quest_small_pages": Case("quest", PAGES, lambda: quest_loop(0.5, 4, 1)),
    "quest_one_in_five": Case("quest", {"read": 0.2, "page_size": 3, "spare_layers": 0}, lambda: quest_loop(0.2, 3, 0)),
    # Of a probe of 5 tokens one page at most is complete, which is read.
    "chai+quest": Case(
        "chai",
        {"clusters": COUNTS, "with": [{"name": "quest", **PAGES}]},
        lambda: quest_loop(0.5, 4, 1, then=chai_loop(COUNTS)),
    ),
}
NOTHING = {"quest": {"read": 1}}
