"""A fingerprint tells any two models apart that could score differently, and no others."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from chai_eval.errors import RunError
from chai_eval.models import fingerprint, load_model
from chai_eval.models.fingerprint import _checksums


@pytest.fixture
def model() -> PreTrainedModel:
    return load_model("tiny_llama_random", device="cpu")[0]


def test_the_same_weights_have_the_same_fingerprint(model: PreTrainedModel) -> None:
    assert fingerprint(model) == fingerprint(load_model("tiny_llama_random", device="cpu")[0])
    assert len(fingerprint(model)) == 64


def test_saving_and_loading_keeps_the_fingerprint(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path)) == fingerprint(model)


def test_how_a_model_is_run_does_not_change_it(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    assert fingerprint(model) == before


def test_one_bit_of_one_weight_changes_it(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    weight = model.lm_head.weight.data
    weight.view(torch.int32)[-1, -1] ^= 1
    assert fingerprint(model) != before


def test_weights_that_change_places_change_it(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    weight = model.lm_head.weight.data
    weight[[3, 200]] = weight[[200, 3]]
    assert fingerprint(model) != before


@pytest.mark.parametrize("changed", [{"num_key_value_heads": 4}, {"rope_theta": 5000.0}, {"rms_norm_eps": 1e-5}])
def test_another_config_changes_it(model: PreTrainedModel, changed: dict[str, float]) -> None:
    assert fingerprint(load_model("tiny_llama_random", device="cpu", config=changed)[0]) != fingerprint(model)


def test_another_precision_changes_it(model: PreTrainedModel) -> None:
    before = fingerprint(model)
    assert fingerprint(model.bfloat16()) != before


def test_tied_weights_count_once(model: PreTrainedModel) -> None:
    tied, _ = load_model("tiny_llama_random", device="cpu", config={"tie_word_embeddings": True})
    before = fingerprint(tied)
    names = [name for name, _ in tied.named_parameters()]
    assert "lm_head.weight" not in names
    apart = copy.deepcopy(tied)
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.detach().clone())
    assert fingerprint(apart) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numbers", [1, 7, 1_048_577, 2_200_000])
def test_checksums_equal_a_plain_sum_of_words_over_python_integers(dtype: torch.dtype, numbers: int) -> None:
    values = torch.randn(numbers, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw = values.view(torch.int16 if dtype != torch.float32 else torch.int32).numpy().tobytes()
    expected = []
    for start in range(0, len(raw), 1 << 22):
        chunk = raw[start : start + (1 << 22)]
        words = np.frombuffer(chunk + bytes(-len(chunk) % 8), dtype=np.uint64).tolist()
        weighted = sum(word * (index * 0x9E3779B97F4A7C15 | 1) for index, word in enumerate(words))
        expected += [sum(words) % 2**64, weighted % 2**64]
    got = [value % 2**64 for value in _checksums("weight", torch.nn.Parameter(values))]
    assert got == expected


def test_a_view_into_the_middle_of_a_file_counts_as_its_values() -> None:
    storage = torch.randn(101)
    assert _checksums("weight", storage[1:]) == _checksums("weight", storage[1:].clone())  # type: ignore[arg-type]


def test_a_weight_that_is_not_in_memory_is_one_line(model: PreTrainedModel) -> None:
    with torch.device("meta"):
        absent = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(RunError, match=r"^model\.device_map: weight lm_head\.weight is offloaded"):
        fingerprint(absent)
