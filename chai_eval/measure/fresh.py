"""Peak resident memory of one configuration, in a process that has done nothing else.

`python -m chai_eval.measure.fresh` reads what to run from stdin and writes what it took to stdout, both pickled.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import torch

from chai_eval.errors import RunError
from chai_eval.measure.contenders import Contender
from chai_eval.measure.generation import warm_up
from chai_eval.measure.memory import Memory, ResidentPeak, measure_memory
from chai_eval.measure.room import OutOfMemory, attempt, free_bytes
from chai_eval.measure_settings import Point
from chai_eval.models import load
from chai_eval.settings import ModelSettings

# glibc keeps freed memory below this size for later, and raises the bound as it goes; fixed, what is freed goes back.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# What the answer follows: libraries may print, too.
REPORT = b"chai_eval.measure.fresh "


def fresh_memory(model: ModelSettings, contender: Contender, point: Point, seed: int) -> Memory | OutOfMemory:
    """Take the memory of one generation in a fresh process, which loads the model anew.

    Raises
    ------
    RunError
        Where that process fails otherwise than for want of memory.
    """
    path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "chai_eval.measure.fresh"],
        input=pickle.dumps((model, contender, point, seed)),
        capture_output=True,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(path)},
        check=False,
    )
    _, reported, answer = done.stdout.rpartition(REPORT)
    if reported and (found := pickle.loads(answer)) is not None:
        return found
    if reported or done.returncode == -signal.SIGKILL:  # what the system does to a process that asks for too much
        return OutOfMemory(None, free_bytes(torch.device("cpu")), False)
    last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
    raise RunError(f"measure: the process that takes the memory of {contender.name} failed ({last[:300]})")


def _measured(settings: ModelSettings, contender: Contender, point: Point, seed: int) -> Memory:
    model, _ = load(settings)
    peak = ResidentPeak()
    with contender.applied(model):
        warm_up(model, point)
    return measure_memory(model, contender, point, seed, peak)


if __name__ == "__main__":
    given = pickle.load(sys.stdin.buffer)
    found = attempt(torch.device("cpu"), lambda: _measured(*given))
    sys.stdout.flush()
    sys.stdout.buffer.write(REPORT + pickle.dumps(found if isinstance(found, Memory) else None))
