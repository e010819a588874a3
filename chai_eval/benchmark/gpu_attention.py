"""Attention of one layer on a GPU: heads in clusters against SDPA and FlexAttention on all heads, with equal inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chai_eval.attention import Membership, Rows, SharedHeads, View, shared_attention
from chai_eval.attention.kernels import gpu
from chai_eval.benchmark.attention import BEYOND_CACHES, HEAD_DIM, HEADS, SCALING, TOLERANCE, uneven
from chai_eval.benchmark.gpu_report import GpuRow, Report, captured
from chai_eval.errors import RunError
from chai_eval.measure.clock import clock_for, in_turn, seconds_of, undisturbed


@dataclass(frozen=True)
class Shape:
    """One layer: new tokens, the last of `keys`, of each of `batch` requests; heads in so many clusters."""

    queries: int
    keys: int
    batch: int
    clusters: int
    dtype: torch.dtype
    device: torch.device

    @property
    def causal(self) -> bool:
        """Whether the queries are a whole prompt."""
        return self.queries > 1

    @property
    def text(self) -> str:
        """As rows say it."""
        name = str(self.dtype).removeprefix("torch.")
        return f"{HEADS} → {self.clusters}, d_h {HEAD_DIM}, {self.keys} keys, batch {self.batch}, {name}"

    def work(self, clusters: int) -> tuple[float, float]:
        """Bytes and operations that attention with so many clusters can't do without."""
        numbers = (clusters + HEADS) * HEAD_DIM
        pairs = self.keys * (self.keys + 1) / 2 if self.causal else self.keys
        moved = self.keys * numbers + self.queries * numbers
        return self.batch * moved * self.dtype.itemsize, 2 * self.batch * pairs * numbers


@dataclass(frozen=True)
class Tensors:
    """What a layer is given, `[batch, heads, tokens, head_dim]`; `kept_…` those of representatives."""

    query: Tensor
    key: Tensor
    value: Tensor
    kept_query: Tensor
    kept_key: Tensor
    shared: SharedHeads
    view: View

    @classmethod
    def of(cls, shape: Shape, seed: int = 0) -> Tensors:
        """Random ones, every request with its own clusters."""
        device, generator = shape.device, torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)

        def drawn(length: int) -> Tensor:
            return torch.randn(shape.batch, HEADS, length, HEAD_DIM, device=device, dtype=shape.dtype)

        found = [uneven(shape.clusters, generator, device) for _ in range(shape.batch)]
        membership = Membership(
            torch.cat([each.cluster for each in found]), torch.cat([each.representative for each in found])
        )
        query, key, value = drawn(shape.queries), drawn(shape.keys), drawn(shape.keys)
        row = torch.arange(shape.batch, device=device)[:, None]
        rows = Rows.from_mask(None, shape.batch, shape.queries, device)
        if not shape.causal:
            past = torch.full((shape.batch,), shape.keys - 1, device=device)
            rows = rows.after(past, shape.keys - 1, aligned=True)
        chosen = membership.representative
        shared = SharedHeads.of(membership, HEADS)
        return cls(query, key, value, query[row, chosen], key[row, chosen], shared, View(rows, SCALING))

    def sdpa(self) -> Tensor:
        """Every head by its own scores."""
        causal = self.query.shape[2] > 1
        return scaled_dot_product_attention(self.query, self.key, self.value, is_causal=causal, scale=SCALING)

    def expected(self) -> Tensor:
        """SDPA with every head's query and key its representative's."""
        row, membership = torch.arange(len(self.query), device=self.query.device)[:, None], self.shared.membership
        of_head = membership.representative.gather(1, membership.cluster)
        causal = self.query.shape[2] > 1
        query, key = self.query[row, of_head], self.key[row, of_head]
        return scaled_dot_product_attention(query, key, self.value, is_causal=causal, scale=SCALING)

    def clustered(self) -> Tensor:
        """As the package computes it on this device."""
        return shared_attention(self.kept_query, self.kept_key, self.value, self.shared, self.view)


Kernel = Callable[[Tensors], Tensor]


def kernels(shape: Shape) -> dict[str, Kernel]:
    """Ways to compute clustered attention here, by name: as the package does, and each kernel for decoding."""
    found: dict[str, Kernel] = {"clustered": Tensors.clustered}
    if shape.device.type == "cuda" and not shape.causal and gpu.compiles_for(shape.device):
        found |= compiled()
    return found


def compiled() -> dict[str, Kernel]:
    """The two kernels for decoding: a program for each head, or for each cluster."""
    from chai_eval.attention.kernels import triton_decode
    from chai_eval.attention.kernels.triton_arguments import Columns, Heads

    def of(each: Tensors) -> tuple[Tensor, Tensor, Tensor, Heads, Columns]:
        return each.kept_query, each.kept_key, each.value, Heads.of(each.shared), Columns.of(each.view, 0)

    return {
        "clustered (indirect)": lambda each: triton_decode.indirect(*of(each)),
        "clustered (fused)": lambda each: triton_decode.fused(*of(each)),
    }


@torch.inference_mode()
def check(shape: Shape) -> None:
    """Hold every way against SDPA; RunError, on one line, for the first that gives something else."""
    tensors = Tensors.of(shape)
    expected = tensors.expected()
    for name, kernel in kernels(shape).items():
        off = (kernel(tensors).float() - expected.float()).abs().max().item()
        if not off < TOLERANCE[shape.dtype]:
            kind = "prefill" if shape.causal else "decode"
            raise RunError(f"gpu: {name} {kind} attention is {off:.2e} off SDPA; allowed: {TOLERANCE[shape.dtype]:.0e}")


def flex(shape: Shape) -> Kernel:
    """FlexAttention on all heads, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if shape.causal:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, shape.queries, shape.keys, device=shape.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda each: compiled(each.query, each.key, each.value, block_mask=mask, scale=SCALING)


@torch.inference_mode()
def timed(shape: Shape, report: Report, *, repetitions: int, with_flex: bool) -> None:
    """Time every contender in turn, layer after layer so that none is in a cache; a row for each."""
    size = 2 * HEADS * HEAD_DIM * shape.keys * shape.batch * shape.dtype.itemsize
    count = 1 if shape.causal or report.tiny else math.ceil(BEYOND_CACHES / size)
    layers = [Tensors.of(shape, seed) for seed in range(count)]
    contenders: dict[str, Kernel] = {"sdpa": Tensors.sdpa, **kernels(shape)}
    notes: dict[str, str] = {}
    if with_flex:
        try:
            contenders["flex"] = flex(shape)
            contenders["flex"](layers[0])
        except Exception as error:
            contenders.pop("flex", None)
            notes["flex"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    clock, runs, graphs = clock_for(shape.device), {}, {}
    for name, kernel in contenders.items():
        work, graphs[name] = captured(partial(_through, kernel, layers), shape.device)
        runs[name] = partial(seconds_of, clock, work)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with undisturbed():
        for turn in in_turn(runs, repetitions, warmup=2):
            seconds[turn.contender].append(turn.found / count)
    what = f"{'prefill' if shape.causal else 'decode'} attention"
    for name, samples in seconds.items():
        limit = report.machine.seconds(*shape.work(shape.clusters if name.startswith("clustered") else HEADS))
        report.add(GpuRow(what, shape.text, name, samples, limit, graphs[name]))
    for name, note in notes.items():
        report.add(GpuRow(what, shape.text, name, note=note))


def _through(kernel: Kernel, layers: list[Tensors]) -> None:
    for each in layers:
        kernel(each)
