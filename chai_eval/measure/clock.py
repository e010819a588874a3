"""Clocks: device events on a GPU, a synchronised monotonic clock elsewhere."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments in the work that a device is given, and tells the time between them."""

    name: str

    def mark(self) -> Any:
        """The moment at which everything asked of the device so far is done."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two moments; waits until the device has reached them."""


class EventClock:
    """CUDA events: marking does not hold the device up, so tokens follow each other as they do in use."""

    name = "device events"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3  # milliseconds


class HostClock:
    """The process's monotonic clock, read when the device has finished."""

    name = "monotonic clock"

    def __init__(self, device: torch.device) -> None:
        self.waits = device.type != "cpu"

    def mark(self) -> int:
        if self.waits:
            torch.accelerator.synchronize()
        return time.perf_counter_ns()

    def seconds(self, start: int, end: int) -> float:
        return (end - start) / 1e9


def clock_for(device: torch.device) -> Clock:
    """The clock for work on a device."""
    return EventClock(device) if device.type == "cuda" else HostClock(device)


def seconds_of(clock: Clock, work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    start = clock.mark()
    work()
    return clock.seconds(start, clock.mark())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without Python's garbage collector, which would stop some token or other."""
    gc.collect()
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
