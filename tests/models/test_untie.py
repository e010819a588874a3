"""The MHA twin of a GQA model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedModel, Qwen2Config

from chai_eval.errors import SettingError
from chai_eval.models import load_model, untie


def gqa_models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    qwen = Qwen2Config(
        vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    with_bias = AutoModelForCausalLM.from_config(qwen).eval()
    for layer in with_bias.model.layers:
        layer.self_attn.k_proj.bias.data.normal_()
        layer.self_attn.v_proj.bias.data.normal_()
    llama, _ = load_model("tiny_llama_random", device="cpu", config={"num_key_value_heads": 4})
    return {"llama": llama, "qwen2": with_bias}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_twin_has_a_key_value_head_per_query_head(family: str) -> None:
    twin = untie(gqa_models()[family])
    attention = twin.model.layers[0].self_attn
    assert attention.k_proj.out_features == attention.q_proj.out_features
    assert twin.config.num_key_value_heads == twin.config.num_attention_heads
    tokens = torch.arange(3, 13)[None]
    cache = twin(tokens, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[1] == twin.config.num_attention_heads


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_twin_saved_and_loaded_is_an_mha_model_with_the_same_logits(family: str, tmp_path: Path) -> None:
    model = gqa_models()[family]
    tokens = torch.randint(3, 288, (2, 17), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).logits
    untie(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.num_key_value_heads == 8
    # Logits are of order 1 to 10; a sum of 64 products in another order moves them by some 1e-6 of that.
    torch.testing.assert_close(loaded(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_an_mha_model_is_left_as_it_is() -> None:
    model, _ = load_model("tiny_opt_random", device="cpu")
    before = copy.deepcopy(model.state_dict())
    assert all(torch.equal(weight, before[key]) for key, weight in untie(model).state_dict().items())


def test_a_model_with_fused_projections_is_refused() -> None:
    config = GPTNeoXConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(SettingError, match=r"^model\.untie: a gpt_neox model has no separate K and V projections"):
        untie(AutoModelForCausalLM.from_config(config))


@pytest.mark.assets
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_smollm2_and_its_twin_agree_to_the_last_bit(dtype: str, attention: str) -> None:
    gqa, _ = load_model("smollm2", device="cpu", dtype=dtype)
    twin, _ = load_model("smollm2_mha", device="cpu", dtype=dtype)
    assert (gqa.config.num_key_value_heads, twin.config.num_key_value_heads) == (3, 9)
    for model in (gqa, twin):
        model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for shape in [(1, 1), (1, 2), (1, 37), (2, 1), (3, 20), (1, 150)]:
            tokens = torch.randint(3, 49152, shape, generator=generator)
            mask = torch.ones_like(tokens)
            mask[1:, : shape[1] // 2] = 0
            assert torch.equal(gqa(tokens, attention_mask=mask).logits, twin(tokens, attention_mask=mask).logits)
        generated = [model.generate(torch.tensor([[504]]), max_new_tokens=8, do_sample=False) for model in (gqa, twin)]
    assert torch.equal(*generated)
