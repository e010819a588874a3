"""What a measurement has found so far, part by part on the disk: one that was killed goes on where it was."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from chai_eval.checksum import DamagedError, read_document, write_document
from chai_eval.files import disk_errors
from chai_eval.measure.serialise import from_json, to_json

log = logging.getLogger(__name__)

T = TypeVar("T")


class Progress:
    """Parts of a measurement, each written as it is done, in a folder until `finish`; without a folder none is.

    `asked` are JSON values that say what is measured, and on what: parts of anything else are not taken.
    """

    def __init__(self, folder: Path | None, asked: Mapping[str, Any] | None = None) -> None:
        self.folder, self.asked = folder, json.loads(json.dumps(asked or {}, default=str))

    def part(self, name: str, kind: type[T], measure: Callable[[], T]) -> T:
        """A part written before under a name, or else what `measure` gives, written; RunError where it can't be."""
        if self.folder is None:
            return measure()
        path = self.folder / f"{name}.json"
        try:
            content = read_document(path).content
            if content["asked"] == self.asked:
                found: T = from_json(kind, content["found"])
                log.warning("%s: taken from a measurement that was interrupted", path)
                return found
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, DamagedError, LookupError, TypeError, ValueError) as error:
            log.warning("%s: measured again (%s)", path, error)
        part = measure()
        with disk_errors(f"{path}: can't be written"):
            write_document(path, {"asked": self.asked, "found": to_json(part)}, files={})
        return part

    def of(self, name: str) -> Progress:
        """Parts of a part, in a folder of their own."""
        return Progress(None if self.folder is None else self.folder / name, self.asked)

    def finish(self) -> None:
        """Forget all parts: what they were for is recorded."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
