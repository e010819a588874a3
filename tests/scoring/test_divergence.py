"""KL divergences against scipy's, and what becomes of infinite ones on their way to record and table."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import rel_entr
from scipy.stats import entropy
from torch import Tensor

from chai_eval.methods import build_method
from chai_eval.report import Header, Row, render, render_sweep
from chai_eval.scoring import compare as passes
from chai_eval.scoring.compare import kl_divergence
from chai_eval.scoring.fidelity import plain, summary
from chai_eval.scoring.runner import Runner

NEVER = -math.inf
PADDING = {token: [38, 39] for token in range(6)}


def log_probabilities(ruled_out: dict[int, list[int]] | None = None, seed: int = 0) -> Tensor:
    """Of 6 tokens out of 40, in float64; by token those that are ruled out."""
    logits = 3 * torch.randn(6, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for token, gone in (ruled_out or {}).items():
        logits[token, gone] = NEVER
    return logits.log_softmax(-1)


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (None, None),
        (PADDING, PADDING),
        ({1: [0, 7], 3: [5]}, {1: [7]}),
        ({1: [0, 7], 3: [5]}, {0: [2], 1: [0, 8], 4: [1, 2, 3]}),
    ],
)
def test_equals_scipys_relative_entropy_also_where_tokens_are_ruled_out(
    expected: dict[int, list[int]] | None, given: dict[int, list[int]] | None
) -> None:
    true, ours = log_probabilities(expected), log_probabilities(given, seed=1)
    found = kl_divergence(true, ours).numpy()
    p, q = true.exp().numpy(), ours.exp().numpy()
    np.testing.assert_allclose(found, rel_entr(p, q).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(found, entropy(p, q, axis=-1), rtol=1e-12)


def test_a_token_whose_probability_is_too_small_for_the_precision_is_not_ruled_out() -> None:
    tiny = torch.tensor([[0.0, -300.0]]).log_softmax(-1)
    without = torch.tensor([[0.0, NEVER]]).log_softmax(-1)
    assert kl_divergence(without, tiny).tolist() == [0]
    assert kl_divergence(tiny, without).tolist() == [math.inf]


class Ruling:
    """A model's logits with −inf for tokens, and under a method for others as well."""

    def __init__(self, model: Any, always: list[int], under_method: list[int]) -> None:
        self.always, self.under_method, self.applied = always, under_method, False
        self.handle = model.lm_head.register_forward_hook(self._hook)

    def _hook(self, module: Any, args: Any, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([*self.always, *(self.under_method if self.applied else [])]), NEVER)


def compared(patch: pytest.MonkeyPatch, always: list[int], under_method: list[int]) -> pd.DataFrame:
    from tests.attention.tiny import MODELS, requests

    model, method = MODELS["llama"](), build_method("chai", clusters=[3, 3, 3])
    ruling, applied = Ruling(model, always, under_method), type(method).applied

    def noting(self: Any, model: Any) -> Any:
        ruling.applied = True
        return applied(self, model)

    patch.setattr(type(method), "applied", noting)
    sequences = [tuple(each.tolist()) for each in requests([12, 9, 20])]
    return pd.DataFrame(passes.compare(Runner(model, batch_tokens=1000), {"chai": method}, sequences)["chai"])


def test_a_padded_vocabulary_leaves_divergence_and_perplexity_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    found = summary(compared(monkeypatch, [0, 1, 2], []))  # which no request has
    assert 0 < found.divergence.value < found.divergence.high < math.inf
    assert found.infinite_tokens == 0
    assert math.isfinite(found.perplexity)
    assert math.isfinite(found.baseline_perplexity)
    assert "infinite_tokens" not in plain(found)


def test_what_only_the_method_rules_out_makes_the_divergence_infinite_and_says_for_how_many_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = compared(monkeypatch, [0], [1])
    assert samples["infinite_tokens"].tolist() == samples["tokens"].tolist() == [11, 8, 19]
    described = json.loads(json.dumps(plain(summary(samples)), allow_nan=False))
    assert described["divergence"] == {"value": None, "low": None, "high": None}
    assert described["infinite_tokens"] == 38
    assert 0 < described["agreement"]["value"] <= 1


def test_a_token_of_the_text_that_is_ruled_out_makes_the_perplexity_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = compared(monkeypatch, list(range(3, 50)), [])
    found = summary(samples)
    assert found.perplexity == found.baseline_perplexity == math.inf
    assert found.infinite_tokens == 0
    assert plain(found)["perplexity"] is None


def test_one_infinite_sequence_among_finite_ones_leaves_a_mean_without_an_interval() -> None:
    likelihoods = dict.fromkeys(("log_likelihood", "baseline_log_likelihood"), -1000.0)
    samples = pd.DataFrame(
        {"tokens": 5, "divergence": [0.1, math.inf, 0.3], "agreement": 1.0, **likelihoods, "infinite_tokens": [0, 2, 0]}
    )
    found = summary(samples)
    assert found.divergence.value == found.perplexity == math.inf
    assert math.isnan(found.divergence.low)
    assert math.isnan(found.divergence.high)
    assert found.infinite_tokens == 2


def test_tables_show_inf_and_below_them_for_how_many_tokens() -> None:
    rows = [
        Row("piqa", "acc", 3, 0.5, 0.5, divergence=math.inf, agreement=0.5, infinite_tokens=2, compared_tokens=15),
        Row("boolq", "acc", 3, 0.5, 0.5, divergence=0.25, agreement=0.5, compared_tokens=9),
    ]
    one, many = io.StringIO(), io.StringIO()
    render(Header("chai"), rows, one)
    render_sweep([("seed=1", Header("chai"), rows), ("seed=2", Header("chai"), rows[1:])], many)
    for text, where in ((one.getvalue(), "piqa"), (many.getvalue(), "seed=1, piqa")):
        table, notes = text.split("\n\n")[-2:]
        assert [line.split("|")[-3].strip() for line in table.splitlines()[2:4]] == ["inf", "0.250"]
        assert notes.splitlines() == [
            f"KL is infinite in {where}: for 2 of 15 tokens the method rules out (logit -inf) a next token that MHA "
            "does not"
        ]
