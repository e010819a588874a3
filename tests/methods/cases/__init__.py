"""What every method is held against: each file here says it of one method or more, and a new one is found by itself.

A file has `CASES`, settings of methods and the loop that each must equal, and `NOTHING`, for each of its methods the
settings that leave everything as it is.
"""

from __future__ import annotations

import importlib
import pkgutil

from tests.methods.cases.case import Case, Settings

CASES: dict[str, Case] = {}
NOTHING: dict[str, Settings] = {}
for _each in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_each.name}")
    CASES |= getattr(_module, "CASES", {})
    NOTHING |= getattr(_module, "NOTHING", {})
