"""Clocks (device events on a GPU, a synchronised monotonic clock elsewhere), and turns: contenders run in a loop.

Each runs once in every repetition, in an order that favours none.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


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
    # Of the young generations: what earlier turns left behind lies there, since the collector was off. A collection of
    # all takes a quarter of a second in a large process, and there is one before every turn.
    gc.collect(1)
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@dataclass(frozen=True)
class Turn(Generic[T]):
    """One turn: whose, in which repetition and at which place in it (both from 0), and what it gave."""

    contender: str
    repetition: int
    place: int
    found: T


def in_turn(contenders: Mapping[str, Callable[[], T]], repetitions: int, warmup: int = 0) -> Iterator[Turn[T]]:
    """Run every contender once in each repetition; what `warmup` repetitions before the first give is dropped."""
    for repetition in range(-warmup, repetitions):
        for place, name in enumerate(turn_order(list(contenders), repetition)):
            found = contenders[name]()
            if repetition >= 0:
                yield Turn(name, repetition, place, found)


def turn_order(contenders: Sequence[T], repetition: int) -> list[T]:
    """Contenders in the order of a repetition: a row of a Williams design.

    Over as many repetitions as there are contenders (twice as many where their number is odd) each has every place
    equally often, so that drift (a processor that heats up, a neighbour that wakes) hits all alike, and in them each
    runs right after every other one equally often, so that no one always finds the caches as the same one left them.

    Source: E. J. Williams, Experimental designs balanced for the estimation of residual effects of treatments,
    Australian Journal of Scientific Research A 2 (1949), 149-168.
    """
    count = len(contenders)
    # 0, 1, -1, 2, -2 …: the steps from each to the next are all different, modulo an even number of contenders.
    order = [contenders[(repetition + (place + 1) // 2 * (-1) ** (place + 1)) % count] for place in range(count)]
    # Modulo an odd one there are only half of the steps; the other half are those of the order turned round.
    return order[::-1] if count % 2 and repetition // count % 2 else order


def seconds_in_turn(
    contenders: Mapping[str, Callable[[T], object]], layers: Sequence[T], device: torch.device, *, repetitions: int
) -> dict[str, list[float]]:
    """Seconds that each contender takes for a layer, by repetition: it has its turn at one layer after the other."""
    clock = clock_for(device)

    def through(work: Callable[[T], object]) -> None:
        for layer in layers:
            work(layer)  # whose output is let go of, as a model does: kept, it would cost fresh memory

    timed = {name: partial(seconds_of, clock, partial(through, work)) for name, work in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with undisturbed(), torch.inference_mode():
        for turn in in_turn(timed, repetitions, warmup=2):
            seconds[turn.contender].append(turn.found / len(layers))
    return seconds
