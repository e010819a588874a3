"""The documents of the five tasks, from the assets and from a user's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chai_eval.cli import main
from chai_eval.data.documents import calibration_passages, conversations, local_documents
from chai_eval.errors import SettingError
from chai_eval.scoring.tasks import load_task
from chai_eval.settings import TaskSettings

PIQA = [
    {"goal": "open a jar", "sol1": "turn the lid", "sol2": "turn the table", "label": 0},
    {"goal": "dry a plate", "sol1": "with sand", "sol2": "with a towel", "label": 1},
]


@pytest.mark.assets
@pytest.mark.parametrize(
    ("task", "split", "documents"),
    [
        ("piqa", "validation", 1838),
        ("hellaswag", "validation", 10042),
        ("arc_easy", "test", 2376),
        ("arc_challenge", "test", 1172),
        ("boolq", "validation", 3270),
    ],
)
def test_each_task_has_the_hubs_number_of_documents(task: str, split: str, documents: int) -> None:
    assert {name: len(rows) for name, rows in local_documents(task=task).items()} == {split: documents}


@pytest.mark.assets
def test_documents_stand_in_the_hubs_order() -> None:
    assert local_documents(task="boolq")["validation"]["idx"][:] == list(range(3270))
    assert local_documents(task="hellaswag")["validation"][0]["ind"] == 24
    assert local_documents(task="piqa")["validation"][0]["goal"].startswith("How do I ready a guinea pig cage")
    assert local_documents(task="arc_challenge")["test"][0]["id"] == "Mercury_7175875"
    assert local_documents(task="arc_easy")["test"][0]["id"] == "Mercury_417466"


@pytest.mark.assets
def test_boolq_says_yes_as_often_as_its_authors_report() -> None:
    # Clark et al. 2019: the majority baseline of the development set is 62.17 %, and yes is the majority.
    labels = local_documents(task="boolq")["validation"]["label"][:]
    assert round(100 * sum(labels) / len(labels), 2) == 62.17


@pytest.mark.assets
def test_hellaswag_endings_keep_their_leading_space() -> None:
    choices = local_documents(task="hellaswag")["validation"]["choices"]
    assert sum(ending.startswith(" ") for endings in choices for ending in endings) == 10_862


@pytest.mark.assets
def test_calibration_passages_are_distinct_running_text_in_a_fixed_order() -> None:
    passages = list(calibration_passages())
    assert passages == list(calibration_passages())
    assert len(passages) == len(set(passages)) > 1000
    assert sum(len(passage.split()) for passage in passages) > 100_000
    assert not any(text.startswith(("Title:", "Background:")) or "\nAnswer:" in text for text in passages)


@pytest.mark.assets
def test_conversations_ask_what_the_tasks_ask_and_answer_what_lm_eval_holds_right() -> None:
    talks = list(conversations())
    start = 0
    for name in ("piqa", "arc_easy", "arc_challenge", "boolq"):
        task = load_task(name)
        rows = list(task.eval_docs)
        for row, (user, assistant) in zip(rows[:50], talks[start:], strict=False):
            assert (user["role"], assistant["role"]) == ("user", "assistant")
            assert row["goal" if name == "piqa" else "question"] in user["content"]
            assert assistant["content"].lower() == task.doc_to_choice(row)[task.doc_to_target(row)].lower()
        start += len(rows)
    assert start == len(talks)


def write(folder: Path, suffix: str, rows: list[dict[str, object]]) -> None:
    path = folder / f"piqa{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_a_users_own_file_is_read_in_any_of_its_forms(tmp_path: Path, suffix: str) -> None:
    write(tmp_path, suffix, PIQA)
    assert local_documents(task="piqa", data_dir=str(tmp_path))["validation"].to_list() == PIQA


def test_a_folder_without_the_tasks_file_names_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^data_dir: .* piqa; allowed: piqa\.parquet, piqa\.jsonl, piqa\.json$"):
        local_documents(task="piqa", data_dir=str(tmp_path))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    write(tmp_path, ".jsonl", [{"goal": "x", "sol1": "y", "label": 0}])
    with pytest.raises(SettingError, match=r"^data_dir: .* has no column sol2; allowed: .*goal, sol1, sol2, label$"):
        local_documents(task="piqa", data_dir=str(tmp_path))


@pytest.mark.parametrize(("suffix", "content"), [(".jsonl", "{"), (".json", '{"a": 1}'), (".parquet", "text")])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, suffix: str, content: str) -> None:
    (tmp_path / f"piqa{suffix}").write_text(content)
    with pytest.raises(SettingError, match=r"^data_dir: .* can't be read") as raised:
        local_documents(task="piqa", data_dir=str(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_a_file_that_was_cut_off_is_refused_or_has_whole_documents_only(tmp_path: Path, suffix: str) -> None:
    write(tmp_path, suffix, PIQA)
    path = tmp_path / f"piqa{suffix}"
    whole = path.read_bytes()
    # Nothing tells a file of lines that was cut between two of them.
    between = (whole.find(b"\n"), whole.find(b"\n") + 1)
    for length in (*between, *range(0, len(whole), 7)):
        path.write_bytes(whole[:length])
        if suffix == ".jsonl" and length in between:
            assert local_documents(task="piqa", data_dir=str(tmp_path))["validation"].to_list() == PIQA[:1]
            continue
        with pytest.raises(SettingError, match=r"^data_dir: [^\n]*$") as raised:
            local_documents(task="piqa", data_dir=str(tmp_path))
        assert str(raised.value).startswith(f"data_dir: {path} ")


def test_a_line_that_is_cut_off_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "piqa.jsonl").write_text(json.dumps(PIQA[0]) + "\n\n" + json.dumps(PIQA[1])[:-9])
    with pytest.raises(SettingError, match=r"can't be read \(line 3, column \d+: "):
        local_documents(task="piqa", data_dir=str(tmp_path))


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, suffix: str) -> None:
    write(tmp_path, suffix, PIQA)
    path = tmp_path / f"piqa{suffix}"
    path.write_bytes(path.read_text().encode("utf-8-sig"))
    assert local_documents(task="piqa", data_dir=str(tmp_path))["validation"].to_list() == PIQA


def test_files_put_one_after_the_other_with_a_byte_order_mark_each_are_read(tmp_path: Path) -> None:
    lines = [f"{json.dumps(row)}\n".encode("utf-8-sig") for row in PIQA]
    (tmp_path / "piqa.jsonl").write_bytes(b"".join(lines))
    assert local_documents(task="piqa", data_dir=str(tmp_path))["validation"].to_list() == PIQA


def test_columns_that_no_prompt_reads_may_hold_anything(tmp_path: Path) -> None:
    extra = [{"id": 1, "note": None}, {"id": "1a", "gold": [1]}]
    write(tmp_path, ".jsonl", [{**row, **more} for row, more in zip(PIQA, extra, strict=True)])
    assert local_documents(task="piqa", data_dir=str(tmp_path))["validation"].to_list() == PIQA


def test_what_no_prompt_reads_among_the_choices_may_be_anything(tmp_path: Path) -> None:
    rows = [{**ARC, "choices": {**ARC["choices"], "note": note}} for note in (1, "one")]
    (tmp_path / "arc_easy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert local_documents(task="arc_easy", data_dir=str(tmp_path))["test"].to_list() == [ARC, ARC]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "piqa.jsonl").write_text("")
    with pytest.raises(SettingError, match=r"^data_dir: "):
        local_documents(task="piqa", data_dir=str(tmp_path))


HELLASWAG = {
    "activity_label": "Cooking",
    "ctx_a": "A pan stands on the stove.",
    "ctx_b": "",
    "endings": ["it is hot.", "it sings.", "it runs away.", "it sleeps."],
    "label": "0",
}
ARC = {"question": "What is wet?", "choices": {"text": ["sand", "water"], "label": ["A", "B"]}, "answerKey": "B"}
BOOLQ = {"passage": "Water is wet.", "question": "is water wet", "label": 1}
GOOD: dict[str, dict[str, Any]] = {
    "piqa": PIQA[0],
    "hellaswag": HELLASWAG,
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "boolq": BOOLQ,
}


def arc(labels: list[Any], key: Any) -> dict[str, Any]:
    return {**ARC, "choices": {"text": ["sand", "water"], "label": labels}, "answerKey": key}


@pytest.mark.parametrize(
    ("task", "rows", "gold"),
    [
        ("arc_easy", [arc([1, 2], 1), arc(["1", "2"], 2), arc([1, 2], "2")], [0, 1, 1]),
        ("arc_challenge", [arc([1.0, 2.0], 2), arc(["A", "B"], "A")], [1, 0]),
        ("hellaswag", [{**HELLASWAG, "label": label} for label in (3, "2", 1.0)], [3, 2, 1]),
        ("piqa", [{**PIQA[0], "label": label} for label in (1, 0.0, True)], [1, 0, 1]),
        ("boolq", [{**BOOLQ, "label": label} for label in (False, 1)], [0, 1]),
    ],
)
def test_labels_count_as_what_they_mean_whether_texts_or_numbers(
    tmp_path: Path, task: str, rows: list[dict[str, Any]], gold: list[int]
) -> None:
    (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_task(task, TaskSettings(data_dir=tmp_path))
    assert [loaded.doc_to_target(document) for document in loaded.eval_docs] == gold


def test_numbers_as_labels_make_the_same_documents_as_texts(tmp_path: Path) -> None:
    made = []
    for number, row in enumerate((arc([1, 2], 1), arc(["1", "2"], "1"))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "arc_easy.jsonl").write_text(json.dumps(row))
        made.append(local_documents(task="arc_easy", data_dir=str(tmp_path / str(number)))["test"].to_list())
    assert made[0] == made[1] == [arc(["1", "2"], "1")]


WRONG = [
    ("piqa", {"label": 2}, "label is 2; allowed: 0 to 1"),
    ("piqa", {"label": -1}, "label is -1; allowed: 0 to 1"),
    ("piqa", {"label": "1"}, "label is '1'; allowed: 0 to 1, a number"),
    ("piqa", {"label": None}, "label is None; allowed: 0 to 1"),
    ("piqa", {"sol2": ""}, "sol2 is ''; allowed: a text that isn't empty"),
    ("piqa", {"sol1": ["turn", "it"]}, "sol1 is ['turn', 'it']; allowed: a text"),
    ("piqa", {"goal": ["open"]}, "goal is ['open']; allowed: a text"),
    ("hellaswag", {"label": "4"}, "label is '4'; allowed: 0 to 3"),
    ("hellaswag", {"label": ""}, "label is ''; allowed: 0 to 3"),
    ("hellaswag", {"endings": "it is hot."}, "endings is 'it is hot.'; allowed: a list of texts"),
    ("hellaswag", {"endings": ["a", " "]}, "endings[1] is ' '; allowed: a text that isn't empty"),
    ("hellaswag", {"endings": ["[header]", "b"]}, "endings[0] is '[header]'; allowed: a text that isn't empty"),
    ("arc_easy", {"answerKey": "C"}, "answerKey is 'C'; allowed: one of the row's labels A, B"),
    ("arc_easy", {"choices": ["sand", "water"]}, "choices is ['sand', 'water']; allowed: {"),
    ("arc_challenge", {"choices": {"text": ["sand", ""], "label": ["A", "B"]}}, "choices.text[1] is ''; allowed"),
    ("arc_challenge", {"choices": {"text": ["sand"], "label": ["A", "B"]}}, "choices is {"),
    ("arc_easy", {"choices": {"text": ["sand", "water"], "label": [1, 2]}, "answerKey": 3}, "answerKey is 3; allowed"),
    (
        "arc_easy",
        {"choices": {"text": ["a", "b"], "label": [True, False]}},
        "choices.label[0] is True; allowed: a text",
    ),
    ("boolq", {"label": 2}, "label is 2; allowed: 0 to 1"),
    ("boolq", {"passage": ["Water", "is wet."]}, "passage is ['Water', 'is wet.']; allowed: a text"),
]


@pytest.mark.parametrize("task", GOOD)
def test_rows_in_the_hubs_columns_are_taken(tmp_path: Path, task: str) -> None:
    (tmp_path / f"{task}.jsonl").write_text(json.dumps(GOOD[task]) + "\n")
    (rows,) = local_documents(task=task, data_dir=str(tmp_path)).values()
    assert {name: rows[0][name] for name in GOOD[task]} == GOOD[task]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("task", "change", "said"), WRONG, ids=[f"{task} {change}" for task, change, _ in WRONG])
def test_a_row_that_cannot_be_scored_is_named_with_what_is_allowed(
    tmp_path: Path, suffix: str, task: str, change: dict[str, Any], said: str
) -> None:
    wrong = {**GOOD[task], **change}
    path = tmp_path / f"{task}{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in (GOOD[task], wrong)))
    else:
        pq.write_table(pa.Table.from_pylist([wrong, wrong]), path)
    row = 2 if suffix == ".jsonl" else 1
    with pytest.raises(SettingError) as raised:
        local_documents(task=task, data_dir=str(tmp_path))
    assert str(raised.value).startswith(f"data_dir: {path}, row {row}: {said}")


def test_a_wrong_row_ends_a_run_with_status_2_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, ".jsonl", [*PIQA, {**PIQA[0], "label": 7}])
    results = tmp_path / "results"
    given = ["model=tiny_llama_random", "task=piqa", f"data_dir={tmp_path}", f"results_dir={results}"]
    assert main(given) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert "row 3: label is 7; allowed: 0 to 1" in error
    assert not results.exists()
