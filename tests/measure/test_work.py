"""Counted operations against PyTorch's own counter, and counted pairs against loops."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from chai_eval.measure.ceiling import Ceiling, measure_ceiling
from chai_eval.measure.contenders import Contender, contender
from chai_eval.measure.generation import Generation, prompt
from chai_eval.measure.work import Pass, Work, attention_work, pass_work, total
from chai_eval.measure_settings import Point
from chai_eval.methods import build_method
from chai_eval.methods.base import LayerFootprint

from ..attention.tiny import HEADS, LAYERS, MODELS, llama, opt
from .fakes import TickingClock

MHA = Contender("mha (sdpa)", "sdpa")
HEAD_DIM = 8
WHOLE = LayerFootprint(HEADS, HEADS, HEADS, HEADS)


def counted(model: PreTrainedModel, each: Contender, point: Point) -> tuple[int, int]:
    """Operations of the prefill and of the step after it, as PyTorch counts matrix products."""
    with torch.inference_mode(), each.applied(model):
        run = Generation(model, prompt(model, point, 0))
        with FlopCounterMode(display=False) as prefill:
            run.forward()
        with FlopCounterMode(display=False) as step:
            run.forward()
    return prefill.get_total_flops(), step.get_total_flops()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("batch", [1, 2])
def test_operations_of_plain_attention_are_those_that_are_computed(name: str, batch: int) -> None:
    model, eager = MODELS[name](), Contender("mha (eager)", "eager")
    prefill, step = counted(model, eager, Point(20, batch, 2))
    heads = eager.method.footprint(model)
    assert total(pass_work(model, heads, Pass(batch, 20, causal=False))).flops == prefill
    assert total(pass_work(model, heads, Pass(batch, 1, past=20))).flops == step


@pytest.mark.parametrize("build", [llama, opt])
def test_operations_of_layers_that_share_probabilities_are_those_that_are_computed(build: object) -> None:
    assert callable(build)
    model, each = build(), contender(build_method("layer_share", layers=list(range(1, LAYERS))))
    prefill, step = counted(model, each, Point(20, 2, 2))
    layers = each.method.footprint(model)
    assert total(pass_work(model, layers, Pass(2, 20, causal=False))).flops == prefill
    assert total(pass_work(model, layers, Pass(2, 1, past=20))).flops == step


@pytest.mark.parametrize("build", [llama, opt])
def test_operations_of_a_step_are_those_over_the_tokens_that_are_held(build: object) -> None:
    assert callable(build)
    model, each = build(), contender(build_method("snapkv", keep=0.5, every=8, window=3))
    _, step = counted(model, each, Point(20, 2, 2))
    assert total(pass_work(model, each.method.footprint(model), Pass(2, 1, past=20))).flops == pytest.approx(step)


@pytest.mark.parametrize("build", [llama, opt])
def test_operations_of_a_clustered_step_are_those_that_are_computed(build: object) -> None:
    assert callable(build)
    # Every layer is clustered: PyTorch does not count the fused attention of the others.
    model, each = build(), contender(build_method("chai", clusters=[[3, LAYERS]]))
    _, step = counted(model, each, Point(20, 1, 2))
    assert total(pass_work(model, each.method.footprint(model), Pass(1, 1, past=20))).flops == step


def test_operations_of_a_clustered_prefill_are_those_that_are_computed() -> None:
    """Membership known beforehand, so that all that is computed is projections and products; in two steps."""
    membership = [[0, 0, 2, 2, 2, 5, 5, 5]] * LAYERS
    model, each = llama(), contender(build_method("chai_static", membership=membership, prefill="two_step"))
    prefill, _ = counted(model, each, Point(40, 1, 2))
    assert total(pass_work(model, each.method.footprint(model), Pass(1, 40, causal=False))).flops == prefill


@pytest.mark.parametrize(("queries", "past", "probe"), [(7, 0, 0), (7, 0, 3), (1, 12, 0), (4, 5, 0), (3, 0, 3)])
def test_products_are_those_of_pairs_that_a_query_sees(queries: int, past: int, probe: int) -> None:
    layer = LayerFootprint(3, HEADS, 3, HEADS, probe)
    products = 0
    for query in range(queries):
        for _ in range(past + query + 1):
            scores = HEADS if query < probe else 3
            products += 2 * HEAD_DIM * (scores + HEADS)
    found = attention_work(layer, WHOLE, HEAD_DIM, 4, Pass(1, queries, past=past))
    assert found.flops == products


def test_bytes_of_a_step_are_the_cache_read_and_the_new_token_written() -> None:
    kept = LayerFootprint(3, HEADS, 3, HEADS)
    found = attention_work(kept, WHOLE, HEAD_DIM, 2, Pass(5, 1, past=100))
    assert found.bytes == 5 * (101 + 1) * (3 + HEADS) * HEAD_DIM * 2
    every = attention_work(WHOLE, WHOLE, HEAD_DIM, 2, Pass(5, 1, past=100))
    assert every.bytes / found.bytes == pytest.approx(2 * HEADS / (HEADS + 3))


def test_weights_are_read_once_a_pass_and_narrowly_where_no_probe_needs_the_rest() -> None:
    model, each = llama(), contender(build_method("chai", clusters=[[4, LAYERS]]))
    weight = model.model.layers[0].self_attn.q_proj.weight.numel() * 4
    step = pass_work(model, each.method.footprint(model), Pass(8, 1, past=10))["projections"]
    prefill = pass_work(model, each.method.footprint(model), Pass(8, 10))["projections"]
    assert step.bytes == LAYERS * weight * (0.5 + 0.5 + 1)
    assert prefill.bytes == LAYERS * weight * 3


def test_shared_values_leave_as_many_outputs_as_clusters() -> None:
    model, each = llama(), contender(build_method("v_reuse", clusters=[[4, LAYERS]]))
    assert each.method.footprint(model) == [LayerFootprint(4, 4, 4, 4, 5)] * LAYERS
    mha, shared = (pass_work(model, one.method.footprint(model), Pass(1, 1, past=31)) for one in (MHA, each))
    assert shared["attention"].flops == mha["attention"].flops / 2
    assert shared["projections"].flops == mha["projections"].flops / 2


def test_time_at_the_ceiling_is_that_of_the_slower_of_operations_and_bytes_part_by_part() -> None:
    ceiling = Ceiling(copy_bytes_per_second=5.0, read_bytes_per_second=10.0, flops_per_second=100.0)
    assert ceiling.seconds({"by operations": Work(300.0, 10.0), "by bytes": Work(100.0, 40.0)}) == 3.0 + 4.0


def test_the_ceiling_counts_both_ways_of_a_copy() -> None:
    found = measure_ceiling(torch.device("cpu"), torch.float32, clock=TickingClock(), nbytes=1 << 20, side=64)
    assert found.copy_bytes_per_second == 2 << 20
    assert found.read_bytes_per_second == 1 << 20
    assert found.flops_per_second == 2 * 64**3
