"""The methods that come with the package: settings of each, and the same written as loops."""

from __future__ import annotations

import numpy as np

from tests.attention.tiny import HEADS, LAYERS, chai_loop
from tests.methods.cases.case import Case
from tests.methods.loops import (
    adaptive_loop,
    dejavu_loop,
    every_head,
    head_prune_loop,
    served_loop,
    spatten_loop,
    v_reuse_loop,
)

LABELS = [[0, 1, 2, 3, 4, 5, 6, 7], [5, 5, 0, 0, 5, 1, 1, 9], [3] * HEADS]
LOWEST = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 2, 2, 0, 5, 5, 7], [0] * HEADS]
SERVING = [[0, 1, 2, 3, 4, 5, 6, 7], [4, 4, 3, 3, 4, 5, 4, 3], [6] * HEADS]
PRUNED = [[], [1, 6, 7], [0, 1, 2, 3, 5, 6, 7]]
COUNTS = [8, 3, 1]


def mha_loop(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    return every_head(probabilities, values)


CASES = {
    "mha": Case("mha", {}, lambda: mha_loop),
    "chai": Case("chai", {"clusters": COUNTS}, lambda: chai_loop(COUNTS)),
    "chai_static": Case("chai_static", {"membership": LABELS}, lambda: served_loop(LOWEST)),
    "v_reuse": Case("v_reuse", {"clusters": COUNTS}, lambda: v_reuse_loop(COUNTS)),
    "output_aware": Case("output_aware", {"membership": SERVING}, lambda: served_loop(SERVING)),
    "output_aware_adaptive": Case(
        "output_aware",
        {"membership": SERVING, "adaptive": True, "probe_tokens": 4},
        lambda: adaptive_loop(SERVING, 4),
    ),
    "dejavu_10": Case("dejavu", {"sparsity": 0.1}, lambda: dejavu_loop(0.1)),
    "dejavu_50": Case("dejavu", {"sparsity": 0.5}, lambda: dejavu_loop(0.5)),
    "spatten": Case(
        "spatten",
        {"token_sparsity": 0.3, "head_sparsity": 0.25, "spare_layers": 1},
        lambda: spatten_loop(0.3, 0.25, spare_layers=1),
    ),
    "spatten_tokens": Case("spatten", {"token_sparsity": 0.7}, lambda: spatten_loop(0.7, 0.0)),
    "spatten_heads": Case(
        "spatten",
        {"token_sparsity": 0, "head_sparsity": 0.6, "spare_layers": 1},
        lambda: spatten_loop(0.0, 0.6, spare_layers=1),
    ),
    "spatten_from_the_first_layer": Case(
        "spatten",
        {"token_sparsity": 0.5, "head_sparsity": 0.5, "spare_layers": 0},
        lambda: spatten_loop(0.5, 0.5, spare_layers=0),
    ),
    "head_prune": Case("head_prune", {"pruned": PRUNED}, lambda: head_prune_loop(PRUNED)),
}

# Settings that leave everything as it is.
NOTHING = {
    "mha": {},
    "chai": {"clusters": [[HEADS, LAYERS]]},
    "v_reuse": {"clusters": [[HEADS, LAYERS]]},
    "chai_static": {"membership": [list(range(HEADS))] * LAYERS},
    "output_aware": {"membership": [list(range(HEADS))] * LAYERS},
    "dejavu": {"sparsity": 0, "mlp_sparsity": 0},
    "spatten": {"token_sparsity": 0, "head_sparsity": 0},
    "head_prune": {"pruned": [[]] * LAYERS},
}
