"""Judge many model types, each in a process of its own, so that one that crashes or hangs is only one."""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import torch

from chai_eval.benchmark.models.verdict import Verdict, judge


def sweep(
    kinds: Sequence[str], *, processes: int = 2, seconds: float = 180.0, judged: Callable[[str], Verdict] = judge
) -> Iterator[Verdict]:
    """Verdicts of model types, in their order, so many processes at once on one thread each.

    One type may take so many seconds; what judges it in the process must stand at the top of a module.
    """
    # Processes fork from one in which everything is imported already, and nothing has run.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ThreadPoolExecutor(processes) as threads:
        yield from threads.map(partial(_apart, context, judged, seconds), kinds)


def _apart(
    context: multiprocessing.context.ForkServerContext, judged: Callable[[str], Verdict], seconds: float, kind: str
) -> Verdict:
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sending, judged, kind))
    process.start()
    sending.close()
    try:
        receiving.recv()  # its time begins when it does: the first waits until everything is imported
        if receiving.poll(seconds):
            return receiving.recv()
        return Verdict(kind, reason=f"no answer in {seconds:.0f} s")
    except EOFError:
        process.join()
        return Verdict(kind, reason=f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiving.close()


def _child(sending: Connection, judged: Callable[[str], Verdict], kind: str) -> None:
    sending.send("begun")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sending.send(judged(kind))
