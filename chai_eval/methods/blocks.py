"""Blocks of neighbouring heads, one for each device that holds a part of the model, and clusters handed out to them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from chai_eval.attention import shard
from chai_eval.attention.shape import attention_shape
from chai_eval.errors import SettingError

SETTING = "method.tensor_parallel"


def head_blocks(model: PreTrainedModel, devices: int | None) -> list[int]:
    """How many neighbouring query heads each of so many devices has, with the key heads that they read.

    They are as even as key heads allow. None means as many devices as the model is split over.

    Raises
    ------
    SettingError
        Where there are fewer key heads than devices, or the model is split over another number of them.
    """
    shape, split = attention_shape(model), shard(model).size
    size = devices or split
    if split not in (1, size):
        raise SettingError(f"{SETTING}: {size} given for a model that is split over {split}; allowed: {split}, or null")
    if size > shape.kv_heads:
        raise SettingError(
            f"{SETTING}: {size} given for a model of {shape.kv_heads} key heads; allowed: 1 to {shape.kv_heads}"
        )
    fewest, more = divmod(shape.kv_heads, size)
    group = shape.heads // shape.kv_heads
    return [group * (fewest + (block < more)) for block in range(size)]


def shared_out(clusters: int, heads: Sequence[int], turn: int) -> list[int]:
    """Clusters of a layer for each block of so many heads: one at least, beyond that in proportion to the heads.

    They add up to `clusters`, as long as those are not fewer than blocks. What can't be divided goes to the blocks that
    are furthest below their share, among equals from the block of number `turn` on: with the layer's number for it, no
    block has more to cache over all layers than another.
    """
    found, total = [1] * len(heads), sum(heads)
    for _ in range(clusters - len(heads)):
        missing = {
            (clusters * own - given * total, -((block - turn) % len(heads))): block
            for block, (own, given) in enumerate(zip(heads, found, strict=True))
            if given < own
        }
        found[missing[max(missing)]] += 1
    return found
