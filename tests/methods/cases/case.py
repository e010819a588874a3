from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.attention.tiny import HeadLoop


class Case(NamedTuple):
    method: str
    settings: dict[str, Any]
    loop: Callable[[], HeadLoop]
