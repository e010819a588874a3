"""Peak resident memory of one configuration, in a process that has done nothing else.

`python -m chai_eval.measure.fresh` reads what to run from stdin and writes what it took to stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chai_eval.errors import RunError
from chai_eval.measure.contenders import Contender, described
from chai_eval.measure.room import OutOfMemory, free_bytes, is_out_of_memory
from chai_eval.measure.settings import Point
from chai_eval.settings import ModelSettings

# glibc keeps freed memory below this size for later, and raises the bound as it goes; fixed, what is freed goes back.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
REPORT = "chai_eval.measure.fresh "


def fresh_memory(model: ModelSettings, contender: Contender, point: Point, seed: int) -> dict[str, Any] | OutOfMemory:
    """Take the memory of one generation in a fresh process, which loads the model anew.

    Raises
    ------
    RunError
        Where that process fails otherwise than for want of memory.
    """
    import torch

    package, already = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")
    asked = {
        "model": model.as_config(),
        "contender": described(contender),
        "point": vars(point),
        "seed": seed,
    }
    done = subprocess.run(
        [sys.executable, "-m", "chai_eval.measure.fresh"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(filter(None, (package, already)))},
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(REPORT):
            found: dict[str, Any] = json.loads(line.removeprefix(REPORT))
            return OutOfMemory(**found["out_of_memory"]) if "out_of_memory" in found else found
    if done.returncode == -signal.SIGKILL:  # what the system does to a process that asks for too much
        return OutOfMemory(None, free_bytes(torch.device("cpu")), False)
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise RunError(f"measure: the process that takes the memory of {contender.name} failed ({last[:300]})")


def main() -> int:
    """Run what stdin asks for."""
    asked = json.loads(sys.stdin.read())
    try:
        found = _measured(asked)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        import torch

        found = {"out_of_memory": vars(OutOfMemory(None, free_bytes(torch.device("cpu")), False))}
    sys.stdout.write(REPORT + json.dumps(found) + "\n")
    return 0


def _measured(asked: Mapping[str, Any]) -> dict[str, Any]:
    from chai_eval.measure.contenders import rebuilt
    from chai_eval.measure.generation import warm_up
    from chai_eval.measure.memory import ResidentPeak, measure_memory
    from chai_eval.models import load
    from chai_eval.settings import parse_model

    model, _ = load(parse_model(asked["model"]))
    contender, point, peak = rebuilt(asked["contender"]), Point(**asked["point"]), ResidentPeak()
    with contender.applied(model):
        warm_up(model, point)
    found = measure_memory(model, contender, point, asked["seed"], peak)
    return found | {"kind": peak.name, "peak_reset": peak.reset}


if __name__ == "__main__":
    sys.exit(main())
