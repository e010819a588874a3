from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from chai_eval.errors import RunError
from chai_eval.methods import Method, build_method
from chai_eval.scoring.lm import PackedLM
from chai_eval.scoring.ranks import Ranks
from chai_eval.scoring.runner import Runner
from chai_eval.store.journal import Journal
from tests.attention.tiny import MODELS, chai_loop, looped
from tests.scoring.tiny_text import tokenizer

# float32; a continuation of 20 tokens sums 20 roundings of about 1e-6.
TOLERANCE = 1e-4
COUNTS = [8, 3, 1]
METHODS = {"mha": {}, "chai": {"clusters": COUNTS}}


def ask(context: str, continuation: str, kind: str = "loglikelihood") -> Instance:
    return Instance(kind, {}, (context, continuation), 0)


def questions(seed: int = 0) -> list[Instance]:
    """Choices that share contexts, contexts shorter than the probe, one-token choices, choices asked twice."""
    draw = random.Random(seed)
    letters = "abcdefgh ijkl.?"

    def text(length: int) -> str:
        return "".join(draw.choice(letters) for _ in range(length))

    asked = []
    for context_length in (1, 2, 4, 5, 6, 11, 30):
        context = "q" + text(context_length - 1)
        choices = [text(draw.randint(2, 9)) for _ in range(3)]
        asked += [ask(context, choice) for choice in [*choices, "a", "b", choices[0], choices[0] + "c"]]
    draw.shuffle(asked)
    return asked


def packed(model: Any, method: Method, batch_tokens: int = 64, **settings: Any) -> PackedLM:
    ranks = settings.pop("ranks", Ranks())
    return PackedLM(Runner(model, tokenizer(), batch_tokens, ranks, progress=False), method, **settings)


def looped_scores(model: object, asked: list[Instance], method: str) -> list[tuple[float, bool]]:
    """Each request alone, through plain loops over heads."""
    loop = chai_loop(COUNTS if method == "chai" else [8, 8, 8])
    encode = tokenizer()
    scores = []
    with looped(model, loop), torch.no_grad():
        for request in asked:
            context, continuation = (encode(text)["input_ids"] for text in request.args)
            tokens = torch.tensor([context + continuation])
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0, -len(continuation) :]
            chosen = logits.log_softmax(-1)[range(len(continuation)), continuation]
            greedy = logits.argmax(-1).tolist() == continuation
            scores.append((float(chosen.sum()), greedy))
    return scores


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_scores_equal_each_request_alone_in_plain_loops(name: str, method: str) -> None:
    model, asked = MODELS[name](), questions()
    expected = looped_scores(model, asked, method)
    chosen = build_method(method, **METHODS[method])
    with chosen.applied(model):
        found = packed(model, chosen).loglikelihood(asked)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=TOLERANCE)
        assert ours[1] == theirs[1]


@pytest.mark.parametrize("method", METHODS)
def test_score_of_a_request_does_not_depend_on_the_token_budget(method: str) -> None:
    model, asked = MODELS["llama_gqa"](), questions(1)
    chosen = build_method(method, **METHODS[method])
    with chosen.applied(model):
        alone = packed(model, chosen, batch_tokens=1).loglikelihood(asked)
        together = packed(model, chosen, batch_tokens=100_000).loglikelihood(asked)
    for one, other in zip(alone, together, strict=True):
        assert one[0] == pytest.approx(other[0], abs=TOLERANCE)


def test_mha_scores_equal_those_of_stock_lm_eval_also_where_text_is_cut_to_the_models_positions() -> None:
    model = MODELS["opt"]()
    asked = [*questions(2), ask("long " * 60, "end of it"), ask("x", "y" * 120)]
    stock = HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=4)
    chosen = build_method("mha")
    with chosen.applied(model):
        found = packed(model, chosen).loglikelihood(asked)
    for ours, theirs in zip(found, stock.loglikelihood(asked, disable_tqdm=True), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
        assert ours[1] == theirs[1]


def test_rolling_scores_equal_those_of_stock_lm_eval() -> None:
    model = MODELS["llama"]()
    asked = [Instance("loglikelihood_rolling", {}, ("some words, " * repeats,), 0) for repeats in (1, 7, 30)]
    stock = HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=2)
    chosen = build_method("mha")
    with chosen.applied(model):
        found = packed(model, chosen).loglikelihood_rolling(asked, disable_tqdm=True)
    assert found == pytest.approx(stock.loglikelihood_rolling(asked, disable_tqdm=True), abs=1e-2)


