"""DejaVu's predictor and its MLP sparsity against loops; the oracle is in `test_against_loops`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from chai_eval.attention import attention_layers
from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.methods.neurons import top_neurons
from tests.attention.tiny import HEADS, MODELS, HeadLoop, looped_logits, masked_logits, padded, requests
from tests.methods.calibrations import random_predictors, write_calibration
from tests.methods.loops import best, every_head
from tests.methods.test_against_loops import assert_same


def predictor_loop(model: PreTrainedModel, weights: dict[str, torch.Tensor], keep: int) -> HeadLoop:
    """Heads by the scores of the previous layer's attention input, token by token."""
    inputs: dict[int, np.ndarray] = {}

    def remember(index: int) -> object:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            inputs[index] = hidden[0].double().numpy()  # type: ignore[index]

        return hook

    for index, module in attention_layers(model).items():
        module.register_forward_pre_hook(remember(index), with_kwargs=True)  # type: ignore[arg-type]

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = every_head(probabilities, values)
        down = weights[f"predictor.{layer}.down"].double().numpy()
        up = weights[f"predictor.{layer}.up"].double().numpy()
        for token, hidden in enumerate(inputs[max(layer - 1, 0)]):
            score = up @ (down @ hidden)
            out[np.argsort(-score)[keep:], token] = 0
        return out

    return layer_output


@pytest.mark.parametrize("name", MODELS)
def test_predicted_heads_equal_loops_over_tokens(name: str, tmp_path: Path) -> None:
    model, weights = MODELS[name](), random_predictors()
    folder = write_calibration(tmp_path / "tiny", model, weights)
    tokens = requests([3, 17, 9, 31, 6], seed=4)
    expected = looped_logits(MODELS[name](), tokens, lambda *args: every_head(args[1], args[3]))
    other = MODELS[name]()
    sparse = looped_logits(other, tokens, predictor_loop(other, weights, keep=5))
    assert (sparse[1] - expected[1]).abs().max() > 0.1
    with build_method("dejavu", sparsity=0.4, selector="predictor", predictor=str(folder)).applied(model):
        assert_same(masked_logits(model, *padded(tokens, "left")), sparse)
        assert_same(masked_logits(model, *padded(tokens, "right")), sparse)
    assert_same(masked_logits(model, *padded(tokens, "right")), expected)  # nothing stays behind


@pytest.mark.parametrize("name", MODELS)
def test_mlp_sparsity_keeps_the_top_neurons_of_every_token(name: str) -> None:
    model, other = MODELS[name](), MODELS[name]()
    names = {"opt": "fc2", "neox": "dense_4h_to_h"}

    def loop_over_tokens(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        flat = args[0].clone().flatten(0, -2)
        for token in range(len(flat)):
            kept = best(flat[token].abs().double().detach().numpy(), 24)
            dropped = [neuron for neuron in range(flat.shape[1]) if neuron not in kept]
            flat[token, dropped] = 0
        return (flat.view_as(args[0]),)

    for path, module in other.named_modules():
        if path.endswith(names.get(name, "down_proj")):
            module.register_forward_pre_hook(loop_over_tokens)
    tokens = requests([3, 17, 9])
    expected = [other(input_ids=each[None]).logits[0].detach() for each in tokens]
    with build_method("dejavu", sparsity=0, mlp_sparsity=0.75).applied(model):
        assert_same(masked_logits(model, *padded(tokens, "left")), expected)
        assert_same(masked_logits(model, *padded(tokens, "right")), expected)


def test_hooks_are_gone_after_an_exception(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    folder = write_calibration(tmp_path, model, random_predictors())
    method = build_method("dejavu", selector="predictor", predictor=str(folder), mlp_sparsity=0.5)
    with pytest.raises(KeyError), method.applied(model):
        raise KeyError
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_mlp_sparsity_refuses_a_mixture_of_experts() -> None:
    config = MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    with pytest.raises(SettingError, match=r"method.mlp_sparsity: layer 0 of mixtral has . MLPs"):
        with top_neurons(model, 0.5):
            pass
