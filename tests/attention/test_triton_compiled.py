"""GPU kernels compiled for GPUs that are not here, by their own launches: what the interpreter forgives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from chai_eval.attention.kernels.triton_arguments import Columns, Heads, Tuning
from tests.attention.triton_worker import Compiled, compiled, worker

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

HEADS, CLUSTERS, HEAD_DIM = 32, 4, 128
# Bytes that a program may have on a multiprocessor.
SHARED = {80: 163 << 10, 90: 227 << 10}


def states(queries: int, dtype: torch.dtype, width: int = HEAD_DIM, value_width: int = HEAD_DIM) -> tuple[Tensor, ...]:
    """Nothing is read of them but shapes, strides and addresses."""
    sizes = ((CLUSTERS, queries, width), (CLUSTERS, 64, width), (HEADS, 64, value_width))
    return tuple(torch.empty(1, *size, dtype=dtype) for size in sizes)


def of_llama(roomy: bool) -> list[tuple[Any, ...]]:
    """Decoding and prompts of LLaMA-7B's heads in four clusters, in bfloat16."""
    heads, columns = Heads(torch.zeros(1, HEADS, dtype=torch.int64)), Columns(0.1, torch.zeros(1, dtype=torch.int64))
    decoding, prompt = states(1, torch.bfloat16), states(512, torch.bfloat16)
    roomier = Tuning(4, 64, 64, warps=8) if roomy else None
    return [
        ("triton_decode", "indirect", *decoding, heads, columns),
        ("triton_decode", "fused", *decoding, heads, columns),
        ("triton_prefill", "prompt", *prompt, heads, columns, roomier),
    ]


def others() -> list[tuple[Any, ...]]:
    """Every branch of the kernels that those of LLaMA do not take, in small."""
    table, past = torch.zeros(1, HEADS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    slot, first_score = torch.zeros(1, CLUSTERS, dtype=torch.int32), torch.zeros(1, CLUSTERS, 1)
    single, several = Tuning(1, 1, 16, 3, matrices=False), Tuning(2, 16, 16, 3)
    heads, windowed = Heads(table, slot), Columns(0.1, past, 5, 7)
    exact, half = states(1, torch.float32, 24, 32), states(3, torch.float16, 24, 32)
    own = Heads(slot=slot, value=slot)
    return [
        ("triton_decode", "fused", *exact, heads, windowed, Tuning(4, 1, 16, 1, matrices=False)),
        ("triton_decode", "indirect", *exact, own, Columns(0.1, past, first_score=first_score), single),
        ("triton_decode", "fused", *half, heads, windowed, several),
        ("triton_decode", "indirect", *half, Heads(table, slot, table, table), Columns(0.1), several),
        ("triton_prefill", "prompt", *states(40, torch.float32, 32, 32), heads, Columns(0.1), Tuning(2, 16, 16)),
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Compiled]]]:
    """What the compiler makes, for an architecture, of calls."""
    with worker(TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")), TRITON_INTERPRET="0") as call:
        yield lambda architecture, calls: call(compiled, architecture, *calls)


@pytest.mark.parametrize("architecture", SHARED)
def test_decoding_reads_sixteen_bytes_at_a_time_ahead_and_prompts_fit(
    made: Callable[..., list[Compiled]], architecture: int
) -> None:
    for kernel in made(architecture, of_llama(architecture == 90)):
        assert kernel.shared <= SHARED[architecture]
        assert kernel.wide_loads > 0
        assert kernel.narrow_loads == 0
        assert kernel.spilled <= 64  # bytes a thread: next to nothing


def test_every_branch_compiles(made: Callable[..., list[Compiled]]) -> None:
    names = [kernel.name for kernel in made(80, others())]
    assert names.count("attention") == len(others())
    assert names.count("join") == 3
