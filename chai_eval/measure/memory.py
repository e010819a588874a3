"""Memory: what the cache holds, what the formula says, and the peak of each phase, in a pass of its own."""

from __future__ import annotations

import gc
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from chai_eval.attention import RowLayer
from chai_eval.attention.inject import attention_shape
from chai_eval.measure import generation
from chai_eval.measure.contenders import Contender
from chai_eval.measure.settings import Point


@dataclass(frozen=True)
class CacheSize:
    """What a cache holds.

    Attributes
    ----------
    kind : str
        "clustered": representatives' keys only in some layer; "full cache": every head's, in all layers.
    allocated_bytes : int
        Storage of keys and values, room to grow included.
    formula_bytes : int
        L (H + G) d_h elements a layer: K of the key heads that representatives read, V of all, of real tokens.
    logical_bytes : int
        Elements of real tokens and kept heads that the cache says it has.
    full_bytes : int
        What every head's keys and values of as many tokens take: 2 L H_kv d_h elements a layer.
    projection_bytes : int
        Weights of the kept heads' projections, gathered once for these requests and held beside the cache.
    """

    kind: str
    allocated_bytes: int
    formula_bytes: int
    logical_bytes: int
    full_bytes: int
    projection_bytes: int = 0


class Peak(Protocol):
    """Peak memory of a phase, in bytes."""

    def start(self) -> None:
        """Begin a phase."""

    def read(self) -> int:
        """Most memory in use at once since the phase began."""

    def now(self) -> int:
        """Memory in use."""


class DevicePeak:
    """Memory that tensors take on a CUDA device."""

    name, reset = "device memory allocated", True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device)


class ResidentPeak:
    """Resident memory of this process. Means something in a fresh one only: freed memory needn't be given back.

    Attributes
    ----------
    reset : bool
        The system lets the peak be reset for each phase; otherwise it is that of the process so far.
    """

    name = "resident memory of a fresh process"

    def __init__(self) -> None:
        self.reset = self._reset()

    def start(self) -> None:
        self._reset()

    def read(self) -> int:
        peak = _status("VmHWM")
        if peak is not None:
            return peak
        # Linux counts in KiB, macOS in bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def now(self) -> int:
        return _status("VmRSS") or self.read()

    @staticmethod
    def _reset() -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True


@torch.inference_mode()
def measure_memory(
    model: PreTrainedModel, contender: Contender, point: Point, seed: int, peak: Peak | None
) -> dict[str, Any]:
    """Run one generation and take its memory.

    Parameters
    ----------
    peak : Peak or None
        None where peaks are taken elsewhere.

    Returns
    -------
    dict
        `prefill` and `decode`, each with `cache` (see `CacheSize`) and, where there is a `peak`: `peak_bytes`,
        `settled_bytes` at the end of the phase, and both less what was in use before the prefill. `paths` says how
        often clustered layers projected all heads or only representatives.
    """
    with contender.applied(model) as handle:
        run = generation.Generation(model, generation.prompt(model, point, seed))
        gc.collect()
        before = peak.now() if peak is not None else 0
        found: dict[str, Any] = {}
        if peak is not None:
            found["before_bytes"] = before
        found["prefill"] = _phase(run, run.prefill, model, peak, before)
        if point.steps:

            def decode() -> None:
                for _ in range(point.steps):
                    run.step()

            found["decode"] = _phase(run, decode, model, peak, before)
        if handle is not None:
            found["paths"] = dict(handle.paths)
    return found


def _phase(
    run: generation.Generation, work: Callable[[], None], model: PreTrainedModel, peak: Peak | None, before: int
) -> dict[str, Any]:
    if peak is not None:
        peak.start()
    work()
    assert run.cache is not None
    tokens = run.prompt.shape[0] * (run.prompt.shape[1] + len(run.new) - 1)
    found: dict[str, Any] = {"cache": vars(cache_size(run.cache, model, tokens))}
    if peak is not None:
        highest, settled = peak.read(), peak.now()
        found |= {
            "peak_bytes": highest,
            "peak_above_before_bytes": highest - before,
            "settled_bytes": settled,
            "settled_above_before_bytes": settled - before,
        }
    return found


def cache_size(cache: Cache, model: PreTrainedModel, tokens: int) -> CacheSize:
    """What a cache of `tokens` tokens, all requests together, holds and should hold."""
    shape, size = attention_shape(model), model.dtype.itemsize
    full = 2 * shape.layers * tokens * shape.kv_heads * shape.head_dim * size
    rows = [layer for layer in cache.layers if isinstance(layer, RowLayer)]
    if not rows:
        return CacheSize(
            "full cache", _storage([each for layer in cache.layers for each in _tensors(layer)]), full, full, full
        )
    clustered = any(layer.membership is not None for layer in rows)
    elements = sum(formula_elements(layer, shape.heads, shape.kv_heads, shape.head_dim) for layer in rows)
    narrow = [each.weight for layer in rows for each in layer.projections.values()]
    return CacheSize(
        "clustered" if clustered else "full cache",
        sum(layer.nbytes() for layer in rows),
        elements * size,
        sum(layer.logical_elements() for layer in rows) * size,
        full,
        _storage(narrow),
    )


def formula_elements(layer: RowLayer, heads: int, kv_heads: int, head_dim: int) -> int:
    """L (H + G) d_h of one layer, from its membership alone; under grouped-query attention G are distinct key heads."""
    assert layer.lengths is not None
    if layer.membership is None:
        return int(layer.lengths.sum()) * 2 * kv_heads * head_dim
    read = layer.membership.representative // (heads // kv_heads)
    elements = 0
    for length, row in zip(layer.lengths.tolist(), read.tolist(), strict=True):
        values = kv_heads if layer.values is not None and layer.values.shape[1] == kv_heads else len(set(row))
        elements += length * (len(set(row)) + values) * head_dim
    return elements


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of parameters and buffers, tied ones once."""
    return _storage([*model.parameters(), *model.buffers()])


def _tensors(layer: Any) -> list[Tensor]:
    held = [getattr(layer, name, None) for name in ("keys", "values")]
    return [each for each in held if isinstance(each, Tensor)]


def _storage(tensors: list[Any]) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def _status(field: str) -> int | None:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found is not None else None
