"""How far a long pass is: shown in a terminal as a bar, elsewhere as a line now and then, and saved on the disk."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from chai_eval.checksum import sha256_of
from chai_eval.errors import RunError, failure_line
from chai_eval.files import write_whole

SECONDS_BETWEEN_LINES = 60.0
# Progress is saved as often as this, or more rarely where saving it would take more than a twentieth of the time.
SECONDS_BETWEEN_SAVES = 60.0
SAVES_PER_COST = 20.0

log = logging.getLogger("chai_eval")

Item = TypeVar("Item")


def progress(
    items: Iterable[Item], total: int, what: str, unit: str, size: Callable[[Item], int] = lambda item: 1
) -> Iterator[Item]:
    """Give the items one by one, and show on stderr how many of `total` units, `size` of them each, are done."""
    start = last = time.monotonic()
    done = 0
    with tqdm(total=total, desc=what, unit=f" {unit}", disable=None, file=sys.stderr) as bar:
        shown: tqdm[Any] = bar
        for item in items:
            yield item
            done += size(item)
            shown.update(size(item))
            now = time.monotonic()
            if shown.disable and now - last >= SECONDS_BETWEEN_LINES:
                last = now
                left = (now - start) / done * max(total - done, 0)
                log.info("%s: %d of %d %s, about %d min left", what, done, total, unit, round(left / 60))


class SavedProgress:
    """What an interrupted pass goes on from, in a file whose name is that of `path` and the sha256 of what is in it."""

    def __init__(self, path: Path) -> None:
        self.path, self._last, self._cost = path, time.monotonic(), 0.0

    def offer(self, state: Callable[[], dict[str, Any]]) -> None:
        """Save if enough time has passed."""
        if time.monotonic() - self._last > max(SECONDS_BETWEEN_SAVES, SAVES_PER_COST * self._cost):
            self.save(state())

    def save(self, state: dict[str, Any]) -> None:
        """Save tensors and texts, in place of what was saved before; RunError where the disk fails."""
        start = time.monotonic()
        try:
            write_whole(self.path, lambda path: torch.save(state, path))
            whole = self.path.with_stem(f"{self.path.stem}-{sha256_of(self.path)}")
            self.path.replace(whole)
            for older in self._files():
                if older != whole:
                    older.unlink()
        except (OSError, RuntimeError) as error:  # torch has errors of its own for a full disk
            raise RunError(f"out: {self.path.parent} can't be written ({failure_line(error)})") from error
        self._last = time.monotonic()
        self._cost = self._last - start

    def load(self) -> dict[str, Any] | None:
        """What was saved last, on the CPU; None where nothing was, or it is damaged."""
        for file in self._files():
            if sha256_of(file) == file.stem.rpartition("-")[2]:
                state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
                return state
            log.warning("%s: not what was written, its checksum is another; what it held is computed again", file)
        return None

    def _files(self) -> list[Path]:
        """The latest first; a kill may leave two."""
        files = self.path.parent.glob(f"{self.path.stem}-*{self.path.suffix}")
        return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)
