"""What a benchmark on a GPU finds: rows beside what bytes, operations and the measured machine allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from chai_eval.attention.decode_graph import captured_graph
from chai_eval.benchmark.records import provenance
from chai_eval.checksum import write_document
from chai_eval.markdown import table
from chai_eval.measure.ceiling import measure_ceiling
from chai_eval.measure.room import NO_MEMORY
from chai_eval.measure.statistics import quantiles


@dataclass(frozen=True)
class Machine:
    """What a device was measured to do: bytes read and written in a copy, and operations of a matrix product."""

    name: str
    bytes_per_second: float
    flops_per_second: float

    def seconds(self, nbytes: float, flops: float) -> float:
        """The least that some work takes."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


@dataclass(frozen=True)
class GpuRow:
    """One contender at one shape; `seconds` are samples, `limit` the least that counted work takes, in seconds.

    Where `captured` it was run as one CUDA graph. `held_bytes` are those of the cache, `peak_bytes` all at most.
    """

    what: str
    setting: str
    contender: str
    seconds: list[float] = field(default_factory=list)
    limit: float | None = None
    captured: bool = False
    held_bytes: int | None = None
    peak_bytes: int | None = None
    note: str | None = None

    @property
    def median(self) -> float | None:
        """Seconds; None where nothing was timed."""
        return quantiles(self.seconds).median if self.seconds else None

    @property
    def share(self) -> float | None:
        """Of what the machine allows, how much was reached."""
        return None if self.median is None or self.limit is None else self.limit / self.median

    def cells(self) -> dict[str, str]:
        """A line of the table."""
        took, share, nothing = self.median, self.share, "–"
        return {
            "what": self.what, "setting": self.setting, "contender": self.contender,
            "ms": nothing if took is None else f"{1e3 * took:.4g}",
            "limit ms": nothing if self.limit is None else f"{1e3 * self.limit:.4g}",
            "of limit": nothing if share is None else f"{100 * share:.1f} %",
            "captured": "yes" if self.captured else "no",
            "held MiB": nothing if self.held_bytes is None else f"{self.held_bytes / 2**20:.0f}",
            "note": self.note or nothing,
        }  # fmt: skip


@dataclass
class Report:
    """Rows so far, written after each of them; `budget` seconds are those of the whole run."""

    path: Path
    machine: Machine
    budget: float
    tiny: bool
    started: float = field(default_factory=time.monotonic)
    rows: list[GpuRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def part(self, name: str, seconds: float, work: Callable[[], object]) -> None:
        """Do some work that takes about so many seconds, if there is time; what memory does not hold is noted."""
        spent = time.monotonic() - self.started
        if spent + seconds > self.budget:
            self.left_out.append(f"{name}: no time, {spent:.0f} of {self.budget:.0f} s spent")
        else:
            try:
                work()
            except (MemoryError, RuntimeError) as error:
                said = " ".join(str(error).split())[:200]
                why = "out of memory" if NO_MEMORY.search(said) else f"{type(error).__name__}: {said}"
                self.left_out.append(f"{name}: {why}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        self.write()

    def add(self, row: GpuRow) -> None:
        """Keep a row, and write all of them."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """The record as it stands: a run that is killed loses nothing."""
        content: Mapping[str, Any] = {
            "benchmark": "gpu", "tiny": self.tiny, "machine_measured": asdict(self.machine), **self.facts,
            "rows": [{**asdict(row), "median": row.median, "share": row.share} for row in self.rows],
            "left_out": self.left_out, "spent_seconds": round(time.monotonic() - self.started, 1), **provenance(),
        }  # fmt: skip
        write_document(self.path, content, files={})

    def table(self) -> str:
        """All rows, and what was left out."""
        said = "".join(f"\nleft out: {each}" for each in self.left_out)
        return table([row.cells() for row in self.rows], left=3) + said


def measured(device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Machine:
    """What the device reaches in a large copy and in a product of large matrices."""
    nbytes, side = (1 << 22, 128) if tiny else (1 << 31, 8192)
    found = measure_ceiling(device, dtype, nbytes=nbytes, side=side)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Machine(name, found.copy_bytes_per_second, found.flops_per_second)


def captured(work: Callable[[], object], device: torch.device) -> tuple[Callable[[], object], bool]:
    """Some work as one CUDA graph, where it can be one; and whether it is."""
    work()
    if device.type != "cuda":
        return work, False
    try:
        return captured_graph(work, device, warm_up=work).replay, True
    except RuntimeError:
        torch.cuda.synchronize(device)
        return work, False
