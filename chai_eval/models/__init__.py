"""Models: loaded from the assets, a directory or the hub, or built from a config with random weights."""

from __future__ import annotations

from chai_eval.models.fingerprint import fingerprint
from chai_eval.models.load import check_path, load, load_model, model_names, model_settings
from chai_eval.models.untie import untie

__all__ = ["check_path", "fingerprint", "load", "load_model", "model_names", "model_settings", "untie"]
