"""Rows of a user's own documents: what lm-eval would trip over, or score as something else, is named before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from chai_eval.errors import shown

# What lm-eval's prompts read; a file may have more.
COLUMNS = {
    "piqa": ("goal", "sol1", "sol2", "label"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "boolq": ("passage", "question", "label"),
}

# Of a column that should be a text.
_TEXT = "a text"
_CHOICE = "a text that isn't empty"


class RowError(ValueError):
    """A row has a wrong value: which row, which column, what was given, and what is allowed."""


def check_rows(task: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise RowError for the first row, counted from 1, that one of the five tasks can't be scored with."""
    for number, row in enumerate(rows, start=1):
        if found := _CHECKS[task](row):
            column, given, allowed = found
            raise RowError(f"row {number}: {column} is {shown(given, 80)}; allowed: {allowed}")


def as_scored(task: str, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows that `check_rows` passed, with what lm-eval's prompts read and no more, each column of one type.

    Labels are as the hub has them: texts in ARC and HellaSwag, whole numbers in PIQA and BoolQ.
    """
    return [{column: _as_scored(task, column, row[column]) for column in COLUMNS[task]} for row in rows]


def _as_scored(task: str, column: str, value: Any) -> Any:
    if column == "choices":
        return {"text": value["text"], "label": [_label_text(label) for label in value["label"]]}
    if column == "label" and task != "hellaswag":
        return int(value)
    return _label_text(value) if column in ("label", "answerKey") else value


# A column, what it holds, and what is allowed; None where a row is as it should be.
_Found = tuple[str, Any, str] | None


def _hellaswag(row: Mapping[str, Any]) -> _Found:
    from lm_eval.tasks.hellaswag.utils import preprocess

    endings, label = row.get("endings"), row.get("label")
    if found := _texts(row, "activity_label", "ctx_a", "ctx_b"):
        return found
    if not isinstance(endings, list) or not endings:
        return "endings", endings, "a list of texts"
    for index, ending in enumerate(endings):
        # lm-eval takes out what stands in brackets.
        if not _is_choice(ending) or not preprocess(ending).strip():
            return f"endings[{index}]", ending, _CHOICE
    if _label_text(label) not in [str(index) for index in range(len(endings))]:
        return "label", label, f"0 to {len(endings) - 1}"
    return None


def _arc(row: Mapping[str, Any]) -> _Found:
    choices, key = row.get("choices"), row.get("answerKey")
    if found := _texts(row, "question"):
        return found
    texts, labels = (choices.get(name) if isinstance(choices, Mapping) else None for name in ("text", "label"))
    if not isinstance(texts, list) or not isinstance(labels, list) or not texts or len(texts) != len(labels):
        return "choices", choices, '{"text": [...], "label": [...]}, as many labels as texts'
    for index, text in enumerate(texts):
        if not _is_choice(text):
            return f"choices.text[{index}]", text, _CHOICE
    for index, label in enumerate(labels):
        if _label_text(label) is None:
            return f"choices.label[{index}]", label, "a text or a number"
    if _label_text(key) not in map(_label_text, labels):
        return "answerKey", key, f"one of the row's labels {', '.join(map(str, labels))}"
    return None


def _texts(row: Mapping[str, Any], *columns: str) -> _Found:
    return next(((each, row.get(each), _TEXT) for each in columns if not isinstance(row.get(each), str)), None)


def _choices(row: Mapping[str, Any], *columns: str) -> _Found:
    return next(((each, row.get(each), _CHOICE) for each in columns if not _is_choice(row.get(each))), None)


def _is_choice(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _label(row: Mapping[str, Any]) -> _Found:
    label = row.get("label")
    return None if isinstance(label, int | float) and label in (0, 1) else ("label", label, "0 to 1, a number")


def _label_text(label: Any) -> str | None:
    """A label as a text, as the hub has those of ARC and HellaSwag; None for what is neither text nor number."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return None
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


_CHECKS: dict[str, Callable[[Mapping[str, Any]], _Found]] = {
    "piqa": lambda row: _texts(row, "goal") or _choices(row, "sol1", "sol2") or _label(row),
    "boolq": lambda row: _texts(row, "passage", "question") or _label(row),
    "hellaswag": _hellaswag,
    "arc_easy": _arc,
    "arc_challenge": _arc,
}
