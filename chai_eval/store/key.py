"""The key: a hash over everything that can change a number of a result, and over nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def result_key(parts: Mapping[str, Any]) -> str:
    """Name one result: the first 12 hex digits of the sha256 over the canonical JSON of `parts`.

    TypeError or ValueError for a value that JSON can't hold exactly. Turning it into text by `str` would give an
    object's address or a shortened array a say in the key.
    """
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
