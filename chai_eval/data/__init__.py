"""Documents, weights and text that a run needs: fetched, checked, unpacked once, or the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chai_eval.data.assets import cache_dir

if TYPE_CHECKING:
    from chai_eval.data.documents import calibration_passages, local_documents

__all__ = ["cache_dir", "calibration_passages", "local_documents"]


def __getattr__(name: str) -> Any:
    # Imported on first use: documents need pyarrow, which a machine that only measures need not have.
    if name in __all__:
        from chai_eval.data import documents

        return getattr(documents, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
