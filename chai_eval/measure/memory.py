"""Memory: what the cache holds, what the formula says, and the peak of each phase, in a pass of its own."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from chai_eval.attention import RowLayer
from chai_eval.attention.shape import AttentionShape, attention_shape
from chai_eval.measure import generation
from chai_eval.measure.contenders import Contender
from chai_eval.measure.room import OutOfMemory, proc_bytes
from chai_eval.measure_settings import Point
from chai_eval.methods.base import LayerFootprint, plain_footprint


@dataclass(frozen=True)
class CacheSize:
    """What a cache holds, in bytes: a "full cache" every head's keys and values, a "clustered" one fewer.

    - `allocated_bytes`: storage of keys and values, room to grow included
    - `formula_bytes`: L (H + G) d_h elements a layer, K of the key heads that representatives read, V of all, of real
      tokens
    - `logical_bytes`: elements of real tokens and kept heads that the cache says it has
    - `full_bytes`: every head's keys and values of as many tokens, 2 L H_kv d_h elements a layer
    - `projection_bytes`: weights of the kept heads' projections, gathered once for these requests and held beside it
    """

    kind: str
    allocated_bytes: int
    formula_bytes: int
    logical_bytes: int
    full_bytes: int
    projection_bytes: int

    @property
    def saved(self) -> float:
        """Share of what every head takes that isn't allocated."""
        return 1 - self.allocated_bytes / self.full_bytes


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of a phase: its cache at the end and, where peaks were taken, most in use at once and in use at the end.

    Both are given also `above_before`: less what was in use before the prefill.
    """

    cache: CacheSize
    peak_bytes: int | None = None
    peak_above_before_bytes: int | None = None
    settled_bytes: int | None = None
    settled_above_before_bytes: int | None = None


@dataclass(frozen=True)
class Memory:
    """Memory of one generation; `decode` is None where the prefill gives the only token.

    `before_bytes` are in use before the prefill; `paths` says how often clustered layers projected all heads, or only
    representatives, by the path's name; `kind` and `peak_reset` which peaks were taken, and whether the system let them
    be reset for each phase; `fresh_process` is the same generation in a process that has done nothing else.
    """

    prefill: PhaseMemory
    decode: PhaseMemory | None = None
    before_bytes: int | None = None
    paths: dict[str, int] | None = None
    kind: str | None = None
    peak_reset: bool | None = None
    fresh_process: Memory | OutOfMemory | None = None

    @property
    def peaks(self) -> Memory:
        """Where peaks were taken: in the fresh process, where there was one."""
        return self.fresh_process if isinstance(self.fresh_process, Memory) else self


class DevicePeak:
    """Memory that tensors take on a CUDA device: most at once since a phase began, and now."""

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

    Where the system doesn't let the peak be `reset` for each phase it is that of the process so far.
    """

    name = "resident memory of a fresh process"

    def __init__(self) -> None:
        self.reset = self._reset()

    def start(self) -> None:
        self._reset()

    def read(self) -> int:
        peak = proc_bytes("/proc/self/status", "VmHWM")
        if peak is not None:
            return peak
        # Linux counts in KiB, macOS in bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def now(self) -> int:
        return proc_bytes("/proc/self/status", "VmRSS") or self.read()

    @staticmethod
    def _reset() -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True


Peak = DevicePeak | ResidentPeak


@torch.inference_mode()
def measure_memory(model: PreTrainedModel, contender: Contender, point: Point, seed: int, peak: Peak | None) -> Memory:
    """Run one generation and take its memory; without a `peak`, that of the cache alone."""
    layers = contender.method.footprint(model)
    with contender.applied(model) as handle:
        run = generation.Generation(model, generation.prompt(model, point, seed))
        gc.collect()
        before = None if peak is None else peak.now()

        def phase(passes: int) -> PhaseMemory:
            if peak is not None:
                peak.start()
            for _ in range(passes):
                run.forward()
            (cache,) = run.past.values()
            size = cache_size(cache, model, point.batch * (point.length + len(run.new) - 1), layers)
            if peak is None or before is None:
                return PhaseMemory(size)
            highest, settled = peak.read(), peak.now()
            return PhaseMemory(size, highest, highest - before, settled, settled - before)

        prefill = phase(1)
        decode = phase(point.steps) if point.steps else None
        paths = None if handle is None else dict(handle.paths)
    taken = (None, None) if peak is None else (peak.name, peak.reset)
    return Memory(prefill, decode, before, paths, *taken)


def cache_size(
    cache: Cache, model: PreTrainedModel, tokens: int, layers: Sequence[LayerFootprint] | None = None
) -> CacheSize:
    """What a cache of `tokens` tokens, all requests together, holds, and should where `layers` say what is cached."""
    shape, size = attention_shape(model), model.dtype.itemsize
    full = 2 * shape.layers * tokens * shape.kv_heads * shape.head_dim * size
    rows = [layer for layer in cache.layers if isinstance(layer, RowLayer)]
    if not rows:
        held = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
        return CacheSize("full cache", _storage(held), full, full, full, 0)
    layers = layers or plain_footprint(model)
    formula = sum(formula_bytes(layer, each, shape, size) for layer, each in zip(rows, layers, strict=True))
    narrow = [each.weight for layer in rows for each in layer.projections.values()]
    return CacheSize(
        "full cache" if formula == full else "clustered",
        sum(layer.nbytes() for layer in rows),
        formula,
        sum(layer.logical_bytes() for layer in rows),
        full,
        _storage(narrow),
    )


def formula_bytes(layer: RowLayer, footprint: LayerFootprint, shape: AttentionShape, size: int) -> int:
    """Bytes cached of all tokens of a layer: L (H + G) d_h numbers of so many, from its membership and footprint alone.

    Under grouped-query attention G are the distinct key heads that a request's representatives read.
    """
    assert layer.lengths is not None
    besides = len(layer.lengths) * footprint.first_numbers * size
    if layer.membership is None:  # and as long as a probe is not complete, every head is kept
        kept = LayerFootprint.full(shape) if footprint.probe_tokens else footprint
        each = sum(kept.bytes_per_token(shape.head_dim, size, 1))  # of a token that is held
        return int(int(layer.lengths.sum()) * each) + besides
    read = layer.membership.representative // (shape.heads // shape.kv_heads)
    distinct = [len(set(row)) for row in read.tolist()]
    shared = footprint.outputs < shape.heads  # values are, too
    heads = sum(
        length * (keys + (keys if shared else footprint.values))
        for length, keys in zip(layer.lengths.tolist(), distinct, strict=True)
    )
    return size * shape.head_dim * heads + besides


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of parameters and buffers, tied ones once."""
    return _storage([*model.parameters(), *model.buffers()])


def _storage(held: Iterable[object]) -> int:
    """Bytes of the storage that tensors lie in, each once."""
    storages = [each.untyped_storage() for each in held if isinstance(each, Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
