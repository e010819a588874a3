"""Divergence by position against distributions compared one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from scipy.special import rel_entr

from chai_eval.methods import build_method
from chai_eval.models import load_model
from chai_eval.scoring.compare import compare
from chai_eval.scoring.fidelity import by_position, fidelities
from chai_eval.scoring.positions import position_edges, without_bins
from chai_eval.scoring.runner import Runner
from tests.attention.tiny import MODELS, requests

LENGTHS = [12, 4, 20, 9, 30]
EDGES = (0, 5, 16, 20, 40)


def divergences(model, method, ids: torch.Tensor) -> list[float]:  # type: ignore[no-untyped-def]
    """Of each token of a request but the last, which predicts nothing that is known."""
    with torch.no_grad():
        expected = model(ids[None]).logits[0].double().softmax(-1).numpy()
        with method.applied(model):
            given = model(ids[None]).logits[0].double().softmax(-1).numpy()
    return [float(rel_entr(expected[at], given[at]).sum()) for at in range(len(ids) - 1)]


def test_bins_hold_the_tokens_at_their_positions_whatever_the_lengths_of_sequences() -> None:
    model, method, tokens = MODELS["llama"](), build_method("chai", clusters=[2, 2, 2]), requests(LENGTHS)
    given = [tuple(each.tolist()) for each in tokens]
    rows = compare(Runner(model, batch_tokens=25), {"chai": method}, given, edges=EDGES)["chai"]
    found = by_position(pd.DataFrame(rows), EDGES)
    each = [divergences(model, method, ids) for ids in tokens]
    assert found["start"].tolist() == [0, 5, 16, 20]
    for line in found.to_dict("records"):
        inside = [of_one[line["start"] : line["end"]] for of_one in each if len(of_one) > line["start"]]
        means = [sum(values) / len(values) for values in inside]
        assert line["tokens"] == sum(map(len, inside))
        # Sums in float32 over a hundred words; the probe's tokens lose nothing.
        assert line["kl"] == pytest.approx(np.mean(means), rel=1e-4, abs=1e-6)
        if len(means) > 1 and line["start"] > 0:
            low, high = stats.t.interval(0.95, len(means) - 1, np.mean(means), stats.sem(means))
            assert (line["low"], line["high"]) == pytest.approx((max(low, 0), high), rel=1e-3)
    assert found["kl"].iloc[0] < 1e-6 < found["kl"].iloc[1]
    assert math.isnan(found["low"].iloc[3])  # one sequence is so long
    assert "divergence_from_5" in rows[0]
    plain = compare(Runner(model, batch_tokens=25), {"chai": method}, given)["chai"]
    pd.testing.assert_frame_equal(without_bins(pd.DataFrame(rows)), pd.DataFrame(plain))


def test_a_texts_fidelity_has_bins_that_hold_every_token_and_whose_mean_is_its_divergence() -> None:
    texts = ["The quick brown fox jumps over the lazy dog. " * 4, "Pack my box with five dozen jugs, my love. " * 4]
    method = build_method("chai", clusters=[[2, 4]])
    found = fidelities(Runner(*load_model("tiny_llama_random", device="cpu")), {"": method}, texts, tokens=40)[""]
    assert found.positions["tokens"].sum() == found.tokens
    assert found.positions["end"].tolist() == [5, 16, 32, 39]
    weighted = np.average(found.positions["kl"], weights=found.positions["tokens"])
    assert weighted == pytest.approx(found.divergence.value)
    assert set(found.samples) == {
        "tokens", "divergence", "agreement", "log_likelihood", "baseline_log_likelihood", "infinite_tokens",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "edges"),
    [(2, (0, 1)), (6, (0, 5)), (7, (0, 5, 6)), (128, (0, 5, 16, 32, 64, 127)), (130, (0, 5, 16, 32, 64, 128, 129))],
)
def test_edges_double_up_to_the_last_token_that_predicts(tokens: int, edges: tuple[int, ...]) -> None:
    assert position_edges(tokens) == edges
