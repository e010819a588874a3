"""Projecting representatives only gives what projecting every head gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from chai_eval.methods import build_method
from tests.attention.tiny import MODELS, VOCABULARY, chai_loop, looped_logits, masked_logits, padded, requests

COUNTS = [8, 3, 1]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.4,
}


def mistral() -> PreTrainedModel:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=30)).eval()


def qwen() -> PreTrainedModel:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero as built
            torch.nn.init.normal_(parameter, std=0.4)
    return model


NARROW: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: MODELS[name] for name in ("llama", "llama_gqa", "opt")},
    "mistral": mistral,
    "qwen": qwen,
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "llama_gqa", "opt"])
def test_two_steps_equal_loops_over_requests_and_heads(name: str, side: str) -> None:
    model, tokens = NARROW[name](), requests([6, 12, 40, 25])
    expected = looped_logits(model, tokens, chai_loop(COUNTS))
    with build_method("chai", clusters=COUNTS, prefill="two_step").applied(model) as handle:
        found = masked_logits(model, *padded(tokens, side))
        assert handle.paths == {"two_step": 2}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["chai", "v_reuse"])
@pytest.mark.parametrize("name", NARROW)
def test_two_steps_and_narrow_decoding_equal_the_general_path(name: str, method: str) -> None:
    model, tokens, after = NARROW[name](), requests([70, 90, 81]), torch.stack(requests([9] * 3, seed=1))
    ids, mask = padded(tokens, "left")
    logits = {}
    for prefill in ("two_step", "one_pass"):
        with build_method(method, clusters=COUNTS, prefill=prefill).applied(model), torch.no_grad():
            whole = torch.cat((ids, after), 1)
            seen = torch.cat((mask, torch.ones_like(after)), 1)
            logits[prefill] = model(input_ids=whole, attention_mask=seen).logits[:, -9:]
            cache, steps = model(input_ids=ids, attention_mask=mask).cache, []
            for column in range(9):
                seen = torch.cat((mask, torch.ones_like(after[:, : column + 1])), 1)
                new = after[:, column : column + 1]
                steps.append(
                    model(
                        input_ids=new,
                        attention_mask=seen,
                        position_ids=seen.shape[1] - 1 + torch.zeros_like(new),
                        cache=cache,
                    ).logits
                )
            logits[prefill + " token by token"] = torch.cat(steps, 1)
    if "opt" in name:  # its positions count real tokens, the loop above counts padding
        logits = {way: found for way, found in logits.items() if "token" not in way}
    for found in logits.values():
        torch.testing.assert_close(found, logits["one_pass"], atol=1e-3, rtol=0)


def test_auto_takes_two_steps_for_one_long_request_and_one_pass_for_many_or_short_ones() -> None:
    model = MODELS["llama"]()
    with build_method("chai", clusters=COUNTS).applied(model) as handle, torch.no_grad():
        model(input_ids=torch.stack(requests([100])), use_cache=False)
        assert dict(handle.paths) == {"two_step": 2}
        model(input_ids=torch.stack(requests([100, 100])), use_cache=False)
        model(input_ids=torch.stack(requests([20])), use_cache=False)
        assert dict(handle.paths) == {"two_step": 2, "whole": 4}


def test_other_architectures_and_adapted_projections_take_the_general_path() -> None:
    class Adapted(torch.nn.Linear):
        pass

    adapted = MODELS["llama"]()
    for layer in adapted.base_model.layers:
        layer.self_attn.q_proj.__class__ = Adapted
    for model in (MODELS["neox"](), adapted):
        with build_method("chai", clusters=COUNTS, prefill="two_step").applied(model) as handle, torch.no_grad():
            model(input_ids=torch.stack(requests([100])), use_cache=False)
            assert not handle.paths


def test_a_prompt_no_longer_than_the_probe_is_projected_whole() -> None:
    model = MODELS["llama"]()
    with build_method("chai", clusters=COUNTS, prefill="two_step").applied(model) as handle, torch.no_grad():
        model(input_ids=torch.stack(requests([5])), use_cache=False)
        assert dict(handle.paths) == {"whole": 2}
