"""Texts that are generated together are those that each prompt gives alone, under every method."""

from __future__ import annotations

import random
import string
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from chai_eval.errors import RunError
from chai_eval.scoring.lm import PackedLM
from chai_eval.scoring.runner import Runner
from chai_eval.store.journal import Journal
from tests.attention.tiny import MODELS
from tests.methods.cases import CASES
from tests.scoring.tiny_text import tokenizer

ROOM = 12


def ask(prompt: str, **settings: Any) -> Instance:
    return Instance("generate_until", {}, (prompt, {"until": [":"], "max_gen_toks": ROOM, **settings}), 0)


def questions(count: int = 11, **settings: Any) -> list[Instance]:
    """Prompts of all lengths, among them shorter than a probe; more than fit in a batch."""
    draw = random.Random(3)
    lengths = [1, 2, 4, 5, 6, *range(7, 40, 3)][:count]
    return [ask("".join(draw.choice(string.ascii_lowercase) for _ in range(length)), **settings) for length in lengths]


def ours(model: Any, asked: list[Instance], method: str = "mha", **rest: Any) -> list[str]:
    chosen = CASES[method].build(model)
    with chosen.applied(model):
        encode = rest.pop("tokenizer", None) or tokenizer()
        return PackedLM(Runner(model, encode, 64, progress=False), chosen, **rest).generate_until(asked)


def one_by_one(model: Any, asked: list[Instance], encode: Any = None) -> list[str]:
    """Stock lm-eval, which takes each prompt alone."""
    return HFLM(pretrained=model, tokenizer=encode or tokenizer(), batch_size=1).generate_until(asked, True)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_texts_under_mha_equal_those_of_stock_lm_eval_one_by_one(name: str) -> None:
    model = MODELS[name]()
    # Stops that are letters, a special token, several letters, none; greedy in each of lm-eval's ways.
    asked = [
        *questions(),
        ask("abc", until=["<unk>", "ab"]),
        ask("abcd", until=[]),
        ask("q", until="a", do_sample=False, temperature=0.0),
        ask("qq", max_gen_toks=1),
        ask("qr", max_gen_toks=30),
    ]
    expected = one_by_one(model, asked)
    assert ours(model, asked) == expected
    assert len(set(expected)) > 10


@pytest.mark.parametrize("method", CASES)
def test_texts_equal_generate_under_the_method_one_prompt_at_a_time(method: str) -> None:
    model, asked, encode = CASES[method].model("llama"), questions(), tokenizer()
    expected = []
    with CASES[method].build(model).applied(model):
        for each in asked:
            ids = torch.tensor([encode(each.args[0])["input_ids"]])
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=ROOM, do_sample=False, pad_token_id=0
            )
            tokens = made[0, ids.shape[1] :].tolist()
            # lm-eval takes the tokenizer's end for one, which this model's own configuration doesn't.
            ended = tokens.index(encode.eos_token_id) if encode.eos_token_id in tokens else len(tokens)
            expected.append(encode.decode(tokens[:ended], skip_special_tokens=True).split(":")[0])
    assert ours(model, asked, method) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 1},
        {"max_length": 45},
        {"min_length": 13},
        {"num_beams": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("whose", ["request", "model"])
def test_settings_that_count_padding_give_what_they_give_alone(whose: str, settings: dict[str, Any]) -> None:
    model, asked = MODELS["llama"](), questions(7, **settings if whose == "request" else {})
    if whose == "model" and "max_length" not in settings:
        model.generation_config.update(**settings)
    assert ours(model, asked) == one_by_one(model, asked)


def test_a_long_prompt_loses_its_start_and_not_the_question_at_its_end() -> None:
    model, encode = MODELS["llama"](), tokenizer()
    encode.model_max_length = 100
    asked = [ask("long ago " * 30 + ending) for ending in ("who", "and when", "why")]
    found = ours(model, asked, tokenizer=encode)
    assert found == one_by_one(model, asked, encode)
    assert len(set(found)) == 3


def test_more_tokens_than_the_model_has_positions_are_refused_in_one_line() -> None:
    with pytest.raises(RunError, match=r"generates up to 128 tokens \(max_gen_toks\), and the model has 128 positions"):
        ours(MODELS["llama"](), questions(2, max_gen_toks=128))


def drawn(count: int = 6) -> list[Instance]:
    return questions(count, do_sample=True, temperature=1.5)


def test_a_text_drawn_at_random_depends_on_the_seed_and_neither_on_its_batch_nor_on_the_state_of_the_generator() -> (
    None
):
    model, asked = MODELS["llama"](), drawn()
    together = ours(model, asked, "chai", seed=5)
    torch.manual_seed(99)
    assert [ours(model, [each], "chai", seed=5)[0] for each in asked] == together
    assert ours(model, asked, "chai", seed=6) != together


def test_several_texts_drawn_from_one_prompt_differ_and_a_run_that_goes_on_draws_the_same() -> None:
    model, asked = MODELS["llama"](), [drawn(6)[-1]] * 4
    whole, half = Journal(), Journal()
    expected = ours(model, asked, journal=whole)
    assert len(set(expected)) == 4
    half.append_many(list(whole.items())[:2])
    assert ours(model, asked, journal=half) == expected
