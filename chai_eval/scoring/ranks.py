"""The processes that score together, as `accelerate launch` or `torchrun` start them: what each has, all get to know.

Only Python objects are exchanged here, over gloo. Every process has the whole model and takes its turn at the work, or
has a part of the model (tensor parallel) and does all of the work with the others: what is exchanged for that is
transformers' business, in a group of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from chai_eval.errors import RunError, failure_line

# How long one process waits for another: longer than the slowest of them takes for a model or a batch. A process that
# dies is noticed at once.
TIMEOUT = timedelta(hours=1)

_VALUE, _PULSE, _FAILED, _LEFT = "value", "pulse", "failed", "left"

_Work = TypeVar("_Work")
_Done = TypeVar("_Done")


class OtherRankError(RunError):
    """What went wrong in another of the processes, which therefore ends here as well."""


@dataclass
class Ranks:
    """This process among those that score together; alone unless told otherwise, and then nothing is exchanged.

    All of them must make the same calls in the same order. Where one fails on its own, `together` and `leave` let the
    others know in place of the value that they wait for. `local_rank` and `local_size` count those on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    _parted: bool = field(default=False, repr=False)
    _lost: bool = field(default=False, repr=False)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Give a value and get everybody's, by rank; OtherRankError where another process failed before it had one."""
        return [each for _, each in self._exchange(_VALUE, value)]

    def broadcast(self, value: Any) -> Any:
        """Get the value of the first process; what the others give is not looked at. Raises as `gather` does."""
        while True:
            kind, given = self._exchange(_VALUE, value if self.first else None)[0]
            if kind != _PULSE:
                return given

    def rounds(self, work: Sequence[_Work], do: Callable[[_Work], Iterable[_Done]]) -> Iterator[list[_Done]]:
        """Let each process do one piece of every round of work, and yield what all of them have done in it.

        Neighbours should take about equally long, so that nobody waits long for the others. Raises as `gather` does.
        """
        for start in range(0, len(work), self.size):
            mine = work[start : start + self.size][self.rank : self.rank + 1]
            gathered = self.gather([each for piece in mine for each in do(piece)])
            yield [each for done in gathered for each in done]

    def pulse(self) -> None:
        """Let the others know that the first process, whose `broadcast` they wait for, is still alive."""
        self._exchange(_PULSE, None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do something in every process, and fail in all where it fails in one; not to be nested."""
        try:
            yield
        except OtherRankError:
            raise
        except Exception as error:
            with suppress(OtherRankError):
                self._exchange(_FAILED, failure_line(error))
            raise
        self._exchange(_VALUE, None)

    def leave(self) -> None:
        """Wait until all are done: a launcher ends the others as soon as one ends badly, with their last lines unsaid.

        One that comes here before its time, for an error that nothing shared, ends the others too.
        """
        if self.size == 1:
            return
        import torch.distributed

        with suppress(OtherRankError):
            self._exchange(_LEFT, None)
        if self._parted and not self._lost:
            # The others learn of it now, and may have something to say.
            with suppress(OtherRankError):
                self._all(_LEFT, None)
        torch.distributed.destroy_process_group()

    def _exchange(self, kind: str, value: Any) -> list[tuple[str, Any]]:
        if self.size == 1:
            return [(kind, value)]
        if self._parted:
            raise OtherRankError("processes: another one has ended")
        met = self._all(kind, value)
        left = [rank for rank, (theirs, _) in enumerate(met) if theirs == _LEFT]
        if left and len(left) < self.size:
            self._parted = True
            raise OtherRankError(f"process {left[0]} of {self.size}: ended before its time; debug=true may show why")
        failed = [(rank, line) for rank, (theirs, line) in enumerate(met) if theirs == _FAILED]
        if failed:
            rank, line = failed[0]
            raise OtherRankError(f"process {rank} of {self.size}: {line}")
        return met

    def _all(self, kind: str, value: Any) -> list[tuple[str, Any]]:
        import torch.distributed

        met: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(met, (kind, value))
        except RuntimeError as error:
            self._parted = self._lost = True
            raise OtherRankError("processes: another one was lost or hangs; the launcher says which") from error
        return met


def ranks_of(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Join the processes that a launcher started this one with, by the environment; RunError if out of reach."""
    size = environment.get("WORLD_SIZE", "1")
    if size == "1" or not {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return Ranks()
    import torch.distributed

    # What parts of a model on GPUs exchange goes over NCCL, which is not started unless there are any.
    nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    try:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"processes: the {size} can't be joined ({failure_line(error)})") from error
    local_size = environment.get("LOCAL_WORLD_SIZE", size)
    return Ranks(int(environment["RANK"]), int(size), int(environment["LOCAL_RANK"]), int(local_size))
