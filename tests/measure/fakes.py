"""A clock that ticks when it is looked at, and contenders that fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from chai_eval.measure.contenders import Contender


@dataclass
class TickingClock:
    """Every mark is one second after the one before; marks before the last are kept."""

    name: str = "ticks"
    now: int = 0
    marks: list[int] = field(default_factory=list)

    def mark(self) -> int:
        self.now += 1
        self.marks.append(self.now)
        return self.now

    def seconds(self, start: int, end: int) -> float:
        return float(end - start)


@dataclass(frozen=True)
class Failing(Contender):
    """A contender that fails when it is applied for the `nth` time."""

    error: BaseException = field(default_factory=lambda: torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 0"))
    nth: int = 1
    applied_so_far: list[int] = field(default_factory=list)

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[None]:
        self.applied_so_far.append(1)
        if len(self.applied_so_far) == self.nth:
            raise self.error
        yield
