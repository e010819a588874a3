"""Evaluate Clustered Head Attention: what sharing attention scores across heads costs, and what it saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chai_eval.methods import build_method
    from chai_eval.models import load_model

__version__ = "0.1.0"
__all__ = ["__version__", "build_method", "load_model"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `attention/` and `measure/` run where only torch and transformers are installed.
    if name == "load_model":
        from chai_eval.models import load_model

        return load_model
    if name == "build_method":
        from chai_eval.methods import build_method

        return build_method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
