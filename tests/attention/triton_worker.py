"""Kernels run by triton's interpreter, or compiled for a GPU that is not here, each in a process of its own.

Triton reads `TRITON_INTERPRET` as it is imported, for good: no other test must see it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch


@contextmanager
def worker(**environment: str) -> Iterator[Callable[..., Any]]:
    """A process with some environment, and what calls a function of this file in it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_begin, initargs=(environment,)) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def _begin(environment: dict[str, str]) -> None:
    os.environ.update(environment)


def called(module: str, name: str, *args: Any) -> Any:
    """Call a function of `chai_eval.attention.kernels`."""
    return getattr(import_module(f"chai_eval.attention.kernels.{module}"), name)(*args)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel: bytes of shared memory and spilled registers, and how it loads ahead."""

    name: str
    shared: int
    spilled: int
    wide_loads: int
    narrow_loads: int


def compiled(architecture: int, *calls: tuple[Any, ...]) -> list[Compiled]:
    """Compile what calls of `called` launch, for a GPU of an architecture, by their own launches; run nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Absent:
        """A device that kernels are compiled for, and that runs none."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", architecture, 32)

        def get_current_device(self) -> int:
            return architecture

        def get_current_stream(self, device: int) -> int:
            return 0

    found = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, warmup: bool, **settings: Any) -> None:
        kernel = launch(self, *args, warmup=True, **settings)
        ptx = kernel.asm["ptx"]
        found.append(
            Compiled(
                self.__name__,
                kernel.metadata.shared,
                _stack(kernel.asm["cubin"]),
                len(re.findall(r"cp\.async\.cg\.", ptx)),
                len(re.findall(r"cp\.async\.ca\.", ptx)),
            )
        )

    driver.set_active(Absent())
    with patch.object(JITFunction, "run", run):
        for call in calls:
            called(*call)
    return found


def _stack(cubin: bytes) -> int:
    """Bytes of each thread's stack, which is where registers are spilled to."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(cubin)
    told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", told)[0])


def generated(model: str, method: str, settings: dict[str, Any], batch: dict[str, Any], *, kernels: bool) -> Any:
    """Logits of three tokens that a tiny model generates, `[rows, 3, vocabulary]`; and by how many GPU kernels' calls.

    With `kernels` shared attention is that of the GPU's kernels.
    """
    import torch

    from chai_eval import build_method
    from chai_eval.attention.kernels import gpu
    from tests.attention.tiny import MODELS

    calls, attend, built = [], gpu.attend, MODELS[model]()
    with (
        patch.object(gpu, "takes", lambda query, key, value, view: kernels),
        patch.object(gpu, "attend", lambda *given: calls.append(given) or attend(*given)),
        build_method(method, **settings).applied(built),
        torch.no_grad(),
    ):
        out = built.generate(
            **batch, max_new_tokens=3, min_new_tokens=3, do_sample=False, output_logits=True, pad_token_id=0,
            return_dict_in_generate=True,
        )  # fmt: skip
    return torch.stack(out.logits, 1), len(calls)
