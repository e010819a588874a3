"""The machine's own ceiling: how fast it moves bytes, and how fast it multiplies matrices, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chai_eval.measure.clock import Clock, clock_for, seconds_of
from chai_eval.measure.room import free_bytes

if TYPE_CHECKING:
    from chai_eval.measure.work import Work

# Large enough that no processor keeps it in its caches; GPUs need more before they reach full speed.
CPU_BYTES, DEVICE_BYTES = 1 << 28, 1 << 31
CPU_SIDE, DEVICE_SIDE = 2048, 8192
TRIES = 5
# Sizes are multiples of this, which every precision and the rows of the multiplied matrix divide.
PAGE = 1 << 15


@dataclass(frozen=True)
class Ceiling:
    """The best of several tries: of a large copy (bytes read and bytes written together), of a sum or a product of a
    large matrix and a vector (bytes that are only read, as weights and caches are), of a large matrix product.
    """

    copy_bytes_per_second: float
    read_bytes_per_second: float
    flops_per_second: float

    @property
    def bytes_per_second(self) -> float:
        """The faster way to move bytes: what a phase's bytes are held against."""
        return max(self.copy_bytes_per_second, self.read_bytes_per_second)

    def seconds(self, parts: dict[str, Work]) -> float:
        """Time of some work at the ceiling, its parts one after the other."""
        return sum(each.seconds(self.flops_per_second, self.bytes_per_second) for each in parts.values())


@torch.inference_mode()
def measure_ceiling(
    device: torch.device,
    dtype: torch.dtype,
    *,
    clock: Clock | None = None,
    nbytes: int | None = None,
    side: int | None = None,
) -> Ceiling:
    """Measure what the device can do at most, in the model's precision.

    By default the copied tensor has as many bytes as don't fit into caches, and the multiplied matrices a `side` that
    reaches full speed.
    """
    clock = clock or clock_for(device)

    def best(work: Callable[[], object]) -> float:
        work()
        return min(seconds_of(clock, work) for _ in range(TRIES))

    nbytes = nbytes or _size(device)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copying = best(lambda: target.copy_(source))
    whole, width = source.view(torch.float32), 4096
    matrix = source.view(dtype)[: nbytes // dtype.itemsize // width * width].view(-1, width)
    vector = torch.ones(width, dtype=dtype, device=device)
    reading = min(best(lambda: torch.mv(matrix, vector)), best(whole.sum))
    side = side or (CPU_SIDE if device.type == "cpu" else DEVICE_SIDE)
    left = torch.full((side, side), 0.5, dtype=dtype, device=device)
    out = torch.empty_like(left)
    multiplying = best(lambda: torch.mm(left, left, out=out))
    return Ceiling(2 * nbytes / copying, matrix.numel() * dtype.itemsize / reading, 2 * side**3 / multiplying)


def _size(device: torch.device) -> int:
    """Bytes to copy: as many as wanted, but no more than an eighth of what is free."""
    wanted, free = CPU_BYTES if device.type == "cpu" else DEVICE_BYTES, free_bytes(device)
    return wanted if free is None else max(min(wanted, free // 8) // PAGE * PAGE, PAGE)
