"""The key: a hash over everything that can change a number of a result, and over nothing else."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUMERIC_PACKAGES = ("attention", "methods", "scoring")


def canonical_json(value: Any) -> str:
    """JSON text that is the same for equal values: sorted keys, no spaces, ASCII, no NaN.

    Raises
    ------
    TypeError, ValueError
        For a value that JSON can't hold exactly. Turning it into text by `str` would give an object's address
        or a shortened array a say in the key.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def result_key(parts: Mapping[str, Any]) -> str:
    """Name one result: the first 12 hex digits of the sha256 over the canonical JSON of `parts`."""
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:12]


def numeric_code_version(package: Path | None = None) -> str:
    """Hash the code that makes numbers: `attention/`, `methods/` and `scoring/`, as a sha256 in hex.

    Python files count by their syntax tree without docstrings, so that a comment or a reformatting keeps old
    results valid. Other source files beside them (kernels) count byte by byte.

    Parameters
    ----------
    package
        Folder of the package; the installed `chai_eval` by default.
    """
    root = package if package is not None else Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for part in NUMERIC_PACKAGES:
        for path in sorted((root / part).rglob("*")):
            if path.is_dir() or "__pycache__" in path.parts or path.name.startswith("."):
                continue
            content = _meaning(path) if path.suffix == ".py" else path.read_bytes()
            name = path.relative_to(root).as_posix().encode()
            digest.update(b"%d:%s%d:" % (len(name), name, len(content)))
            digest.update(content)
    return digest.hexdigest()


def _meaning(path: Path) -> bytes:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                del node.body[0]
    # Source text again rather than `ast.dump`, whose form changes between Python versions.
    return ast.unparse(tree).encode()
