from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.models import load_model
from chai_eval.scoring import compare as passes
from chai_eval.scoring import fidelity as module
from chai_eval.scoring.fidelity import Fidelity, fidelities, plain, summary
from chai_eval.scoring.runner import Runner

TEXTS = ["The quick brown fox jumps over the lazy dog.", "Pack my box with five dozen jugs.", "Sphinx, judge my vow!"]
TOKENS = 20


@pytest.fixture(scope="module")
def tiny():  # type: ignore[no-untyped-def]
    return load_model("tiny_llama_random", device="cpu")


def fidelity(tiny: Any, method: Any, batch_tokens: int | None = None) -> Fidelity:
    return fidelities(Runner(*tiny, batch_tokens), {"": method}, TEXTS, tokens=TOKENS)[""]


def test_equals_distributions_compared_one_token_at_a_time(tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    model, tokenizer = tiny
    method = build_method("chai", clusters=[[2, 4]])
    monkeypatch.setattr(passes, "BLOCK_ELEMENTS", 3 * model.config.vocab_size)  # blocks that don't divide a sequence
    found = fidelity(tiny, method)
    divergences, agreements, log_likelihoods = [], [], []
    for ids in module.cut(TEXTS, tokenizer, TOKENS):
        with torch.no_grad():
            expected = model(ids[None]).logits[0].double().softmax(-1)
            with method.applied(model):
                given = model(ids[None]).logits[0].double().softmax(-1)
        for at in range(TOKENS - 1):
            p, q = expected[at], given[at]
            divergences.append(float((p * (p / q).log()).sum()))
            agreements.append(float(p.argmax() == q.argmax()))
            log_likelihoods.append(math.log(q[ids[at + 1]]))
    assert found.tokens == len(divergences)
    # Sums in float32 over a few hundred words.
    assert found.divergence.value == pytest.approx(sum(divergences) / len(divergences), rel=1e-4)
    assert found.agreement.value == pytest.approx(sum(agreements) / len(agreements))
    assert found.perplexity == pytest.approx(math.exp(-sum(log_likelihoods) / len(log_likelihoods)), rel=1e-4)
    assert found.divergence.low <= found.divergence.value <= found.divergence.high


def test_plain_attention_differs_from_itself_by_nothing(tiny) -> None:  # type: ignore[no-untyped-def]
    found = fidelity(tiny, build_method("mha"))
    assert found.divergence.value == pytest.approx(0, abs=1e-7)
    assert found.agreement.value == 1
    assert found.perplexity == pytest.approx(found.baseline_perplexity)


def test_batches_and_company_do_not_change_a_method(tiny) -> None:  # type: ignore[no-untyped-def]
    methods = {"few": build_method("chai", clusters=[[2, 4]]), "more": build_method("chai", clusters=[[6, 4]])}
    together = fidelities(Runner(*tiny, batch_tokens=4 * TOKENS), methods, TEXTS, tokens=TOKENS)
    alone = fidelity(tiny, methods["few"], batch_tokens=1)
    assert together["few"].divergence.value == pytest.approx(alone.divergence.value, rel=1e-4)
    assert together["few"].divergence.value > together["more"].divergence.value > 0


def test_so_many_sequences_and_no_more(tiny) -> None:  # type: ignore[no-untyped-def]
    runner = Runner(*tiny, batch_tokens=2 * TOKENS)
    found = fidelities(runner, {"": build_method("mha")}, TEXTS, tokens=TOKENS, sequences=3)[""]
    assert found.sequences == len(found.samples) == 3


def test_without_text_there_is_nothing_to_compare(tiny) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingError, match="text: "):
        fidelities(Runner(*tiny), {"": build_method("mha")}, [])


def samples(divergence: list[float], agreement: list[float]) -> pd.DataFrame:
    likelihoods = dict.fromkeys(("log_likelihood", "baseline_log_likelihood"), -1.0)
    return pd.DataFrame({"tokens": 5, "divergence": divergence, "agreement": agreement, **likelihoods})


def test_an_interval_is_students_and_none_where_all_sequences_have_the_same_value() -> None:
    divergence = [0.1, 0.2, 0.4]
    found = summary(samples(divergence, [1.0, 1.0, 1.0]))
    expected = stats.t.interval(0.95, 2, np.mean(divergence), stats.sem(divergence))
    assert found.divergence.high == pytest.approx(expected[1])
    assert found.agreement.value == 1
    assert math.isnan(found.agreement.low)
    assert math.isnan(found.agreement.high)


@pytest.mark.parametrize("sequences", [1, 3])
def test_as_json_a_missing_interval_is_null(sequences: int) -> None:
    described = plain(summary(samples([0.25] * sequences, [0.5] * sequences)))
    assert json.loads(json.dumps(described, allow_nan=False)) == {
        "divergence": {"value": 0.25, "low": None, "high": None},
        "agreement": {"value": 0.5, "low": None, "high": None},
        "perplexity": pytest.approx(math.e),
        "baseline_perplexity": pytest.approx(math.e),
    }


def test_methods_are_put_in_once_for_all_sequences_whose_logits_are_held(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = build_method("chai", clusters=[[2, 4]])
    entered: list[str] = []
    applied = type(method).applied

    def noting(self: Any, model: Any) -> Any:
        entered.append(self.name)
        return applied(self, model)

    monkeypatch.setattr(type(method), "applied", noting)
    found = fidelity(tiny, method, batch_tokens=TOKENS)
    assert found.sequences > 3
    assert entered == ["chai"]
