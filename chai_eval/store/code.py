"""The code that a number comes from: a method's module, the scorer's, and whatever these import, as one hash.

An edit to one method, a new method, or another wording of a message leaves the results of other methods as they are.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chai_eval.checksum import sha256_of

PACKAGE = "chai_eval"
NUMERIC_PACKAGES = ("attention", "methods", "scoring")
# What scores a task, and what compares its next tokens with plain attention's.
SCORER = (f"{PACKAGE}.scoring.evaluate", f"{PACKAGE}.scoring.fidelity")

# Calls that import, or run, what no reading of the source tells.
_DYNAMIC = {"import_module", "__import__", "exec", "eval", "exec_module", "run_module", "run_path"}
_PROSE = re.compile(r"\w+ \w+ \w+")


@dataclass(frozen=True)
class NumericCode:
    """Sources of the packages that make numbers, as a process found them: they may be edited while it runs.

    By a module's name its source without docstrings, comments and messages, and the numeric modules that it imports, or
    None where it may import anything; of files that are no Python (kernels), which any module may read, the sha256.
    """

    sources: Mapping[str, str]
    imports: Mapping[str, frozenset[str] | None]
    others: Mapping[str, str]

    @classmethod
    def of(cls, package: Path | None = None) -> NumericCode:
        """Read the sources in a folder of the package; in the installed one by default."""
        root = package if package is not None else Path(__file__).resolve().parent.parent
        trees: dict[str, ast.Module] = {}
        others: dict[str, str] = {}
        for path in (path for part in NUMERIC_PACKAGES for path in sorted((root / part).rglob("*"))):
            if path.is_dir() or "__pycache__" in path.parts or path.name.startswith("."):
                continue
            inside = path.relative_to(root)
            if path.suffix == ".py":
                parts = inside.parent.parts if path.stem == "__init__" else inside.with_suffix("").parts
                trees[".".join((PACKAGE, *parts))] = _Meaning().visit(ast.parse(path.read_bytes(), str(path)))
            else:
                others[inside.as_posix()] = sha256_of(path)
        imports = {name: _imports(name, tree, trees) for name, tree in trees.items()}
        sources = {name: ast.unparse(tree) for name, tree in trees.items()}
        return cls(sources, imports, others)

    def version(self, *modules: str) -> str:
        """Hash the modules and all that they import, directly or not, as a sha256 in hex.

        A parent package is not part of it unless it is imported itself: that `methods` lists every method gives none
        of them a say in another's numbers. Where a module may import anything, all modules count.
        """
        parts = [self.others, {name: self.sources[name] for name in self.closure(*modules)}]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def closure(self, *modules: str) -> set[str]:
        """The numeric modules that some are made of, themselves among them."""
        found: set[str] = set()
        waiting = list(modules)
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            imported = self.imports.get(name)
            if imported is None:
                return set(self.sources)
            found.add(name)
            waiting += imported
        return found


def _imports(module: str, tree: ast.Module, known: Mapping[str, object]) -> frozenset[str] | None:
    """The numeric modules that a module imports anywhere in it; None where that can't be told."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _DYNAMIC:
            return None
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                return None  # not written here; whoever begins to must resolve it first
            found |= {
                inside if (inside := f"{node.module}.{each.name}") in known else str(node.module) for each in node.names
            }
    return frozenset((found & known.keys()) - {module})


class _Meaning(ast.NodeTransformer):
    """Leave out of a module what only people and type checkers read: docstrings, messages of errors, logs, prose."""

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc = node.exc.func
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return ast.Pass()
        if isinstance(node.value, ast.Call) and _says(node.value.func):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and _PROSE.search(node.value):
            return ast.Constant("")
        return node


def _says(function: ast.expr) -> bool:
    """Whether a call only tells somebody something: `log.…`, `warnings.warn`, `sys.stderr.write`."""
    if not isinstance(function, ast.Attribute):
        return False
    owner = ast.unparse(function.value)
    return owner == "log" or (owner, function.attr) in (("warnings", "warn"), ("sys.stderr", "write"))
