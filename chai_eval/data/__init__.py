"""Documents, weights and text that a run needs: fetched, checked, unpacked once, or the user's own."""

from __future__ import annotations

from chai_eval.data.assets import cache_dir
from chai_eval.data.documents import calibration_passages, local_documents

__all__ = ["cache_dir", "calibration_passages", "local_documents"]
