from __future__ import annotations

import csv
from pathlib import Path

import pytest

from chai_eval.report import published
from chai_eval.resources import paper_dir

TASKS = ("piqa", "hellaswag", "arc_challenge", "arc_easy", "boolq")


@pytest.mark.parametrize("model", ["llama7b", "llama33b", "opt66b"])
@pytest.mark.parametrize("task", TASKS)
def test_every_paper_model_has_a_published_difference_for_each_of_the_five_tasks(model: str, task: str) -> None:
    difference = published(model, "chai", task)
    assert difference is not None
    # The body's largest deviation is 3.2 points for CHAI.
    assert abs(difference) <= 3.2


def test_the_figures_are_those_of_the_file() -> None:
    with (paper_dir() / "tables.csv").open(newline="") as file:
        deltas = [row for row in csv.DictReader(file) if row["kind"] == "delta"]
    assert len(deltas) == 20
    for row in deltas:
        assert published(row["model"], row["method"], row["task"]) == float(row["value"])


def test_a_score_that_the_paper_gives_as_such_becomes_a_difference_from_its_mha() -> None:
    assert published("llama7b", "v_reuse", "piqa") == pytest.approx(61.93 - 79.8)
    assert published("llama7b", "mha", "piqa") == 79.8


@pytest.mark.parametrize(
    ("model", "method", "task"),
    [
        (None, "chai", "piqa"),
        ("llama7b", "chai", "winogrande"),
        ("llama33b", "mha", "piqa"),
        ("llama7b", "dejavu_10", "any"),
        ("llama7b", "dejavu_30", "any"),
    ],
)
def test_where_the_paper_gives_no_single_figure_there_is_none(model: str | None, method: str, task: str) -> None:
    assert published(model, method, task) is None


def test_a_score_without_its_mha_has_no_difference(tmp_path: Path) -> None:
    table = tmp_path / "tables.csv"
    table.write_text("model,method,task,kind,value,note\nm,v_reuse,piqa,absolute,50.0,\n")
    assert published("m", "v_reuse", "piqa", tables=table) is None
