"""Attention of one clustered layer against `scaled_dot_product_attention` on all heads, on the same tensors.

Of LLaMA-7B's shape: 32 heads of 128, in clusters of uneven size.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chai_eval.attention import Membership, Rows, SharedHeads, View, membership_from_labels, shared_attention
from chai_eval.benchmark.records import Row, finish, numbers, parser, positive, progress
from chai_eval.measure.clock import seconds_in_turn
from chai_eval.measure.statistics import ratio

HEADS, HEAD_DIM = 32, 128
SCALING = HEAD_DIM**-0.5
# Free columns behind the keys and values, as a cache that grows in blocks has them.
ROOM = 256
# Bytes that no processor's cache holds.
BEYOND_CACHES = 1 << 28
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Layer = TypeVar("Layer")
# Between two ways to add up the same numbers in a precision.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def decode(given: Sequence[str] | None = None) -> list[Row]:
    """Decoding: one new token against a cache, one clustered layer against plain attention on all heads."""
    options = parser("decode", decode.__doc__, repetitions=31)
    options.add_argument("--keys", type=numbers, default=[2048, 4096, 8192])
    options.add_argument("--dtypes", default="float32,bfloat16")
    return _timed("decode", options, given)


def prefill(given: Sequence[str] | None = None) -> list[Row]:
    """Prefill: a whole prompt at once, one clustered layer against plain attention on all heads."""
    options = parser("prefill", prefill.__doc__, repetitions=15)
    options.add_argument("--queries", type=numbers, default=[1024])
    options.add_argument("--dtypes", default="float32")
    return _timed("prefill", options, given)


@dataclass(frozen=True)
class Shape:
    """One clustered layer: new tokens, the last of `keys`, and how many clusters its heads are in."""

    queries: int
    keys: int
    clusters: int
    dtype: str
    device: str

    @property
    def causal(self) -> bool:
        """Whether the queries are a whole prompt; otherwise they come after what a cache holds."""
        return self.queries == self.keys


@dataclass(frozen=True)
class LayerTensors:
    """What the attention of one layer is given: queries, and keys and values where a cache holds them.

    `query`, `key` and `value` are those of all heads, in use; `kept_query` and `kept_key` those of representatives.
    `kept_key`, and `room` (of values), have the cache's free room behind them. All `[1, heads, tokens, head_dim]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kept_query: Tensor
    kept_key: Tensor
    room: Tensor
    shared: SharedHeads
    view: View

    def clustered(self) -> Tensor:
        """Output of every head by its cluster's probabilities."""
        return shared_attention(self.kept_query, self.kept_key, self.room, self.shared, self.view)

    def plain(self, causal: bool) -> Tensor:
        """Every head by its own scores, by PyTorch's own kernel."""
        return scaled_dot_product_attention(self.query, self.key, self.value, is_causal=causal, scale=SCALING)

    def check(self, causal: bool) -> None:
        """Assert that the clustered result is plain attention with every head's query and key its representative's."""
        membership = self.shared.membership
        chosen = membership.representative.gather(1, membership.cluster)[0]
        with torch.inference_mode():
            expected = replace(self, query=self.query[:, chosen], key=self.key[:, chosen]).plain(causal)
            off = (self.clustered() - expected).abs().max().item()
        assert off < TOLERANCE[self.value.dtype], f"clustered attention is {off:.2e} off"


def layer_tensors(shape: Shape, seed: int) -> LayerTensors:
    """Random tensors of a shape."""
    generator, device, dtype = torch.Generator().manual_seed(seed), torch.device(shape.device), DTYPES[shape.dtype]

    def drawn(heads: int, length: int, room: int = 0) -> Tensor:
        whole = torch.zeros(1, heads, length + room, HEAD_DIM, dtype=dtype, device=device)
        whole[:, :, :length] = torch.randn(1, heads, length, HEAD_DIM, generator=generator).to(dtype)
        return whole

    queries, keys, room = shape.queries, shape.keys, 0 if shape.causal else ROOM
    membership = uneven(shape.clusters, generator, device)
    query, key, value = drawn(HEADS, queries), drawn(HEADS, keys), drawn(HEADS, keys, room)
    kept_key = torch.zeros(1, shape.clusters, keys + room, HEAD_DIM, dtype=dtype, device=device)
    kept_key[:, :, :keys] = key[:, membership.representative[0]]
    rows = Rows.from_mask(None, 1, queries, device)
    if not shape.causal:
        rows = rows.after(torch.tensor([keys - queries], device=device), keys - queries, aligned=True)
    kept_query = query[:, membership.representative[0]].contiguous()
    shared, view = SharedHeads.of(membership, HEADS), View(rows, SCALING)
    return LayerTensors(query, key, value[:, :, :keys], kept_query, kept_key, value, shared, view)


def beyond_caches(layer: Callable[[int], Layer], keys: int, dtype: str) -> list[Layer]:
    """Layers of seeds 0 and up, so many that none is still in a processor's cache when its turn comes again."""
    nbytes = 2 * HEADS * keys * HEAD_DIM * DTYPES[dtype].itemsize
    return [layer(seed) for seed in range(math.ceil(BEYOND_CACHES / nbytes))]


def uneven(clusters: int, generator: torch.Generator, device: torch.device) -> Membership:
    labels = torch.cat([torch.arange(clusters), torch.randint(clusters, (HEADS - clusters,), generator=generator)])
    labels = labels[torch.randperm(HEADS, generator=generator)]
    lowest = (labels[:, None] == labels[None, :]).to(torch.uint8).argmax(1)
    return membership_from_labels(lowest[None].to(device), clusters)


def _timed(name: str, options: argparse.ArgumentParser, given: Sequence[str] | None) -> list[Row]:
    options.add_argument("--clusters", type=positive, default=4)
    arguments = options.parse_args(given)
    decoding = name == "decode"
    done, rows = progress(name, arguments), []
    for dtype in arguments.dtypes.split(","):
        for length in arguments.keys if decoding else arguments.queries:
            shape = Shape(1 if decoding else length, length, arguments.clusters, dtype, arguments.device)
            measure = partial(_row, f"{name} attention", shape, arguments.repetitions)
            rows.append(done.part(f"{dtype}-{length}", Row, measure))
    return finish(done, rows)


def _row(what: str, shape: Shape, repetitions: int) -> Row:
    """Time one shape, layer after layer."""
    layers = beyond_caches(partial(layer_tensors, shape), shape.keys, shape.dtype)
    layers[0].check(shape.causal)
    contenders = {
        "sdpa": lambda layer: layer.plain(shape.causal),
        "clustered": lambda layer: layer.clustered(),
    }
    seconds = seconds_in_turn(contenders, layers, torch.device(shape.device), repetitions=repetitions)
    return Row(
        what,
        f"{HEADS} → {shape.clusters}, d_h {HEAD_DIM}, {shape.keys} keys, {shape.dtype}, {shape.device}",
        f"scaled_dot_product_attention, {HEADS} heads",
        ratio(seconds["sdpa"], seconds["clustered"]),
        2 * HEADS / (HEADS + shape.clusters),
        {**vars(shape), "seconds": seconds},
    )
