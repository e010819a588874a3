"""Notebooks: stored without outputs, short, free of logic, and run from top to bottom on a tiny model."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from chai_eval.data.assets import cache_dir, is_fetched
from chai_eval.data.documents import DOCUMENTS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NAMES = ("tour", "reproduction", "your_model")
# Logic belongs into the library, where it is tested.
LOGIC = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.If, ast.IfExp, ast.Try, ast.comprehension)

PARAMETERS = {
    "tour": """
MODEL = "tiny_llama_random"
CLUSTERS = [[8, 1], [3, 3]]
PROBE_TOKENS = 4
PROMPT = "The cat sat on the mat"
""",
    "reproduction": f"RESULTS = {str(ROOT / 'results')!r}",
    "your_model": """
NAME = "my_model"
MODEL = ["model=tiny_llama_random", f"model.name={NAME}"]
CALIBRATION = ["text=passages", "samples=10", "tokens=32", "starts=1", "sensitivity_samples=4", "predictor=false"]
TASKS = ["task=piqa", "limit=4", "fidelity=2"]
FRONTIER = ["text=passages", "seed=7", "tokens=32", "sequences=3", "saving=[0.1,0.2]", "methods=[chai,kv_rank]"]
RESULTS = "results"
""",
}


def cells(name: str) -> Iterator[dict[str, Any]]:
    for cell in json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        yield {**cell, "source": "".join(cell["source"])}


def executed(name: str, place: Path) -> list[Any]:
    """Run a notebook with other parameters; an error in a cell is raised. Gives the outputs of its cells."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    (given,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    given.source = PARAMETERS[name]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(place)}}).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def shown(outputs: list[Any], kind: str) -> list[str]:
    return [each["data"][kind] for each in outputs if kind in each.get("data", {})]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def test_there_are_no_others() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_stored_without_outputs_short_and_without_logic(name: str) -> None:
    nbformat.validate(nbformat.read(FOLDER / f"{name}.ipynb", as_version=4))
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert sum(len(cell["source"].splitlines()) for cell in cells(name)) <= 90
    for cell in code:
        tree = ast.parse("\n".join(line for line in cell["source"].splitlines() if not line.startswith("%")))
        assert not [type(node).__name__ for node in ast.walk(tree) if isinstance(node, LOGIC)]


def test_the_tour_shows_heads_clusters_and_both_outputs(tmp_path: Path) -> None:
    outputs = executed("tour", tmp_path)
    assert len(shown(outputs, "image/png")) == 1
    tables = "".join(shown(outputs, "text/html"))
    assert all(word in tables for word in ("clusters", "MHA", "CHAI"))
    said = "".join(shown(outputs, "text/plain"))
    assert "KL (nats)" in said
    assert "multiplications" in said


def test_the_reproduction_shows_tables_and_figures_of_the_records(tmp_path: Path) -> None:
    outputs = executed("reproduction", tmp_path)
    assert len(shown(outputs, "image/svg+xml")) == 1
    assert "llama7b" in "".join(shown(outputs, "text/html"))
    tables = "".join(shown(outputs, "text/markdown"))
    assert all(word in tables for word in ("95 % interval", "kv_rank"))


@pytest.mark.assets
def test_a_model_of_ones_own_is_calibrated_compared_and_decided_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_fetched(DOCUMENTS)
    # A cache of its own, so that the calibration is nobody else's; the documents are those of the user's.
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / DOCUMENTS.name).symlink_to(cache_dir() / DOCUMENTS.name)
    monkeypatch.setenv("CHAI_EVAL_CACHE", str(cache))
    outputs = executed("your_model", tmp_path)
    said = "".join(each.get("text", "") for each in outputs)
    assert "| piqa" in said
    assert "kv_rank" in said
    assert "balanced" in "".join(shown(outputs, "text/html"))
    assert len(shown(outputs, "image/svg+xml")) == 1
