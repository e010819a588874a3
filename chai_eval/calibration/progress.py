"""How far a long pass is, and when it will be done: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 60.0

log = logging.getLogger("chai_eval")


@contextmanager
def progress(total: int, what: str, unit: str) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr while the context lasts; call what it gives with each step's size."""
    bar: tqdm[Any] = tqdm(total=total, desc=what, unit=f" {unit}", disable=None, file=sys.stderr)
    start = last = time.monotonic()
    done = 0

    def advance(step: int = 1) -> None:
        nonlocal done, last
        done += step
        bar.update(step)
        now = time.monotonic()
        if bar.disable and now - last >= SECONDS_BETWEEN_LINES:
            last = now
            left = (now - start) / done * max(total - done, 0)
            log.info("%s: %d of %d %s, about %d min left", what, done, total, unit, round(left / 60))

    with bar:
        yield advance
