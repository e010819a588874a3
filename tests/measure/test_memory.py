"""Bytes of the cache against the formula, and peak memory of a fresh process."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from chai_eval.measure.contenders import Contender, contender
from chai_eval.measure.fresh import fresh_memory
from chai_eval.measure.memory import CacheSize, Memory, measure_memory, weight_bytes
from chai_eval.measure.room import OutOfMemory, attempt, free_bytes, is_out_of_memory
from chai_eval.measure_settings import Point
from chai_eval.methods import build_method
from chai_eval.methods.clusters import preset_runs
from chai_eval.models import model_settings
from chai_eval.resources import paper_dir

from ..attention.tiny import HEADS, LAYERS, MODELS, llama

HEAD_DIM = 8
CHAI = {"clusters": [[8, 1], [3, 2]]}


def chai(**changes: Any) -> Contender:
    return contender(build_method("chai", **(CHAI | changes)))


def prefill_cache(model: PreTrainedModel, each: Contender, point: Point) -> CacheSize:
    return measure_memory(model, each, point, 0, None).prefill.cache


@pytest.mark.parametrize("name", ["llama", "opt", "neox"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_cache_after_the_probe_is_within_one_per_cent_of_the_formula(name: str, batch: int) -> None:
    length = 100
    found = prefill_cache(MODELS[name](), chai(), Point(length, batch, 1))
    expected = sum(length * (HEADS + clusters) * HEAD_DIM * 4 * batch for clusters in (8, 3, 3))
    assert found.kind == "clustered"
    assert found.formula_bytes == found.logical_bytes == expected
    assert abs(found.allocated_bytes / expected - 1) < 0.01
    assert found.full_bytes == 2 * LAYERS * length * HEADS * HEAD_DIM * 4 * batch


def test_under_grouped_query_attention_distinct_key_heads_are_kept() -> None:
    found = prefill_cache(MODELS["llama_gqa"](), chai(clusters=[[8, 1], [1, 2]]), Point(100, 1, 1))
    assert found.formula_bytes == 100 * HEAD_DIM * 4 * ((2 + 2) + 2 * (2 + 1))
    assert found.allocated_bytes == found.formula_bytes


def test_members_that_share_values_keep_as_few_of_them() -> None:
    method = contender(build_method("v_reuse", **CHAI))
    found = prefill_cache(llama(), method, Point(100, 1, 1))
    assert found.formula_bytes == found.allocated_bytes == 100 * HEAD_DIM * 4 * (16 + 6 + 6)


def test_shared_values_of_grouped_heads_are_those_of_the_key_heads_that_are_read() -> None:
    method = contender(build_method("v_reuse", clusters=[[2, 3]]))
    found = prefill_cache(MODELS["llama_gqa"](), method, Point(100, 1, 1))
    assert found.formula_bytes == found.allocated_bytes
    assert found.formula_bytes < found.full_bytes  # both representatives of a layer read one key head


def test_keys_in_few_bits_take_the_bytes_of_their_numbers_and_scales() -> None:
    found = prefill_cache(llama(), contender(build_method("key_int8", bits=4)), Point(100, 2, 1))
    assert found.formula_bytes == 200 * LAYERS * HEADS * (HEAD_DIM // 2 + 2 + HEAD_DIM * 4)
    assert found.formula_bytes == found.logical_bytes == found.allocated_bytes


@pytest.mark.parametrize("preset", ["llama7b", "llama33b"])
def test_published_counts_save_what_the_paper_says_over_the_whole_model(preset: str) -> None:
    published = json.loads((paper_dir() / "cluster_counts.json").read_text())[preset]
    heads, layers = published["heads"], published["layers"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=4 * heads,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).eval()
    found = prefill_cache(model, chai(clusters=preset_runs(preset)), Point(40, 1, 1))
    saved = 1 - found.allocated_bytes / found.full_bytes
    assert saved == pytest.approx(published["kv_saving"], abs=0.01 * (1 - published["kv_saving"]))


@pytest.mark.parametrize(
    "each",
    [
        Contender("mha (sdpa)", "sdpa"),
        Contender("mha (rows)", "rows"),
        contender(build_method("spatten", token_sparsity=0.3)),
    ],
)
def test_what_has_no_smaller_cache_is_measured_on_the_full_one_and_says_so(each: Contender) -> None:
    found = measure_memory(llama(), each, Point(30, 2, 3), 0, None)
    assert found.decode is not None
    assert found.prefill.cache.kind == "full cache"
    assert found.prefill.cache.formula_bytes == 2 * LAYERS * 60 * HEADS * HEAD_DIM * 4
    assert found.decode.cache.formula_bytes == 2 * LAYERS * 64 * HEADS * HEAD_DIM * 4
    assert found.decode.cache.allocated_bytes >= found.decode.cache.formula_bytes


def test_as_long_as_the_probe_is_not_complete_every_heads_keys_are_foreseen_and_held() -> None:
    found = prefill_cache(llama(), chai(), Point(4, 2, 1))
    assert found.kind == "full cache"
    assert found.formula_bytes == found.full_bytes
    # The probe's queries are remembered beside the keys until the probe is complete.
    assert found.allocated_bytes >= found.formula_bytes


def test_the_path_that_ran_is_recorded() -> None:
    found = measure_memory(llama(), chai(prefill="two_step"), Point(30, 1, 3), 0, None)
    assert found.decode is not None
    assert found.paths == {"two_step": 2, "decode": 4}  # two clustered layers; one prefill, two steps
    assert found.decode.cache.projection_bytes > 0


def test_weights_are_counted_once_where_they_are_tied() -> None:
    model = llama()
    untied = weight_bytes(model)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert untied - weight_bytes(model) == model.lm_head.weight.numel() * 4


@pytest.mark.slow
def test_a_fresh_process_holds_the_cache_that_the_formula_predicts() -> None:
    """Resident memory grows by pages, and by what libraries allocate: a tenth of 16 MiB is allowed for both."""
    model = model_settings("tiny_llama_random", config={"hidden_size": 512}, clusters=None)
    point = Point(1900, 1, 4)
    counts = {"clusters": [[1, 4]]}
    clustered = fresh_memory(model, contender(build_method("chai", **counts)), point, 0)
    full = fresh_memory(model, Contender("mha (sdpa)", "sdpa"), point, 0)
    assert isinstance(clustered, Memory)
    assert isinstance(full, Memory)
    formula = {name: each.prefill.cache.formula_bytes for name, each in (("c", clustered), ("f", full))}
    assert formula == {"c": 4 * 1900 * 9 * 64 * 4, "f": 4 * 1900 * 16 * 64 * 4}
    held = {name: each.prefill.settled_above_before_bytes for name, each in (("c", clustered), ("f", full))}
    assert held["f"] - held["c"] == pytest.approx(formula["f"] - formula["c"], abs=1.6 * 2**20)
    for each in (clustered, full):
        assert each.before_bytes > 0
        assert each.prefill.peak_bytes >= each.prefill.settled_bytes - 2**16


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_says_so() -> None:
    model = model_settings("tiny_llama_random", config={"max_position_embeddings": 1 << 22})
    found = fresh_memory(model, Contender("mha (eager)", "eager"), Point(1 << 21, 1, 1), 0)
    assert isinstance(found, OutOfMemory)
    assert not found.foreseen


def test_a_contender_is_the_same_in_another_process() -> None:
    method = build_method("chai", clusters=[[8, 1], [3, 2]], probe_tokens=3)
    for each in (Contender("mha (eager)", "eager"), contender(method, "chai 2")):
        assert pickle.loads(pickle.dumps(each)) == each


def test_words_of_every_allocator_are_known() -> None:
    for message in (
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000 bytes. Error code 12 (Cannot allocate memory)",
        "CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of 79.1 GiB",
    ):
        assert is_out_of_memory(RuntimeError(message))

        def fail(message: str = message) -> None:
            raise RuntimeError(message)

        found = attempt(torch.device("cpu"), fail)
        assert found is not None
        assert found.asked_bytes in (4000, int(3.5 * 2**30))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_free_memory_of_this_machine_is_known() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    assert free > 2**20
