"""Decoding with keys in fewer numbers against `scaled_dot_product_attention` on whole ones; values are whole in both.

Of LLaMA-7B's shape: 32 heads of 128, all of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chai_eval.attention import Rows, View
from chai_eval.attention.low_rank import LayerRanks, LowRank, SameRank, read_low_rank
from chai_eval.benchmark.attention import DTYPES, HEAD_DIM, HEADS, ROOM, SCALING, TOLERANCE, beyond_caches
from chai_eval.benchmark.records import Row, finish, numbers, parser, positive, progress
from chai_eval.measure.clock import seconds_in_turn
from chai_eval.measure.statistics import ratio


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Time both, print the table, write the record."""
    options = parser("low_rank", __doc__, repetitions=31)
    options.add_argument("--keys", type=numbers, default=[2048, 4096, 8192])
    options.add_argument("--dtypes", default="float32,bfloat16")
    options.add_argument("--rank", type=positive, default=HEAD_DIM // 2, help=f"of each head's keys, up to {HEAD_DIM}")
    arguments = options.parse_args(given)
    done, rows = progress("low_rank", arguments), []
    for dtype in arguments.dtypes.split(","):
        for keys in arguments.keys:
            shape = Shape(keys, min(arguments.rank, HEAD_DIM), dtype, arguments.device)
            rows.append(done.part(f"{dtype}-{keys}", Row, partial(_row, shape, arguments.repetitions)))
    return finish(done, rows)


@dataclass(frozen=True)
class Shape:
    """One layer while it decodes: how many keys a new token sees, itself included, and the rank of each head's."""

    keys: int
    rank: int
    dtype: str
    device: str


@dataclass(frozen=True)
class LowRankTensors:
    """What the attention of one layer is given: a query, and keys and values where a cache holds them.

    `query`, `key` and `value` are those of all heads, `[1, heads, tokens, head_dim]`; `cached` are the same keys, in
    fewer numbers, and values, `[1, numbers, room, 1]`, with the cache's free room behind them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    ranks: LayerRanks
    cached: tuple[Tensor, Tensor]
    view: View

    def reduced(self) -> Tensor:
        """Output of every head by keys in fewer numbers."""
        return read_low_rank(self.ranks, self.query, self.key[:, :, :1], self.cached, self.view)

    def plain(self, key: Tensor | None = None) -> Tensor:
        """Output by whole keys, or by others, by PyTorch's own kernel."""
        return scaled_dot_product_attention(self.query, self.key if key is None else key, self.value, scale=SCALING)

    def check(self) -> None:
        """Hold the result against plain attention with the keys that the cached numbers stand for.

        Raises
        ------
        AssertionError
        """
        with torch.inference_mode():
            stood_for = self.ranks.keys.restore(self.cached[0][:, :, 1 : self.key.shape[2]])
            expected = self.plain(torch.cat((self.key[:, :, :1], stood_for), dim=2))
            off = (self.reduced() - expected).abs().max().item()
        assert off < TOLERANCE[self.value.dtype], f"attention with keys of low rank is {off:.2e} off"


def low_rank_tensors(shape: Shape, seed: int) -> LowRankTensors:
    """Random tensors of a shape, keys reduced to random subspaces."""
    generator, device, dtype = torch.Generator().manual_seed(seed), torch.device(shape.device), DTYPES[shape.dtype]

    def drawn(length: int) -> Tensor:
        return torch.randn(1, HEADS, length, HEAD_DIM, generator=generator).to(device, dtype)

    query, key, value = drawn(1), drawn(shape.keys), drawn(shape.keys)
    heads = torch.arange(HEADS, device=device)
    axes = torch.linalg.qr(torch.randn(HEADS, HEAD_DIM, shape.rank, generator=generator)).Q.transpose(1, 2)
    maps = axes.contiguous().to(device, dtype)
    few, whole = SameRank(heads, shape.rank, maps, maps), SameRank(heads, HEAD_DIM)
    ranks = LayerRanks(*(LowRank(HEADS, HEAD_DIM, (each,)) for each in (few, whole)))
    in_use = ranks.keys.project(key), ranks.values.project(value)
    cached = [torch.zeros(1, each.shape[1], shape.keys + ROOM, 1, dtype=dtype, device=device) for each in in_use]
    for buffer, each in zip(cached, in_use, strict=True):
        buffer[:, :, : shape.keys] = each
    past = torch.tensor([shape.keys - 1], device=device)
    rows = Rows.from_mask(None, 1, 1, device).after(past, shape.keys - 1, aligned=True)
    return LowRankTensors(query, key, value, ranks, (cached[0], cached[1]), View(rows, SCALING))


def _row(shape: Shape, repetitions: int) -> Row:
    """Time one shape, layer after layer; bytes allow what both whole are to keys of `rank` numbers and whole values."""
    layers = beyond_caches(partial(low_rank_tensors, shape), shape.keys, shape.dtype)
    layers[0].check()
    contenders = {"sdpa": lambda layer: layer.plain(), "low rank": lambda layer: layer.reduced()}
    seconds = seconds_in_turn(contenders, layers, torch.device(shape.device), repetitions=repetitions)
    return Row(
        "decode at low rank",
        f"{HEADS} heads, keys {HEAD_DIM} → {shape.rank}, {shape.keys} keys, {shape.dtype}, {shape.device}",
        f"scaled_dot_product_attention, keys of {HEAD_DIM}",
        ratio(seconds["sdpa"], seconds["low rank"]),
        2 * HEAD_DIM / (shape.rank + HEAD_DIM),
        {**vars(shape), "seconds": seconds},
    )
