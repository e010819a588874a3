"""The machine's own ceiling: how fast it moves bytes, and how fast it multiplies matrices, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from chai_eval.measure.clock import Clock, clock_for, seconds_of
from chai_eval.measure.room import free_bytes
from chai_eval.measure.work import Work

# Large enough that no processor keeps it in its caches; GPUs need more before they reach full speed.
CPU_BYTES, DEVICE_BYTES = 1 << 28, 1 << 31
CPU_SIDE, DEVICE_SIDE = 2048, 8192
TRIES = 5
# Sizes are multiples of this, which every precision and the rows of the multiplied matrix divide.
PAGE = 1 << 15


@dataclass(frozen=True)
class Ceiling:
    """The best of several tries.

    Attributes
    ----------
    copy_bytes_per_second : float
        Of a large copy, bytes read and bytes written together.
    read_bytes_per_second : float
        Of a sum, or a product of a large matrix and a vector: bytes that are only read, as weights and caches are.
    flops_per_second : float
        Of a large matrix product in the model's precision.
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
    """Measure what the device can do at most.

    Parameters
    ----------
    nbytes : int or None
        Bytes of the copied tensor; by default what doesn't fit into caches.
    side : int or None
        Rows and columns of the multiplied matrices.
    """
    clock = clock or clock_for(device)
    nbytes = nbytes or _size(device)
    side = side or (CPU_SIDE if device.type == "cpu" else DEVICE_SIDE)
    copied, read = _bytes_per_second(device, dtype, clock, nbytes)
    return Ceiling(copied, read, _flops_per_second(device, dtype, clock, side))


def _size(device: torch.device) -> int:
    """Bytes to copy: as many as wanted, but no more than an eighth of what is free."""
    wanted, free = CPU_BYTES if device.type == "cpu" else DEVICE_BYTES, free_bytes(device)
    return wanted if free is None else max(min(wanted, free // 8) // PAGE * PAGE, PAGE)


def _bytes_per_second(device: torch.device, dtype: torch.dtype, clock: Clock, nbytes: int) -> tuple[float, float]:
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copying = _best(clock, lambda: target.copy_(source))
    whole, width = source.view(torch.float32), 4096
    matrix = source.view(dtype)[: nbytes // dtype.itemsize // width * width].view(-1, width)
    vector = torch.ones(width, dtype=dtype, device=device)
    reading = min(_best(clock, lambda: torch.mv(matrix, vector)), _best(clock, whole.sum))
    return 2 * nbytes / copying, matrix.numel() * dtype.itemsize / reading


def _flops_per_second(device: torch.device, dtype: torch.dtype, clock: Clock, side: int) -> float:
    left = torch.full((side, side), 0.5, dtype=dtype, device=device)
    out = torch.empty_like(left)
    return 2 * side**3 / _best(clock, lambda: torch.mm(left, left, out=out))


def _best(clock: Clock, work: Callable[[], object]) -> float:
    work()
    return min(seconds_of(clock, work) for _ in range(TRIES))
