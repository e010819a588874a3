"""Evaluate Clustered Head Attention: what sharing attention scores across heads costs, and what it saves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chai_eval.methods import build_method
    from chai_eval.models import load_model

__version__ = "0.1.0"
__all__ = ["__version__", "build_method", "load_model"]

# Imported on first use, so that `attention/` and `measure/` run where only torch and transformers are installed.
_LATER = {"build_method": "chai_eval.methods", "load_model": "chai_eval.models"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