def test_requests_in_the_journal_are_not_scored_again() -> None:
    model, asked = MODELS["llama"](), questions(3)
    chosen, journal = build_method("mha"), Journal()
    with chosen.applied(model):
        first = packed(model, chosen, journal=journal).loglikelihood(asked)
        model.forward = None  # would fail if called
        again = packed(model, chosen, journal=journal).loglikelihood(asked)
    assert first == again


def test_a_run_that_goes_on_meets_the_batches_it_began_with_and_so_the_same_bits() -> None:
    model, asked = MODELS["llama"](), questions(4)
    chosen, whole, partial = build_method("chai", clusters=COUNTS), Journal(), Journal()

    class Killed(Journal):
        def append_many(self, entries) -> None:  # type: ignore[no-untyped-def]
            if len(partial) > 10:
                raise KeyboardInterrupt
            partial.append_many(entries)

    with chosen.applied(model):
        expected = packed(model, chosen, journal=whole).loglikelihood(asked)
        with pytest.raises(KeyboardInterrupt):
            packed(model, chosen, journal=Killed()).loglikelihood(asked)
        assert 0 < len(partial) < len(whole)
        assert packed(model, chosen, journal=partial).loglikelihood(asked) == expected


@pytest.mark.parametrize("method", METHODS)
def test_generation_equals_greedy_decoding_of_each_prompt_alone_over_its_whole_text(method: str) -> None:
    model, prompts = MODELS["llama"](), ["abc", "a longer prompt, here", "q", "mid size"]
    asked = [Instance("generate_until", {}, (prompt, {"until": ["\n"], "max_gen_toks": 12}), 0) for prompt in prompts]
    chosen = build_method(method, **METHODS[method])
    with chosen.applied(model):
        found = packed(model, chosen).generate_until(asked)
    encode = tokenizer()
    loop = chai_loop(COUNTS if method == "chai" else [8, 8, 8])
    for prompt, ours in zip(prompts, found, strict=True):
        tokens = encode(prompt)["input_ids"]
        start = len(tokens)
        with looped(model, loop), torch.no_grad():
            # lm-eval ends a text at the tokenizer's end, transformers at the model's.
            while len(tokens) < start + 12 and tokens[-1] not in (encode.eos_token_id, model.config.eos_token_id):
                tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        theirs = encode.decode(tokens[start:], skip_special_tokens=True)
        assert ours == theirs.split("\n")[0]


def test_a_static_cache_in_a_models_own_generation_settings_changes_no_text() -> None:
    model, prompts = MODELS["llama"](), ["abc", "a longer prompt, here"]
    asked = [Instance("generate_until", {}, (prompt, {"until": ["\n"], "max_gen_toks": 12}), 0) for prompt in prompts]
    chosen = build_method("chai", clusters=COUNTS)
    with chosen.applied(model):
        expected = packed(model, chosen).generate_until(asked)
        model.generation_config.cache_implementation = "static"
        assert packed(model, chosen).generate_until(asked) == expected


@pytest.mark.parametrize(("where", "said"), [(0, "layer 0"), (2, "layer 2")])
def test_logits_that_are_not_finite_name_the_layer_they_begin_in(where: int, said: str) -> None:
    model, chosen = MODELS["llama"](), build_method("chai", clusters=COUNTS)
    with torch.no_grad():
        model.base_model.layers[where].mlp.down_proj.weight[3, 5] = float("inf")
    with chosen.applied(model), pytest.raises(RunError, match=f"not finite, first in {said} "):
        packed(model, chosen).loglikelihood(questions())
