"""Room: how much memory there is, how much a point will ask for, and what is recorded where it doesn't fit."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape

if TYPE_CHECKING:
    from chai_eval.measure.contenders import Contender
    from chai_eval.measure_settings import Point

T = TypeVar("T")

# Words with which allocators say that there is no memory, where they have no exception of their own.
NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)


@dataclass(frozen=True)
class OutOfMemory:
    """A point that didn't fit: what it would have needed beside the weights, and what was free, where that is told.

    Where `foreseen` it was not tried: a process that asks for too much is killed, and its measurements with it.
    """

    asked_bytes: int | None
    free_bytes: int | None
    foreseen: bool


def attempt(device: torch.device, work: Callable[[], T]) -> T | OutOfMemory:
    """What some work gives; where it runs out of memory that is noted, and what it held is freed. Other errors pass."""
    try:
        return work()
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        asked = _asked(str(error))
        error.__traceback__ = None  # its frames hold the tensors
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return OutOfMemory(asked, free_bytes(device), False)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(NO_MEMORY.search(str(error)))


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where it doesn't say.

    On a CPU the least of what the machine has available and what the process's control group may still take: in a
    container the machine's figure is not the limit.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [each for each in (_available(), _left_in_group()) if each is not None]
    return min(known) if known else None


def needed_bytes(model: PreTrainedModel, contender: Contender, point: Point) -> int:
    """Bytes that a generation needs beside the weights, estimated from the shapes.

    The cache of every head (representatives are chosen when it is full) with one layer of it twice, the widest
    activations of a layer, eager attention's scores (in the model's precision, masked, and in float32), and logits.
    """
    shape, config, size = attention_shape(model), model.config.get_text_config(), model.dtype.itemsize
    tokens = point.batch * (point.length + point.new_tokens)
    cache = (shape.layers + 1) * tokens * 2 * shape.kv_heads * shape.head_dim * size
    inner = max(getattr(config, name, 0) or 0 for name in ("intermediate_size", "ffn_dim", "hidden_size"))
    activations = tokens * (3 * inner + 8 * config.hidden_size) * size
    scores = point.batch * shape.heads * point.length**2 * (2 * size + 8) if contender.rival == "eager" else 0
    return cache + activations + scores + 8 * point.batch * config.vocab_size


def foreseen(model: PreTrainedModel, contender: Contender, point: Point) -> OutOfMemory | None:
    """Why a point must not be tried: on a CPU the system kills a process that asks for too much."""
    if model.device.type != "cpu":
        return None
    asked, free = needed_bytes(model, contender, point), free_bytes(model.device)
    return OutOfMemory(asked, free, True) if free is not None and asked > free else None


def proc_bytes(path: str, field: str) -> int | None:
    """A size from one of Linux's status files, in bytes; None where it isn't told."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path(path).read_text(), flags=re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


def _available() -> int | None:
    if (told := proc_bytes("/proc/meminfo", "MemAvailable")) is not None:
        return told
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


# Folder of the group's memory, and its limit and usage there, in versions 2 and 1 of control groups.
_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def _left_in_group() -> int | None:
    for folder, *sizes in _GROUPS:
        try:
            allowed, used = (int(Path(folder, name).read_text()) for name in sizes)
            # Pages of files count as used, and are given back when memory is short.
            told = Path(folder, "memory.stat").read_text()
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", told, flags=re.MULTILINE)
        except (OSError, ValueError):  # no such group, or "max"
            continue
        return allowed - used + (int(cached[1]) if cached is not None else 0)
    return None


def _asked(message: str) -> int | None:
    """How much an allocator says that it was asked for."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    found = re.search(rf"[Tt]ried to allocate ([\d.]+) ({'|'.join(units)})", message)
    return None if found is None else int(float(found[1]) * 1024 ** units.index(found[2]))
