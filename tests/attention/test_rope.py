"""A request's score does not depend on its batch, for any rotary embedding that transformers has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from chai_eval.attention.rope import BY_POSITION, rotary_lengths
from chai_eval.methods import build_method
from chai_eval.models.builtin import byte_tokenizer
from chai_eval.scoring.compare import compare
from chai_eval.scoring.lm import PackedLM
from chai_eval.scoring.runner import Runner

ORIGINAL = 40
ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {
        "short_factor": [1 + 0.3 * i for i in range(8)],
        "long_factor": [4.0 + 3 * i for i in range(8)],
        "original_max_position_embeddings": ORIGINAL,
    },
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
TEXTS = [
    ("Short", " yes"), ("Short", " no"), ("x" * 60, " y"), ("x" * 60, " or something longer"), ("z" * 90, " y"),
    ("Right at the border of what is short", " ab"), ("Right at the border of what is short", " abcdefgh"),
]  # fmt: skip


def tiny(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    # `dynamic` takes the positions themselves for the original length.
    positions = ORIGINAL if kind == "dynamic" else 256
    config = LlamaConfig(
        vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=positions, initializer_range=0.3,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **ROPE[kind]},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def instances() -> list[Instance]:
    return [Instance("loglikelihood", {}, text, number) for number, text in enumerate(TEXTS)]


def test_every_type_is_tried() -> None:
    assert set(ROPE) == {"default", *ROPE_INIT_FUNCTIONS}
    assert set(ROPE) > BY_POSITION


@pytest.mark.parametrize("kind", ROPE)
def test_score_of_a_request_does_not_depend_on_its_batch(kind: str) -> None:
    model, method = tiny(kind), build_method("mha")
    alone = []
    for each in instances():
        lm = HFLM(pretrained=tiny(kind), tokenizer=byte_tokenizer(), batch_size=1, max_length=256)
        alone.append(lm.loglikelihood([each], disable_tqdm=True)[0][0])
    for batch_tokens in (1, 4096):
        with method.applied(model):
            lm = PackedLM(Runner(model, byte_tokenizer(), batch_tokens, progress=False), method)
            lm._max_length = 256
            found = [score for score, _ in lm.loglikelihood(instances())]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_text_that_is_generated_does_not_depend_on_its_batch(kind: str) -> None:
    model, method = tiny(kind), build_method("chai", clusters=[2, 2])
    given = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
    asked = [Instance("generate_until", {}, (text, given), number) for number, (text, _) in enumerate(TEXTS)]
    with method.applied(model):
        alone = []
        for each in asked:
            lm = PackedLM(Runner(model, byte_tokenizer(), 64, progress=False), method)
            lm._max_length = 256
            alone += lm.generate_until([each])
        lm = PackedLM(Runner(model, byte_tokenizer(), 64, progress=False), method)
        lm._max_length = 256
        assert lm.generate_until(asked) == alone


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_closeness_to_plain_attention_does_not_depend_on_the_batch(kind: str) -> None:
    model, method = tiny(kind), build_method("chai", clusters=[2, 2])
    texts = [tuple(range(3, 3 + length)) for length in (20, 35, 60, 60, 90)]
    together = compare(Runner(model, batch_tokens=4096), {"": method}, texts)[""]
    alone = [compare(Runner(model, batch_tokens=4096), {"": method}, [each])[""][0] for each in texts]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_dynamic_base_is_forgotten() -> None:
    model = tiny("dynamic")
    short, long = torch.arange(3, 23)[None], torch.arange(3, 83)[None]
    with torch.no_grad():
        expected = model(input_ids=long[:, :50]).logits
        model(input_ids=long)
        assert not torch.allclose(model(input_ids=long[:, :50]).logits, expected, atol=1e-3)
        with build_method("chai", clusters=[4, 4]).applied(model):
            model(input_ids=short)
            model(input_ids=long)
            found = model(input_ids=long[:, :50]).logits
        after = model(input_ids=long[:, :50]).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert torch.equal(after, expected)


def test_a_type_that_came_later_shares_passes_among_equal_lengths_only() -> None:
    model = tiny("linear")
    model.base_model.rotary_emb.rope_type = "newer"
    lengths = rotary_lengths(model)
    assert lengths
    assert lengths.alike(7) != lengths.alike(8)
    assert lengths.alike(7) == lengths.alike(7)
