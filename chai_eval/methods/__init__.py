"""Methods: each a short file that says what it approximates, over the one implementation in `attention/`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from chai_eval.errors import SettingError
from chai_eval.methods.base import Method
from chai_eval.methods.chai import CHAI
from chai_eval.methods.chai_static import CHAIStatic
from chai_eval.methods.dejavu import DejaVu
from chai_eval.methods.head_prune import HeadPrune
from chai_eval.methods.mha import MHA
from chai_eval.methods.output_aware import OutputAware
from chai_eval.methods.spatten import SpAtten
from chai_eval.methods.v_reuse import VReuse

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (MHA, CHAI, CHAIStatic, VReuse, OutputAware, DejaVu, SpAtten, HeadPrune)
}

__all__ = ["METHODS", "Method", "build_method"]


def build_method(name: str, **settings: Any) -> Method:
    """Make a method by name.

    Parameters
    ----------
    name : str
        One of `METHODS`.
    **settings
        Fields of the method's class.

    Raises
    ------
    SettingError
        For an unknown method or setting, or a value that is not allowed.
    """
    if name not in METHODS:
        raise SettingError(f"method: {name!r} given; allowed: {', '.join(METHODS)}")
    kind = METHODS[name]
    allowed = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for setting in settings:
        if setting not in allowed:
            close = difflib.get_close_matches(setting, allowed, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise SettingError(
                f"method.{setting}: no such setting of {name}{hint}; allowed: {', '.join(allowed) or 'none'}"
            )
    return kind(**settings)
