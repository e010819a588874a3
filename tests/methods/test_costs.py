"""What methods cost in one currency, held against what caches really hold and what is counted by hand."""

from __future__ import annotations

import pytest
import torch

from chai_eval.attention.shape import attention_shape
from chai_eval.methods import build_method
from chai_eval.methods.base import plain_footprint
from chai_eval.methods.costs import SIZE, costs, described_costs
from chai_eval.methods.kv_rank import RANK_STEP
from tests.attention.tiny import HEADS, LAYERS, MODELS, requests
from tests.methods.cases import CASES
from tests.methods.cases.kv_rank import HEAD_DIM
from tests.methods.cases.ours import COUNTS

LENGTH = 40


@pytest.mark.parametrize("case", CASES)
def test_bytes_held_are_those_that_a_16_bit_cache_takes(case: str) -> None:
    model = MODELS["llama"]().bfloat16()
    method = CASES[case].build(model)
    with method.applied(model), torch.no_grad():
        cache = model(input_ids=torch.stack(requests([LENGTH])), use_cache=True).cache
    held = sum(getattr(layer, name).untyped_storage().nbytes() for layer in cache.layers for name in ("keys", "values"))
    assert costs(method, model, LENGTH).held == pytest.approx(held / LENGTH)


def test_chai_multiplies_for_representatives_and_every_heads_values() -> None:
    model = MODELS["llama"]()
    found = costs(build_method("chai", clusters=COUNTS), model)
    assert found.multiplications == HEAD_DIM * (sum(COUNTS) + HEADS * LAYERS)
    assert found.held == found.read == SIZE * HEAD_DIM * (sum(COUNTS) + HEADS * LAYERS)


def test_costs_of_a_low_rank_are_its_numbers_and_relative_to_plain_attention() -> None:
    model = MODELS["llama_gqa"]()
    method = CASES["kv_rank"].build(model)
    shape = attention_shape(model)
    numbers = sum(sum(layer.numbers(shape.head_dim)) for layer in method.footprint(model) or ())
    whole = 2 * LAYERS * shape.kv_heads * shape.head_dim
    assert 0 <= 0.7 * whole - numbers < RANK_STEP
    found = described_costs(method, model)
    assert found["held"] == SIZE * numbers
    assert found["of_mha"]["held"] == pytest.approx(numbers / whole, abs=1e-6)
    # Every query head multiplies with the numbers of its key head.
    assert found["multiplications"] == numbers * HEADS / shape.kv_heads
    assert not found["simulated"]


def test_a_method_that_simulates_its_saving_costs_what_plain_attention_does() -> None:
    model = MODELS["opt"]()
    found = described_costs(build_method("dejavu", sparsity=0.5), model)
    assert found["simulated"]
    assert found["of_mha"] == {"held": 1.0, "read": 1.0, "multiplications": 1.0}
    assert len(plain_footprint(model)) == LAYERS


def test_a_fixed_membership_costs_the_key_heads_that_its_representatives_read() -> None:
    """Under grouped queries several representatives may read one key head: known beforehand, it is counted once."""
    model = MODELS["llama_gqa"]()
    serving = [list(range(HEADS)), [0, 0, 2, 2, 0, 0, 2, 2], [1] * HEADS]  # heads 0 to 3 read the first key head
    method = build_method("output_aware", membership=serving)
    with method.applied(model), torch.no_grad():
        cache = model(input_ids=torch.stack(requests([LENGTH])), use_cache=True).cache
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 1, 1]
    assert costs(method, model).held == SIZE * HEAD_DIM * ((2 + 1 + 1) + 3 * 2)
