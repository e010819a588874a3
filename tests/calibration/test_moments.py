"""Moments of heads, held against how the log-probability of drawn tokens really changes, and their storage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import Hooks, apply
from chai_eval.attention.shape import attention_shape
from chai_eval.calibrate import RANK_SAVINGS, calibrate
from chai_eval.calibration.moments import HeadMoments, head_moments, head_vectors, pooled_heads
from chai_eval.calibration.sensitivity import with_gradients
from chai_eval.errors import SettingError
from chai_eval.methods import build_method
from chai_eval.methods.moments import GRADIENT, KINDS, OUTPUT, PULL, QUERY, pack, unpack
from chai_eval.models import load_model
from tests.attention.tiny import HEADS, LAYERS, MODELS, requests
from tests.calibration.test_calibrate import settings, text

__all__ = ["text"]

LAYER, STEP = 1, 1e-4


def drawn(likely: Tensor) -> Tensor:
    return likely.argmax(-1)


class Changed(Hooks):
    """Keys but for the first, or values, moved a step along a linear map in one layer."""

    def __init__(self, keys: Tensor | None, values: Tensor | None, step: float) -> None:
        super().__init__()
        self.maps, self.step = (keys, values), step

    def states(self, call, query, key, value):  # type: ignore[no-untyped-def]
        if call.index != LAYER:
            return query, key, value
        moved = [
            each if change is None else each + self.step * each @ change.transpose(-1, -2)
            for each, change in zip((key, value), self.maps, strict=True)
        ]
        return query, torch.cat((key[:, :, :1], moved[0][:, :, 1:]), 2), moved[1]


def slope(model: PreTrainedModel, ids: Tensor, tokens: Tensor, **maps: Tensor | None) -> float:
    """How fast the log-probability of tokens grows along a change, by central differences."""
    found = []
    for step in (STEP, -STEP):
        with apply(model, Changed(maps.get("keys"), maps.get("values"), step)), torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        found.append(float(logits.log_softmax(-1).gather(1, tokens[:, None]).sum()))
    return (found[0] - found[1]) / (2 * STEP)


@pytest.mark.parametrize("name", MODELS)
def test_vectors_say_how_predictions_change_as_keys_and_values_do(name: str) -> None:
    model, (ids,) = MODELS[name]().double(), requests([14])
    with torch.no_grad():
        tokens = model(input_ids=ids[None], use_cache=False).logits[0].argmax(-1)
    vectors = head_vectors(*with_gradients(model, ids, drawn)[LAYER])
    kv_heads, head_dim = attention_shape(model).kv_heads, 8
    maps = torch.randn(kv_heads, head_dim, head_dim, generator=torch.Generator().manual_seed(3)).double()
    of_head = maps.repeat_interleave(HEADS // kv_heads, 0)
    for which, asks, asked in (("keys", QUERY, PULL), ("values", GRADIENT, OUTPUT)):
        expected = torch.einsum("htd,hde,hte->", vectors[asks].double(), of_head, vectors[asked].double()).detach()
        assert slope(model, ids, tokens, **{which: maps}) == pytest.approx(float(expected), rel=1e-2, abs=1e-3)


def test_moments_are_sums_of_squares_over_samples_and_pooled_ones_sum_what_readers_ask() -> None:
    model, samples = MODELS["llama_gqa"](), requests([9, 14])
    summed, by_hand = HeadMoments(), torch.zeros(LAYERS, HEADS, 8, 8, dtype=torch.float64)
    for sample in samples:
        layers = with_gradients(model, sample, drawn)
        summed.add([head_moments(*each) for each in layers], len(sample))
        for at, each in enumerate(layers):
            pull = head_vectors(*each)[PULL].double()
            by_hand[at] += torch.einsum("htd,hte->hde", pull, pull)
    assert summed.tokens == 23
    torch.testing.assert_close(summed.sums[PULL], by_hand)
    asking, asked = pooled_heads(summed.sums[QUERY], by_hand, 2)
    torch.testing.assert_close(asked[:, 1], by_hand[:, 4:].sum(1))
    traces = by_hand.diagonal(dim1=-2, dim2=-1).sum(-1)[:, 4:]
    weighed = (summed.sums[QUERY][:, 4:] * (traces / traces.sum(1, keepdim=True))[..., None, None]).sum(1)
    torch.testing.assert_close(asking[:, 1], weighed)


def test_stored_moments_have_no_negative_eigenvalue_and_are_near_what_was_stored() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(5, 16, 6, generator=generator, dtype=torch.float64)  # singular: 6 vectors in 16 dimensions
    moments = torch.cat((vectors @ vectors.transpose(-1, -2), torch.zeros(1, 16, 16, dtype=torch.float64)))
    factors, scale = pack(moments)
    assert factors.dtype == torch.float16
    found = unpack(factors, scale)
    assert float(torch.linalg.eigvalsh(found).min()) >= 0
    torch.testing.assert_close(found, moments, atol=2e-3 * float(moments.abs().max()), rtol=0)


def test_calibration_writes_moments_that_kv_rank_reads_and_says_what_it_costs(text: str, tmp_path: Path) -> None:
    folder = calibrate(settings(text, tmp_path / "m", "only=moments"), "command")
    assert sorted(path.name for path in folder.glob("*.*")) == [
        "calibration.lock", "moments.json", "moments.safetensors",
    ]  # fmt: skip
    described = json.loads((folder / "moments.json").read_text())
    assert [each["kv_saving"] for each in described["kv_rank"]] == list(RANK_SAVINGS)
    costs = [each["divergence"] for each in described["kv_rank"]]
    assert costs == sorted(costs)
    assert costs[0] > 0
    assert described["provenance"]["samples"] == 2
    both = calibrate(settings(text, tmp_path / "b"), "command")
    assert (both / "moments.safetensors").read_bytes() == (folder / "moments.safetensors").read_bytes()
    model, _ = load_model("tiny_llama_random", device="cpu")
    saved = build_method("kv_rank", moments=str(folder), saving=0.3)
    head_dim = attention_shape(model).head_dim
    numbers = sum(sum(layer.numbers(head_dim)) for layer in saved.footprint(model) or ())
    assert numbers <= 0.7 * 2 * attention_shape(model).layers * attention_shape(model).kv_heads * head_dim
    other, _ = load_model("tiny_opt_random", device="cpu")
    with pytest.raises(SettingError, match=r"^method.moments: calibration .* was made for tiny_llama_random"):
        saved.check_settings(other)


def test_a_calibration_of_clusters_alone_is_refused_in_one_line_that_says_how_to_make_moments(
    text: str, tmp_path: Path
) -> None:
    folder = calibrate(settings(text, tmp_path / "c", "only=clusters"), "command")
    with pytest.raises(SettingError) as raised:
        build_method("kv_rank", moments=str(folder)).settings()
    assert str(raised.value).startswith(f"method.moments: no moments in a calibration '{folder}'; allowed: ")
    assert "python -m chai_eval calibrate model=" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_kinds_are_named_once() -> None:
    assert KINDS == (QUERY, PULL, GRADIENT, OUTPUT)
