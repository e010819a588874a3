"""Scores that come through the cache, token by token, against those of packed rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import DynamicCache

from chai_eval.attention.cache import ClusteredCache
from chai_eval.errors import RunError
from chai_eval.methods import METHODS, build_method
from chai_eval.models import load_model
from chai_eval.scoring import decode
from chai_eval.scoring.decode import DecodedLM, decodings
from chai_eval.scoring.evaluate import score
from chai_eval.scoring.lm import PackedLM
from chai_eval.scoring.pack import ScoringRequest
from chai_eval.scoring.prepare import prepare
from chai_eval.scoring.runner import Runner
from chai_eval.scoring.tasks import load_task
from chai_eval.settings import TaskSettings
from chai_eval.store.journal import Journal
from tests.attention.tiny import MODELS
from tests.methods.cases import CASES
from tests.methods.cases.case import Case
from tests.scoring.test_lm import COUNTS, ask
from tests.scoring.tiny_text import tokenizer

# float32; a continuation of 20 tokens sums 20 roundings of about 1e-6.
TOLERANCE = 1e-4
SETTINGS = {
    "chai_medoid": Case("chai", {"clusters": COUNTS, "representative": "medoid", "probe_tokens": 8}),
    **CASES,
}


# Contexts shorter than the probe, as long, longer; choices of 1 to 7 tokens, some alike; a context with one alone.
FEW = [
    ask(context, choice)
    for context in ("q", "abcd", "abcde", "a longer context, of 31 letters")
    for choice in ("fghijkl", "mn", "o", "mno")
] + [ask("mid size", "x")]


def scored(kind: type[PackedLM], model: Any, method: Any, asked: list[Instance], **settings: Any) -> list[Any]:
    """Log-likelihood and whether greedy; of running text the log-likelihood alone."""
    runner = Runner(model, tokenizer(), settings.pop("batch_tokens", 64), progress=False)
    with method.applied(model):
        lm = kind(runner, method, **settings)
        return getattr(lm, asked[0].request_type)(asked)


def assert_same(found: list[Any], expected: list[Any], tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=tolerance)
        assert ours[1] == theirs[1]


def test_every_method_is_among_those_compared() -> None:
    assert {case.method for case in SETTINGS.values()} == set(METHODS)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", SETTINGS)
def test_decoded_scores_equal_packed_ones(case: str, name: str) -> None:
    model = SETTINGS[case].model(name)
    method = SETTINGS[case].build(model)
    expected = scored(PackedLM, model, method, FEW)
    assert_same(scored(DecodedLM, model, method, FEW, batch_tokens=300), expected)


@pytest.mark.parametrize("case", ["mha", "chai", "spatten", "output_aware_adaptive"])
def test_decoded_scores_do_not_depend_on_the_token_budget(case: str) -> None:
    model = MODELS["llama_gqa"]()
    method = SETTINGS[case].build(model)
    alone = scored(DecodedLM, model, method, FEW, batch_tokens=1)
    assert_same(scored(DecodedLM, model, method, FEW, batch_tokens=100_000), alone)


def test_decoded_mha_equals_stock_lm_eval_also_where_text_is_cut_to_the_models_positions() -> None:
    model = MODELS["opt"]()
    asked = [*FEW, ask("long " * 60, "end of it"), ask("x", "y" * 120)]
    stock = HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=4)
    found = scored(DecodedLM, model, build_method("mha"), asked)
    assert_same(found, stock.loglikelihood(asked, disable_tqdm=True), tolerance=1e-3)


@pytest.mark.parametrize("case", ["mha", "chai", "spatten"])
def test_running_text_of_several_windows_has_the_score_of_packed_rows(case: str) -> None:
    model = MODELS["llama"]()
    method = SETTINGS[case].build(model)
    texts = ["some words, " * repeats for repeats in (1, 7, 15)]
    asked = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    expected = scored(PackedLM, model, method, asked)
    # Sums over up to 180 tokens.
    assert scored(DecodedLM, model, method, asked, batch_tokens=400) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("case", "cache"), [("mha", DynamicCache), ("chai", ClusteredCache)])
def test_a_context_is_prefilled_once_and_after_it_every_pass_feeds_one_token_to_the_cache(
    case: str, cache: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["llama"]()
    method = SETTINGS[case].build(model)
    passes: list[tuple[tuple[int, ...], Any]] = []
    forward = model.forward

    def noting(**given: Any) -> Any:
        out = forward(**given)
        passes.append((tuple(given["input_ids"].shape), given.get("cache")))
        assert type(out.cache) is cache
        return out

    monkeypatch.setattr(model, "forward", noting)
    # One context in two texts, three choices of 4, 2 and 1 tokens; another with two of 3.
    asked = [ask("abcdefgh", choice) for choice in ("ijkl", "mn", "o")] + [ask("pqrst", one) for one in ("uvw", "xyz")]
    scored(DecodedLM, model, method, asked, batch_tokens=1000)
    assert [shape for shape, _ in passes] == [(2, 8), (4, 1), (3, 1), (1, 1)]
    assert passes[0][1] is None
    assert all(type(held) is cache for _, held in passes[1:])


def test_the_plan_shares_contexts_keeps_within_the_budget_and_does_not_depend_on_the_order() -> None:
    lengths = [(9, 4), (9, 1), (9, 7), (30, 2), (5, 1), (5, 1), (5, 1), (3, 60), (200, 3)]
    requests = [
        ScoringRequest(tuple(range(context)), tuple(range(number, number + ending)))
        for number, (context, ending) in enumerate(lengths)
    ]
    plan = decodings(requests, 64)
    assert Counter(number for each in plan for number in each.requests) == Counter(range(len(requests)))
    for each in plan:
        assert len(set(each.contexts)) == len(each.contexts)
        rows = sum(
            max(sum(len(requests[number].continuation) > 1 for number in numbers), 1) for numbers in each.continued
        )
        assert rows == 1 or rows * max(len(requests[number].fed) for number in each.requests) <= 64
        for context, numbers in zip(each.contexts, each.continued, strict=True):
            assert {requests[number].context for number in numbers} == {context}

    def asked(plan: list[Any], requests: list[ScoringRequest]) -> list[list[ScoringRequest]]:
        return [[requests[number] for number in each.requests] for each in plan]

    assert asked(decodings(requests[::-1], 64), requests[::-1]) == asked(plan, requests)


def test_a_decoding_that_goes_on_meets_the_batches_it_began_with_and_so_the_same_bits() -> None:
    model, asked = MODELS["llama"](), FEW
    method, whole, partial = build_method("chai", clusters=COUNTS), Journal(), Journal()

    class Killed(Journal):
        def append_many(self, entries) -> None:  # type: ignore[no-untyped-def]
            if len(partial) > 5:
                raise KeyboardInterrupt
            partial.append_many(entries)

    expected = scored(DecodedLM, model, method, asked, journal=whole)
    with pytest.raises(KeyboardInterrupt):
        scored(DecodedLM, model, method, asked, journal=Killed())
    assert 0 < len(partial) < len(whole)
    assert scored(DecodedLM, model, method, asked, journal=partial) == expected


def test_logits_that_are_not_finite_after_the_context_name_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, method = MODELS["llama"](), build_method("chai", clusters=COUNTS)
    step = decode._Cached.step

    def broken(self: Any, tokens: list[int]) -> None:
        model.base_model.layers[1].mlp.down_proj.weight.data[3, 5] = float("inf")
        step(self, tokens)

    monkeypatch.setattr(decode._Cached, "step", broken)
    with pytest.raises(RunError, match="not finite, first in layer 1 "):
        scored(DecodedLM, model, method, FEW)


@pytest.mark.assets
@pytest.mark.parametrize("name", ["mha", "chai"])
def test_on_real_weights_and_documents_decoded_scores_equal_packed_ones(name: str) -> None:
    model, encode = load_model("smollm2_mha", device="cpu", dtype="float32")
    method = build_method(name, **({"clusters": "smollm2_mha-balanced"} if name == "chai" else {}))
    prepared = prepare(load_task("piqa", TaskSettings(source="local")), limit=4, seed=1)
    packed, decoded = (
        score(Runner(model, encode, progress=False), method, prepared, scoring=scoring)
        for scoring in ("packed", "decode")
    )
    assert packed is not None
    assert decoded is not None
    for ours, theirs in zip(decoded.samples["loglikelihoods"], packed.samples["loglikelihoods"], strict=True):
        # float32; a choice of a few dozen tokens sums as many roundings of about 1e-5.
        assert ours == pytest.approx(theirs, abs=3e-4)
    assert decoded.metrics == packed.metrics
