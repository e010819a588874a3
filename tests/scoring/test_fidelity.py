from __future__ import annotations

import math

import pytest
import torch

from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.models import load_model
from chai_eval.scoring import fidelity as module
from chai_eval.scoring.fidelity import fidelities, fidelity

TEXTS = ["The quick brown fox jumps over the lazy dog.", "Pack my box with five dozen jugs.", "Sphinx, judge my vow!"]
TOKENS = 20


@pytest.fixture(scope="module")
def tiny():  # type: ignore[no-untyped-def]
    return load_model("tiny_llama_random", device="cpu")


def test_equals_distributions_compared_one_token_at_a_time(tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    model, tokenizer = tiny
    method = build_method("chai", clusters=[[2, 4]])
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 3 * model.config.vocab_size)  # blocks that don't divide a sequence
    found = fidelity(model, tokenizer, method, TEXTS, tokens=TOKENS)
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
    found = fidelity(*tiny, build_method("mha"), TEXTS, tokens=TOKENS)
    assert found.divergence.value == pytest.approx(0, abs=1e-7)
    assert found.agreement.value == 1
    assert found.perplexity == pytest.approx(found.baseline_perplexity)


def test_batches_and_company_do_not_change_a_method(tiny) -> None:  # type: ignore[no-untyped-def]
    model, tokenizer = tiny
    methods = {"few": build_method("chai", clusters=[[2, 4]]), "more": build_method("chai", clusters=[[6, 4]])}
    together = fidelities(model, tokenizer, methods, TEXTS, tokens=TOKENS, batch_tokens=4 * TOKENS)
    alone = fidelity(model, tokenizer, methods["few"], TEXTS, tokens=TOKENS, batch_tokens=1)
    assert together["few"].divergence.value == pytest.approx(alone.divergence.value, rel=1e-4)
    assert together["few"].divergence.value > together["more"].divergence.value > 0


def test_so_many_sequences_and_no_more(tiny) -> None:  # type: ignore[no-untyped-def]
    model, tokenizer = tiny
    found = fidelity(model, tokenizer, build_method("mha"), TEXTS, tokens=TOKENS, sequences=3, batch_tokens=2 * TOKENS)
    assert found.sequences == len(found.samples) == 3


def test_without_text_there_is_nothing_to_compare(tiny) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingError, match="text: "):
        fidelity(*tiny, build_method("mha"), [])
