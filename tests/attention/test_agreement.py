"""Models of many kinds: taken over right, or refused by a line that gives the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_overlay

from chai_eval.attention import Chunk, Rows, take_over
from chai_eval.attention.agreement import check_agreement, longest_window, own_scores
from chai_eval.attention.masks import UnsupportedModel, layer_mask, window_given
from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from tests.attention.tiny import masked_logits, padded, requests

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    default = AutoConfig.for_model(kind)
    known = default.to_dict()
    fields = {name: value for name, value in SMALL.items() if name in known or hasattr(default, name)}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**fields, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


# Windows that attention calls are told of, and those that only the mask holds; by layer.
SOME = ["sliding_attention", "full_attention"] * 2
WINDOWED = {
    "mistral": ({"sliding_window": 24}, [24] * 4),
    "phimoe": ({"sliding_window": 24}, [24] * 4),
    "qwen2_moe": ({"sliding_window": 24, "use_sliding_window": True, "layer_types": SOME}, [24, None] * 2),
    "llama4_text": ({"attention_chunk_size": 24}, [Chunk(24), Chunk(24), Chunk(24), None]),
    "afmoe": ({"sliding_window": 24}, [24, 24, 24, None]),
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_and_chunks_are_those_of_the_stock_model_in_every_mode(kind: str) -> None:
    changes, windows = WINDOWED[kind]
    model = tiny(kind, **changes)
    found = check_agreement(model)
    assert [found[layer] for layer in range(4)] == windows
    tokens = requests([90, 31, 3])
    with torch.no_grad():
        alone = [model(input_ids=each[None]).logits[0] for each in tokens]
        with take_over(model, own_scores):
            left = masked_logits(model, *padded(tokens, "left"))
            rows = Rows.packed([90, 31, 3], [[], [], []])
            packed = model(input_ids=torch.cat(tokens)[None], rows=rows).logits[0].split([90, 31, 3])
    for ours, also_ours, theirs in zip(left, packed, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        torch.testing.assert_close(also_ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", WINDOWED)
def test_clusters_of_single_heads_see_what_the_stock_model_sees(kind: str) -> None:
    changes, _ = WINDOWED[kind]
    model = tiny(kind, **changes)
    tokens = requests([90, 31, 7])
    with torch.no_grad():
        alone = [model(input_ids=each[None]).logits[0] for each in tokens]
    for method, settings in (
        ("chai_static", {"membership": [[0, 1, 2, 3]] * 4}),
        ("spatten", {"token_sparsity": 0, "head_sparsity": 0}),
        ("dejavu", {"sparsity": 0}),
    ):
        with build_method(method, **settings).applied(model):
            for ours, theirs in zip(masked_logits(model, *padded(tokens, "left")), alone, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_the_text_that_is_compared_is_longer_than_every_window_of_the_config() -> None:
    assert longest_window(tiny("mistral", sliding_window=24).config) == 24
    assert longest_window(tiny("llama4_text", attention_chunk_size=40).config) == 40
    # No text within its positions reaches beyond it.
    assert longest_window(tiny("mistral", sliding_window=256).config) == 0


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("doge", {}, "computes with its mask itself"),
        ("diffllama", {}, "attends twice in a pass"),
        ("gemma4_unified_text", {}, "heads of gemma4_unified_text differ from layer to layer"),
        ("gpt_oss", {}, "attention sinks"),
        ("mamba", {"num_heads": 4}, "mamba"),
        ("bert", {"is_decoder": True}, "bert"),
    ],
)
def test_a_model_whose_attention_is_something_else_is_refused_by_the_reason(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingError, match=reason) as refused:
        build_method("chai", clusters=[2] * 4).check(tiny(kind, **changes))
    assert "\n" not in str(refused.value)
    assert "allowed: " in str(refused.value)


def test_masks_that_are_made_before_the_layers_are_called_are_refused() -> None:
    """As Gemma 3 does it around its text model: a mapping of masks, by kind of layer."""
    model, tokens = tiny("llama"), requests([9])[0][None]
    with take_over(model, own_scores), pytest.raises(UnsupportedModel, match="made before its layers are called"):
        model.base_model(input_ids=tokens, attention_mask={"full_attention": None})


def test_layers_that_see_a_part_of_the_pass_are_refused() -> None:
    """Gemma 4 leaves tokens out half way up, once only the last one's logits are asked for."""
    model = tiny("llama")
    model.base_model.layers[2].register_forward_pre_hook(lambda module, args: (args[0][:, -1:], *args[1:]))
    with take_over(model, own_scores), torch.no_grad(), pytest.raises(UnsupportedModel, match="from 1 tokens"):
        rotary = model.base_model.rotary_emb
        rotary.register_forward_hook(lambda module, args, out: tuple(each[:, -1:] for each in out))
        model(input_ids=requests([9])[0][None])


