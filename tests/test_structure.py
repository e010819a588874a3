"""How the package is built: which way its imports go, and how much a reader has to take in at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import chai_eval

ROOT = Path(chai_eval.__file__).parent
MODULES = {
    ".".join(
        ("chai_eval", *(path.parent if path.stem == "__init__" else path.with_suffix("")).relative_to(ROOT).parts)
    ): path
    for path in sorted(ROOT.rglob("*.py"))
    if not {"conf", "tasks", "paper"} & set(path.relative_to(ROOT).parts)
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(node: ast.AST) -> Iterator[str]:
    """Modules of the package that run when this is run, functions' own imports included; not those for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            for each in child.names:
                inside = f"{child.module}.{each.name}"
                yield inside if inside in MODULES else child.module
        elif isinstance(child, ast.Import):
            yield from (each.name for each in child.names)
        yield from imports(child)


GRAPH = {name: {each for each in imports(tree) if each in MODULES and each != name} for name, tree in TREES.items()}


def test_no_modules_import_each_other() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_attention_imports_nothing_of_the_package_but_itself() -> None:
    outside = {
        (name, each)
        for name, found in GRAPH.items()
        for each in found
        if name.startswith("chai_eval.attention") and not each.startswith("chai_eval.attention")
    }
    assert not outside


# Functions with more parameters than a reader can keep apart, to be mended; none may join them.
MANY_PARAMETERS = {
    "chai_eval.models.load.load_model",
}


@pytest.mark.parametrize("name", MODULES)
def test_files_and_functions_fit_a_reader(name: str) -> None:
    assert len(MODULES[name].read_text(encoding="utf-8").splitlines()) <= 280
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            many = len([each for each in given if each.arg not in ("self", "cls")]) > 6
            assert not many or f"{name}.{node.name}" in MANY_PARAMETERS, node.name
