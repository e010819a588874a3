"""CHAI whose heads change over to other representatives further on in a text, one head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.metrics.pairwise import cosine_distances

from tests.attention.tiny import HeadLoop, chai_loop
from tests.methods.cases.case import Case
from tests.methods.cases.ours import COUNTS
from tests.methods.loops import every_head


def recluster_loop(
    counts: list[int], every: int, threshold: float, probe: int = 5, share_value: bool = False
) -> HeadLoop:
    shared = chai_loop(counts, probe)

    def representatives(layer: int, probabilities: np.ndarray, scores: np.ndarray) -> list[int]:
        """Which head's probabilities CHAI uses for each, told from what it makes of values that show them."""
        heads, n, _ = probabilities.shape
        used = shared(layer, probabilities, scores, np.stack([np.eye(n)] * heads))
        return [
            next(one for one in range(heads) if np.array_equal(used[head, probe:], probabilities[one, probe:]))
            for head in range(heads)
        ]

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = every_head(probabilities, values)
        heads, n, _ = probabilities.shape
        if n <= probe or counts[layer] == heads:
            return out
        by = representatives(layer, probabilities, scores)
        chosen = sorted(set(by))
        for token in range(probe, n):
            if token % every == 0:
                window = list(range(token - probe, token))
                keys = [*range(probe), *window]
                seen = []
                for head in range(heads):
                    rows = [[scores[head, q, k] if k <= q else -np.inf for k in keys] for q in window]
                    raised = np.exp(np.array(rows) - np.max(rows, axis=1, keepdims=True))
                    seen.append((raised / raised.sum(1, keepdims=True)).ravel())
                apart = cosine_distances(seen)
                for head in range(heads):
                    if apart[head, by[head]] > threshold:
                        by[head] = chosen[int(np.argmin(apart[head, chosen]))]
            for head in range(heads):
                out[head, token] = probabilities[by[head], token] @ values[by[head] if share_value else head]
        return out

    return layer_output


def case(method: str = "chai", **settings: Any) -> Case:
    every, threshold = settings["recluster_every"], settings["drift_threshold"]
    return Case(
        method,
        {"clusters": COUNTS, **settings},
        lambda: recluster_loop(COUNTS, every, threshold, share_value=method == "v_reuse"),
        exact=True,
    )


CASES = {
    "chai_recluster": case(recluster_every=10, drift_threshold=0.0),
    "chai_recluster_far": case(recluster_every=13, drift_threshold=0.2),
    "v_reuse_recluster": case("v_reuse", recluster_every=12, drift_threshold=0.0),
}
