"""CHAI whose heads change over: what it remembers besides, whom it moves, and what it can't stand beside."""

from __future__ import annotations

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from chai_eval.errors import SettingError
from chai_eval.measure.memory import cache_size
from chai_eval.methods import build_method
from tests.attention.tiny import HEADS, MODELS, VOCABULARY, masked_logits, padded, requests

COUNTS = [HEADS, 3, 2]
GUARD = {"clusters": COUNTS, "recluster_every": 10}


@pytest.mark.parametrize(("method", "name"), [("chai", "llama"), ("chai", "llama_gqa"), ("v_reuse", "llama")])
def test_the_footprint_counts_what_is_remembered_besides_and_keys_stay_few(method: str, name: str) -> None:
    model, ids = MODELS[name](), torch.stack(requests([48]))
    caches = {}
    for every in (0, 10):
        own = build_method(method, clusters=COUNTS, recluster_every=every)
        with own.applied(model), torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).cache
        caches[every] = size = cache_size(cache, model, 48, own.footprint(model))
        assert size.allocated_bytes == size.formula_bytes
    kv_heads, head_dim, clustered = (2 if name == "llama_gqa" else HEADS), 64 // HEADS, 2
    numbers = head_dim * (5 * HEADS + (5 + 5) * kv_heads)  # five queries, and keys of the probe and of five tokens
    assert caches[10].formula_bytes - caches[0].formula_bytes == clustered * numbers * 4


def test_no_head_moves_where_none_is_further_than_the_threshold() -> None:
    model, (ids, mask) = MODELS["llama"](), padded(requests([40, 23]), "left")
    logits = {}
    for name, own in {"off": {"recluster_every": 0}, "far": {"drift_threshold": 2.0}, "all": {}}.items():
        with build_method("chai", **(GUARD | own)).applied(model):
            logits[name] = torch.cat(masked_logits(model, ids, mask))
    torch.testing.assert_close(logits["off"], logits["far"], atol=1e-4, rtol=0)
    assert not torch.allclose(logits["off"], logits["all"], atol=1e-2)


def test_settings_that_change_nothing_are_in_no_key() -> None:
    assert "recluster_every" not in build_method("chai", clusters=COUNTS, drift_threshold=0.5).settings()
    assert build_method("chai", **GUARD).settings()["drift_threshold"] == 0


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"recluster_every": 9}, "method.recluster_every: 9 given with probe_tokens=5; allowed: 0, or 10 and more"),
        ({"recluster_every": -1}, "method.recluster_every: -1 given; allowed: whole numbers from 0"),
        ({"drift_threshold": 2.5}, "method.drift_threshold: 2.5 given; allowed: numbers from 0 to 2"),
        ({"with": ["quest"]}, "method.with: quest and chai given (chai with recluster_every takes branches apart"),
    ],
)
def test_what_does_not_go_is_refused_with_the_reason(settings: dict[str, object], line: str) -> None:
    with pytest.raises(SettingError) as raised:
        build_method("chai", **(GUARD | settings)).check_settings(MODELS["llama"]())
    assert str(raised.value).startswith(line)


def test_layers_with_a_window_are_refused() -> None:
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=6,
    )  # fmt: skip
    with pytest.raises(SettingError, match=r"^method.recluster_every: 10 given for a model that looks back through"):
        build_method("chai", clusters=[2, 2], recluster_every=10).check(MistralForCausalLM(config).eval())
