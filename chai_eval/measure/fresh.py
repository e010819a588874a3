"""Peak resident memory of one configuration, in a process that has done nothing else.

`python -m chai_eval.measure.fresh` reads what to run from stdin and writes what it took to stdout, both as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from chai_eval.errors import RunError
from chai_eval.measure.contenders import Contender
from chai_eval.measure.generation import warm_up
from chai_eval.measure.memory import Memory, ResidentPeak, measure_memory
from chai_eval.measure.room import OutOfMemory, attempt, free_bytes
from chai_eval.measure.serialise import from_json, to_json
from chai_eval.measure_settings import Point
from chai_eval.methods import Method, build_method
from chai_eval.methods.composed import ComposedMethod
from chai_eval.models import load
from chai_eval.settings import ModelSettings, parse_model

# glibc keeps freed memory below this size for later, and raises the bound as it goes; fixed, what is freed goes back.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# What the answer follows: libraries may print, too.
REPORT = "chai_eval.measure.fresh "


def fresh_memory(model: ModelSettings, contender: Contender, point: Point, seed: int) -> Memory | OutOfMemory:
    """Take the memory of one generation in a fresh process, which loads the model anew.

    RunError where that process fails otherwise than for want of memory.
    """
    described = {"name": contender.name, "rival": contender.rival, "method": recipe(contender.method)}
    asked = {"model": model.as_config(), "contender": described, "point": vars(point), "seed": seed}
    path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "chai_eval.measure.fresh"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(path)},
        check=False,
    )
    _, reported, answer = done.stdout.rpartition(REPORT)
    if reported and (found := json.loads(answer)) is not None:
        memory: Memory = from_json(Memory, found)
        return memory
    if reported or done.returncode == -signal.SIGKILL:  # what the system does to a process that asks for too much
        return OutOfMemory(None, free_bytes(torch.device("cpu")), False)
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise RunError(f"measure: the process that takes the memory of {contender.name} failed ({last[:300]})")


def recipe(method: Method) -> dict[str, Any]:
    """What `build_method` makes the method of, as JSON values."""
    if isinstance(method, ComposedMethod):
        first, *others = map(recipe, method.methods)
        return {**first, "with": others}
    given = {each.name: getattr(method, each.name) for each in fields(method)}  # type: ignore[arg-type]
    return {"name": method.name, **given}


def _measured(asked: dict[str, Any]) -> Memory:
    model, _ = load(parse_model(asked["model"]))
    given, point, peak = asked["contender"], Point(**asked["point"]), ResidentPeak()
    contender = Contender(given["name"], given["rival"], build_method(**given["method"]))
    with contender.applied(model):
        warm_up(model, point)
    return measure_memory(model, contender, point, asked["seed"], peak)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    found = attempt(torch.device("cpu"), lambda: _measured(given))
    sys.stdout.write(REPORT + json.dumps(to_json(found) if isinstance(found, Memory) else None))
