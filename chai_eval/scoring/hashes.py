"""What a task is made of, as a hash for the key."""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

from chai_eval.checksum import sha256_of


def content_hash(content: Any) -> str:
    """Hash of plain values and the functions among them, as a sha256 in hex: the same in every process."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> str:
    """Functions by the file that they stand in, as helpers lie beside them; `str` of one is an address in memory."""
    if not callable(value):
        return str(value)
    try:
        source = inspect.getsourcefile(value)
    except TypeError:  # what a class or `partial` makes
        source = inspect.getsourcefile(type(value))
    code = "" if source is None else sha256_of(Path(source))
    return f"{getattr(value, '__qualname__', type(value).__qualname__)} {code}"
