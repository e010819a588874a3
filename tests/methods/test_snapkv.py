"""Tokens that SnapKV drops are gone from the cache, of every row when its own time comes."""

from __future__ import annotations

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks, Source
from chai_eval.errors import SettingError
from chai_eval.measure.memory import cache_size
from chai_eval.methods import Method, build_method
from chai_eval.methods.composed import ComposedMethod
from chai_eval.methods.snapkv import TOKENS, VOTES, SnapKV
from tests.attention.tiny import MODELS, VOCABULARY, padded, requests

METHOD = SnapKV(keep=0.4, every=8, window=3, kernel=3)


def test_each_row_holds_the_tokens_that_its_length_says_however_they_came() -> None:
    model, lengths = MODELS["llama_gqa"](), [30, 2, 8, 15]
    ids, mask = padded(requests(lengths), "left")
    with METHOD.applied(model), torch.no_grad():
        at_once = model(input_ids=ids, attention_mask=mask, use_cache=True).cache
        cache = None
        for stop in range(1, ids.shape[1] + 1):
            one = {"input_ids": ids[:, stop - 1 : stop], "attention_mask": mask[:, :stop]}
            cache = model(**one, cache=cache, use_cache=True).cache
    held = [METHOD.held(length) for length in lengths]
    # ⌈0.4 (24 − 3)⌉ + 3 and the six since; nothing yet; ⌈0.4 · 5⌉ + 3; the same and the seven since.
    assert held == [18, 2, 5, 12]
    for each in (at_once, cache):
        for layer in each.layers:
            assert layer.lengths.tolist() == held
            assert layer.state[TOKENS].tolist() == lengths
    for here, there in zip(at_once.layers, cache.layers, strict=True):
        for row, count in enumerate(held):
            torch.testing.assert_close(here.keys[row, :, :count], there.keys[row, :, :count], atol=1e-4, rtol=0)


def test_bytes_of_the_cache_are_those_of_the_tokens_held() -> None:
    model = MODELS["llama"]()
    with METHOD.applied(model), torch.no_grad():
        cache = model(input_ids=torch.stack(requests([83, 83])), use_cache=True).cache
    size = cache_size(cache, model, 2 * 83, METHOD.footprint(model))
    assert all(VOTES not in layer.state for layer in cache.layers)
    numbers = [layer.keys.numel() + layer.values.numel() for layer in cache.layers]
    assert size.formula_bytes == size.logical_bytes == sum(numbers) * 4
    assert size.formula_bytes * 83 == size.full_bytes * METHOD.held(83)
    # And of each row how many tokens it has had.
    assert size.allocated_bytes == size.formula_bytes + len(cache.layers) * 2 * 8


def test_a_share_is_held_of_a_long_text() -> None:
    (layer, *_) = METHOD.footprint(MODELS["llama"]())
    assert layer.share_held() == pytest.approx(0.4, rel=1e-6)


def test_beside_a_method_that_changes_nothing_it_saves_what_it_saves_alone() -> None:
    model, own = MODELS["llama"](), {"keep": 0.4, "every": 8, "window": 3}
    both = build_method("mha", **{"with": [{"name": "snapkv", **own}]})
    assert both.footprint(model)[0].share_held(83) == METHOD.held(83) / 83


class _Reading(Method):
    """Every query reads all keys, and says so."""

    name = property(lambda self: "reading")  # type: ignore[assignment]

    def hooks(self, model: PreTrainedModel) -> Hooks:
        class Reading(Hooks):
            def keys(self, call: AttentionCall, source: Source) -> torch.Tensor | None:
                return None

        return Reading()


def test_beside_a_method_that_chooses_among_all_tokens_it_is_refused() -> None:
    line = r"^method.with: reading and snapkv given \(snapkv drops tokens that reading chooses among\); allowed: one"
    with pytest.raises(SettingError, match=line):
        ComposedMethod((METHOD, _Reading())).hooks(MODELS["llama"]())


def test_layers_with_a_window_are_refused() -> None:
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=6,
    )  # fmt: skip
    with pytest.raises(SettingError, match=r"^model: layer 0 looks back through a window, and snapkv"):
        build_method("snapkv").check(MistralForCausalLM(config).eval())
