from __future__ import annotations

import pytest
import torch
from transformers import (
    AttentionInterface,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface

from chai_eval.attention import Rows, UnsupportedModel, take_over
from chai_eval.attention.agreement import own_scores
from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from tests.attention.tiny import MODELS, VOCABULARY, masked_logits, padded, requests


def state(model: torch.nn.Module) -> tuple[object, ...]:
    return (
        model.config._attn_implementation,
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        [sorted(vars(module)) for module in model.modules()],
        sorted(AttentionInterface._global_mapping),
        sorted(AttentionMaskInterface._global_mapping),
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["mha", "chai"])
def test_a_method_leaves_no_trace(name: str, method: str) -> None:
    model = MODELS[name]()
    ids, mask = padded(requests([9, 14]), "left")
    before, as_it_was = masked_logits(model, ids, mask), state(model)
    settings = {"clusters": [2, 2, 2]} if method == "chai" else {}
    with build_method(method, **settings).applied(model):
        masked_logits(model, ids, mask)
    after = masked_logits(model, ids, mask)
    assert state(model) == as_it_was
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_an_exception_inside_leaves_no_trace_either(name: str) -> None:
    model = MODELS[name]()
    ids, mask = padded(requests([9, 14]), "left")
    before, as_it_was = masked_logits(model, ids, mask), state(model)

    def fails(*args: object) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), take_over(model, fails):
        model(input_ids=ids)
    with pytest.raises(KeyError), build_method("chai", clusters=[2, 2, 2]).applied(model):
        raise KeyError
    after = masked_logits(model, ids, mask)
    assert state(model) == as_it_was
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_a_pass_that_fails_does_not_disturb_the_next_one() -> None:
    model = MODELS["llama"]()
    ids, mask = padded(requests([9, 14]), "left")
    with build_method("chai", clusters=[2, 2, 2]).applied(model):
        expected = masked_logits(model, ids, mask)
        with pytest.raises(IndexError):
            model(input_ids=ids + VOCABULARY)
        found = masked_logits(model, ids, mask)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_mha_is_the_stock_model_to_the_bit(name: str) -> None:
    model = MODELS[name]()
    ids, mask = padded(requests([9, 14, 2]), "left")
    expected = masked_logits(model, ids, mask)
    with build_method("mha").applied(model):
        found = masked_logits(model, ids, mask)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_mha_in_packed_rows_equals_the_stock_model_on_each_request(name: str) -> None:
    model = MODELS[name]()
    tokens = requests([9, 14, 1, 30])
    rows = Rows.packed([len(each) for each in tokens], [[]] * 4)
    with torch.no_grad():
        expected = torch.cat([model(input_ids=each[None]).logits[0] for each in tokens])
        with build_method("mha").applied(model):
            found = model(input_ids=torch.cat(tokens)[None], rows=rows).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_sliding_window_is_kept() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, sliding_window=6, initializer_range=0.4,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    ids, mask = padded(requests([20, 8]), "left")
    expected = masked_logits(model, ids, mask)
    with take_over(model, own_scores):
        found = masked_logits(model, ids, mask)
    with build_method("chai", clusters=[8, 8]).applied(model):
        clustered = masked_logits(model, ids, mask)
    for ours, also_ours, theirs in zip(found, clustered, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        torch.testing.assert_close(also_ours, theirs, atol=1e-4, rtol=0)


def test_a_model_with_its_own_attention_code_is_refused_by_name() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.raises(SettingError, match="bloom.*AttentionInterface"):
        build_method("mha").check(model)


def test_a_model_that_caps_its_scores_is_refused_by_name() -> None:
    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, attn_logit_softcapping=5.0, sliding_window=16,
    )  # fmt: skip
    with pytest.raises(SettingError, match="gemma2.*soft-capped"):
        build_method("chai", clusters=[2, 2]).check(Gemma2ForCausalLM(config).eval())


def test_a_second_method_on_the_same_model_is_refused() -> None:
    model = MODELS["llama"]()
    with build_method("mha").applied(model), pytest.raises(ValueError, match="another method is applied"):
        with build_method("chai", clusters=[2, 2, 2]).applied(model):
            pass


def test_masks_that_are_not_of_batch_and_tokens_are_refused() -> None:
    model = MODELS["llama"]()
    ids, _ = padded(requests([9, 14]), "left")
    with (
        build_method("chai", clusters=[2, 2, 2]).applied(model),
        pytest.raises(ValueError, match="attention_mask"),
    ):
        model(input_ids=ids, attention_mask=torch.ones(2, 1, 14, 14))


def test_unsupported_is_raised_where_layers_go_round_the_interface() -> None:
    model = MODELS["llama"]()
    model.base_model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    ids, _ = padded(requests([9]), "left")
    with take_over(model, own_scores), pytest.raises(UnsupportedModel, match=r"layers \[1\]"):
        model(input_ids=ids)


def test_a_mask_given_by_position_counts() -> None:
    model = MODELS["llama"]()
    ids, mask = padded(requests([9, 14]), "left")
    with build_method("chai", clusters=[2, 2, 2]).applied(model), torch.no_grad():
        by_name = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        by_position = model.base_model(ids, mask).last_hidden_state
    assert torch.equal(by_name, by_position)


def test_a_probe_wider_than_the_sliding_window_is_refused() -> None:
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, sliding_window=3,
    )  # fmt: skip
    with pytest.raises(SettingError, match="method.probe_tokens: 5 given; allowed: 1 to 3, the model's sliding window"):
        build_method("chai", clusters=[2, 2]).check(MistralForCausalLM(config).eval())
