"""Where configuration, task files and the paper's figures lie: in a source checkout or in an installed wheel."""

from __future__ import annotations

from pathlib import Path


def _folder(installed: str, checkout: str) -> Path:
    package = Path(__file__).resolve().parent
    inside = package / installed
    return inside if inside.is_dir() else package.parent / checkout


def conf_dir() -> Path:
    """Hydra's configuration."""
    return _folder("conf", "conf")


def tasks_dir() -> Path:
    """lm-eval task files that read local data."""
    return _folder("tasks", "tasks")


def paper_dir() -> Path:
    """The paper's figures as data."""
    return _folder("paper", "results/paper")
