"""Files that tell when they are damaged: JSON documents with a checksum of their own and those of files beside them.

A document written before there were checksums has none; it is read all the same, and said to be unchecked.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from chai_eval.errors import RunError
from chai_eval.files import write_whole

log = logging.getLogger(__name__)

# Fields that a sealed document has beside its content. It has both or neither: where a single one is left, the name of
# the other was damaged.
FILES, CHECKSUM = "files", "checksum"
OTHER = "not what was written: its checksum is another"


class DamagedError(RunError):
    """A file (`path`) does not hold what was written into it; `said` is what is wrong, in a few words."""

    def __init__(self, path: Path, said: str, remedy: str | None = None) -> None:
        super().__init__(f"{path}: {said}" + (f"; {remedy}" if remedy else ""))
        self.path, self.said = path, said


@dataclass(frozen=True)
class Document:
    """A JSON document as it was read.

    `content` is without its checksums; empty where the file holds something other than an object. `files` has sha256
    (hex) of files by their names, relative to the document's folder; None where there are no checksums.
    """

    content: dict[str, Any]
    files: Mapping[str, str] | None

    def check(self, folder: Path, name: str) -> str:
        """Return a file's sha256; OSError where it can't be read, DamagedError where the document names another."""
        return self._known(folder / name, name, sha256_of(folder / name))

    def read(self, folder: Path, name: str) -> bytes:
        """Read a file; raises as `check` does."""
        data = (folder / name).read_bytes()
        self._known(folder / name, name, hashlib.sha256(data).hexdigest())
        return data

    def _known(self, path: Path, name: str, found: str) -> str:
        if self.files is not None and self.files.get(name) != found:
            raise DamagedError(path, OTHER)
        return found


def sha256_of(path: Path) -> str:
    """Sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_document(path: Path, content: Mapping[str, Any], files: Mapping[str, str] | None) -> None:
    """Write a JSON document whole, sealed with the checksums of `files`; without any (None) it gets none itself.

    Raises OSError; TypeError or ValueError for values that JSON doesn't have, NaN among them.
    """
    whole = content if files is None else sealed(content, files)
    write_whole(path, json.dumps(whole, indent=1, allow_nan=False) + "\n")


def sealed(content: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """JSON values with their checksum and those of `files`, as `Document` has them; raises as `write_document` does."""
    # As it will be read: keys are texts then, which has a say in their order.
    whole = json.loads(json.dumps({**content, FILES: dict(files)}, allow_nan=False))
    return {**whole, CHECKSUM: _checksum(whole)}


def read_document(path: Path) -> Document:
    """Read a JSON document; OSError where it can't be, DamagedError where it has a checksum that is another."""
    value = read_json(path)
    if not isinstance(value, dict) or not {FILES, CHECKSUM} & value.keys():
        return Document(value if isinstance(value, dict) else {}, None)
    if value.pop(CHECKSUM, None) != _checksum(value) or not isinstance(value.get(FILES), dict):
        raise DamagedError(path, OTHER)
    return Document(value, value.pop(FILES))


def read_json(path: Path) -> Any:
    """Read a JSON file; OSError where it can't be, DamagedError for what isn't JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, f"can't be read ({' '.join(str(error).split())})") from error


@lru_cache
def say_unchecked(what: str) -> None:
    """Say, once a process, that something was written before there were checksums."""
    log.warning("%s written without checksums, by an earlier version: whether they are damaged can't be told", what)


def _checksum(value: Mapping[str, Any]) -> str:
    """Of the values, however the text is laid out."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
