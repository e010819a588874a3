"""Heads split over two devices: clusters within the first four heads, and within the last four, as if each were all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.attention.tiny import HeadLoop, chai_loop
from tests.methods.cases.case import Case
from tests.methods.loops import adaptive_loop, served_loop, v_reuse_loop

HALF = 4
# Five clusters of eight heads are two and three, the third where it is the second layer's turn; one is one on each.
COUNTS = [8, 5, 1]
OF_FIRST, OF_SECOND = [4, 2, 1], [4, 3, 1]
LABELS = [[0, 1, 2, 3, 4, 5, 6, 7], [5, 5, 0, 0, 1, 9, 9, 7], [3] * HALF + [2] * HALF]
LOWEST = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 2, 2, 4, 5, 5, 7], [0] * HALF + [4] * HALF]
SERVING = [[0, 1, 2, 3, 4, 5, 6, 7], [1, 1, 3, 3, 4, 4, 7, 7], [2] * HALF + [5] * HALF]


def by_device(loops: list[HeadLoop]) -> HeadLoop:
    """Each device's loop over its own heads, which it counts from 0."""

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        parts = [np.split(each, len(loops)) for each in (probabilities, scores, values)]
        return np.concatenate([loop(layer, *part) for loop, *part in zip(loops, *parts, strict=True)])

    return layer_output


def chai_like(loop: Callable[[list[int]], HeadLoop]) -> Callable[[], HeadLoop]:
    return lambda: by_device([loop(OF_FIRST), loop(OF_SECOND)])


def of_devices(serving: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    return [each[:HALF] for each in serving], [[by - HALF for by in each[HALF:]] for each in serving]


CASES = {
    "chai_two_devices": Case("chai", {"clusters": COUNTS, "tensor_parallel": 2}, chai_like(chai_loop)),
    "chai_medoid_two_devices": Case(
        "chai",
        {"clusters": COUNTS, "tensor_parallel": 2, "representative": "medoid", "probe_tokens": 4},
        chai_like(lambda counts: chai_loop(counts, 4, "medoid")),
        exact=True,
    ),
    "v_reuse_two_devices": Case("v_reuse", {"clusters": COUNTS, "tensor_parallel": 2}, chai_like(v_reuse_loop)),
    "chai_static_two_devices": Case(
        "chai_static", {"membership": LABELS, "tensor_parallel": 2}, lambda: served_loop(LOWEST)
    ),
    "output_aware_two_devices": Case(
        "output_aware", {"membership": SERVING, "tensor_parallel": 2}, lambda: served_loop(SERVING)
    ),
    "output_aware_adaptive_two_devices": Case(
        "output_aware",
        {"membership": SERVING, "tensor_parallel": 2, "adaptive": True},
        lambda: by_device([adaptive_loop(each, 5) for each in of_devices(SERVING)]),
    ),
}