def test_attention_that_drops_what_a_model_adds_is_seen() -> None:
    model = tiny("llama")
    whole = model.base_model.layers[1].self_attn.forward

    def biased(*args: Any, **kwargs: Any) -> Any:
        out, weights = whole(*args, **kwargs)
        shift = 0.1 if model.config._attn_implementation == "sdpa" else 0.0
        return out + shift, weights

    model.base_model.layers[1].self_attn.forward = biased
    with pytest.raises(SettingError, match=r"is more than softmax\(QK\)V"):
        build_method("mha").check(model)


def test_requests_packed_by_their_positions_alone_are_refused() -> None:
    model, tokens = tiny("llama"), requests([9])[0][None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with build_method("chai", clusters=[2] * 4).applied(model), pytest.raises(ValueError, match="position_ids"):
        model(input_ids=tokens, position_ids=positions, use_cache=False)


@pytest.mark.parametrize(
    ("mask_function", "reason"),
    [
        (or_masks(causal_mask_function, causal_mask_function), "or_masks"),
        (and_masks(causal_mask_function, lambda *args: args[2] >= 0), "another kind .*lambda"),
        (sliding_window_overlay(4), "both directions"),
        (and_masks(sliding_window_overlay(4), sliding_window_overlay(8), causal_mask_function), "several windows"),
        (and_masks(sliding_window_overlay(0), causal_mask_function), "window of no tokens"),
    ],
)
def test_a_mask_of_another_kind_is_refused(mask_function: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        window_given("some", layer_mask("some", mask_function, packed=False))


def test_a_mask_that_a_model_computes_with_is_refused_however_it_does() -> None:
    mask: Any = layer_mask("some", causal_mask_function, packed=False)
    for use in (
        lambda: mask[:, :, :4],
        lambda: mask + 1.0,
        lambda: torch.zeros(2) + mask,
        lambda: torch.where(mask, 1.0, 0.0),
        lambda: mask.shape,
        lambda: mask == 0 or ~mask,
        lambda: bool(mask),
    ):
        with pytest.raises(UnsupportedModel, match="computes with its mask itself"):
            use()


@pytest.mark.parametrize("method", ["chai", "output_aware"])
def test_a_probe_wider_than_a_window_is_refused_in_the_layers_that_have_one(method: str) -> None:
    settings: dict[str, Any] = {"clusters": [2] * 4} if method == "chai" else {}
    if method == "output_aware":
        settings = {"membership": [[0, 0, 2, 2]] * 4, "adaptive": True}
    changes = {"sliding_window": 4, "use_sliding_window": True, "layer_types": SOME}
    model, built = tiny("qwen2_moe", **changes), build_method(method, **settings)
    line = "method.probe_tokens: 5 given; allowed: 1 to 4, the model's sliding window"
    with pytest.raises(SettingError, match=line):
        built.check(model)
    with built.applied(model), pytest.raises(UnsupportedModel, match=line):
        model(input_ids=requests([9])[0][None])
    # Released configs have 0 where there is no window, and layers below `max_window_layers` have none.
    for without in ({"sliding_window": 0}, {**changes, "layer_types": ["full_attention"] * 4}):
        built.check(tiny("qwen2_moe", **without))
