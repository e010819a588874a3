"""Python's standard library as text: code that is on every machine."""

from __future__ import annotations

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from chai_eval.errors import RunError

# Other packages, tests, and tables that are written as code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
# What a build wrote of itself: other text on every machine.
OF_BUILD = ("_sysconfigdata", "config-")
# Files are cut at the first blank line after so many characters: few sequences then tell of many files.
CHARACTERS = 2_000


def standard_library() -> Iterator[str]:
    """Source files of the standard library of the Python that runs, stretch by stretch, in a fixed order.

    Raises
    ------
    RunError
        For one that can't be read.
    """
    for folder, below, files in os.walk(sysconfig.get_path("stdlib")):
        below[:] = sorted(each for each in below if each not in LEFT_OUT and not each.startswith(OF_BUILD))
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(OF_BUILD):
                yield from _stretches(Path(folder) / name)


def _stretches(path: Path) -> Iterator[str]:
    held = ""
    try:
        with tokenize.open(path) as file:  # in the encoding that it declares
            for line in file:
                held += line
                if not line.strip() and len(held) >= CHARACTERS:
                    yield held.strip("\n")
                    held = ""
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise RunError(f"text: {path} can't be read ({error})") from error
    if held.strip():
        yield held.strip("\n")
