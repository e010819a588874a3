"""What a record says about where it comes from: versions, code revision, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import chai_eval

PACKAGES = ("torch", "transformers", "lm-eval", "pandas", "numpy", "datasets", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of Python, of this package, and of the packages that numbers depend on."""
    found = {"python": platform.python_version(), "chai-eval": chai_eval.__version__}
    return found | {package: _installed(package) for package in PACKAGES}


@lru_cache
def _installed(package: str) -> str:
    """Version of a package: read once, as this process has imported it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def git_revision(package: Path | None = None) -> dict[str, Any] | None:
    """Commit of the checkout that this package runs from, and whether tracked files differ from it.

    None outside a checkout: also where the package is installed into an environment that lies inside some other
    project's repository.
    """
    folder = package if package is not None else Path(__file__).resolve().parent.parent
    tracked = _git(folder, "ls-files", "--error-unmatch", "errors.py")
    revision = _git(folder, "rev-parse", "HEAD")
    if tracked is None or revision is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": bool(changed)}


def machine() -> dict[str, Any]:
    """Processor and what it can multiply, cores, memory in bytes, and the GPUs' names where there are any."""
    import torch

    from chai_eval.attention.kernels.decode import cpu_multiplies

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "multiplies_bfloat16": cpu_multiplies(torch.bfloat16),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "system": platform.platform(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
