"""Logs of stock lm-eval, compared: against the same numbers by hand, and every way in which they don't fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from statsmodels.stats.contingency_tables import mcnemar

from chai_eval.cli import main
from chai_eval.logs.compare import compare
from chai_eval.logs.flips import GAINED, LOST, Flip, answer, answered, asked
from chai_eval.logs.lines import row_of
from chai_eval.report import paired_difference
from chai_eval.report.statistics import bootstrap_difference, perplexity
from tests.logs.made import lines, rewrite


def by_id(folder: Path, task: str) -> list[dict[str, Any]]:
    return sorted(lines(folder, task), key=lambda each: each["doc_id"])


def refused(capsys: pytest.CaptureFixture[str], *typed: object) -> tuple[int, str]:
    status = main(["compare", *map(str, typed)])
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    return status, error


def test_scores_and_differences_are_those_that_the_lines_give_by_hand(stock: dict[str, Path]) -> None:
    found = compare(str(stock["a"]), str(stock["b"]))
    rows = {(each.task, each.metric): each for each in found.rows}
    assert set(rows) == {
        ("own_choice", "acc"),
        ("own_choice", "acc_norm"),
        ("own_rolling", "byte_perplexity"),
        ("own_text", "exact_match"),
    }
    assert found.remarks == ()
    for (task, metric), row in rows.items():
        one, two = ([each[metric] for each in by_id(folder, task)] for folder in stock.values())
        assert row.n == len(one) == 40
        if metric == "byte_perplexity":
            values = [math.exp(-sum(ll for ll, _ in each) / sum(size for _, size in each)) for each in (one, two)]
            expected = bootstrap_difference(perplexity, one, two)
        else:
            values = [sum(each) / len(each) for each in (one, two)]
            expected = paired_difference(one, two)
            table = [[sum((x, y) == (i, j) for x, y in zip(one, two, strict=True)) for j in (1, 0)] for i in (1, 0)]
            assert row.difference.p == pytest.approx(mcnemar(table, exact=True).pvalue)
        assert (row.mha, row.method) == pytest.approx(values, rel=1e-12)
        assert row.difference == expected
    assert any(row.difference.points for row in rows.values() if row.percent)  # else this would show little


def test_flips_are_the_documents_whose_score_moved_with_what_each_run_answered(stock: dict[str, Path]) -> None:
    found = [each for each in compare(str(stock["a"]), str(stock["b"])).flips if each.task == "own_choice"]
    pairs = list(zip(*(by_id(folder, "own_choice") for folder in stock.values()), strict=True))
    for metric in ("acc", "acc_norm"):
        expected = []
        for kind, sign in ((LOST, -1), (GAINED, 1)):
            for one, two in pairs:
                if two[metric] - one[metric] == sign:
                    choices = one["doc"]["choices"]
                    answers = []
                    for each in (one, two):
                        scores = [float(answer[0]) for answer in each["filtered_resps"]]
                        lengths = [len(choice) if metric == "acc_norm" else 1 for choice in choices]
                        answers.append(choices[int(np.argmax(np.divide(scores, lengths)))])
                    question = one["arguments"]["gen_args_0"]["arg_0"]
                    expected.append(Flip("own_choice", metric, kind, one["doc_id"], question, *answers))
        assert [each for each in found if each.metric == metric] == expected
    assert {each.kind for each in found} == {LOST, GAINED}


def test_documents_are_paired_by_what_they_are_not_by_row_or_number(logs: tuple[Path, Path]) -> None:
    before = compare(*map(str, logs))
    rows = lines(logs[1], "own_choice")
    order = np.random.default_rng(0).permutation(len(rows))
    rewrite(logs[1], "own_choice", [rows[at] | {"doc_id": place} for place, at in enumerate(order)])
    after = compare(*map(str, logs))
    assert after.rows == before.rows
    assert after.flips == before.flips


def test_alike_documents_are_paired_in_order_and_each_once(logs: tuple[Path, Path]) -> None:
    for folder in logs:
        rows = lines(folder, "own_choice")
        for row in rows[3:6]:
            row["doc_hash"] = rows[2]["doc_hash"]
        rewrite(folder, "own_choice", rows)
    row = compare(*map(str, logs), ["own_choice"], ["acc"]).rows[0]
    one, two = ([each["acc"] for each in by_id(folder, "own_choice")] for folder in logs)
    assert row.n == 40
    assert row.difference == paired_difference(one, two)


def test_documents_of_one_run_alone_are_counted_and_left_out(logs: tuple[Path, Path]) -> None:
    rewrite(logs[0], "own_choice", lines(logs[0], "own_choice")[:30])
    rewrite(logs[1], "own_choice", lines(logs[1], "own_choice")[12:])
    found = compare(*map(str, logs), ["own_choice"])
    assert found.remarks == (
        "own_choice: A's log has 30 documents, its results are of 40",
        "own_choice: B's log has 28 documents, its results are of 40",
        "own_choice: 12 documents only in A, 10 only in B; they are left out",
    )
    one, two = ([each["acc"] for each in by_id(folder, "own_choice") if 12 <= each["doc_id"] < 30] for folder in logs)
    # What the results say is of all the documents: the scores here are of those that are compared.
    assert found.rows[0].mha == pytest.approx(np.mean(one))
    assert (found.rows[0].n, found.rows[0].difference) == (18, paired_difference(one, two))


def test_other_prompts_are_said_once_for_a_task(logs: tuple[Path, Path]) -> None:
    rows = lines(logs[1], "own_choice")
    rewrite(logs[1], "own_choice", [row | {"prompt_hash": "other"} if row["doc_id"] > 30 else row for row in rows])
    assert compare(*map(str, logs)).remarks == (
        "own_choice: prompts differ for 9 of 40 documents (document 31 is the first), "
        "so the difference is that of the prompts as well",
    )


def test_a_document_that_stands_twice_counts_once_and_twice_otherwise_is_damage(
    logs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before, rows = compare(*map(str, logs)), lines(logs[0], "own_choice")
    rewrite(logs[0], "own_choice", [*rows, *rows[:3]])
    after = compare(*map(str, logs))
    assert after.rows == before.rows
    assert after.remarks == ("own_choice: A has 3 documents twice; each counts once",)
    rewrite(logs[0], "own_choice", [*rows, rows[7] | {"acc": 1 - rows[7]["acc"]}])
    assert refused(capsys, *logs) == (
        1,
        "own_choice: A has document 7 twice, with different acc; its log is damaged\n",
    )


def test_of_several_dates_the_newest_is_taken_and_that_is_said(logs: tuple[Path, Path]) -> None:
    (path,) = logs[0].rglob("samples_own_text_*.jsonl")
    for year, rows in (("2021", []), ("2999", lines(logs[1], "own_text"))):
        other = path.with_name(f"samples_own_text_{year}-01-02T03-04-05.678901.jsonl")
        other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare(*map(str, logs), ["own_text"])
    assert found.remarks == ("A has 3 logs of own_text; the newest, of 2999-01-02T03-04-05.678901, is taken",)
    assert found.rows[0].mha == found.rows[0].method


def test_logs_without_hashes_are_paired_by_number_and_prompt(logs: tuple[Path, Path]) -> None:
    """As lm-eval wrote them before it hashed documents, or named the metrics of a line."""
    before = compare(*map(str, logs), ["own_choice"])
    for folder in logs:
        rows = [
            {
                name: value
                for name, value in row.items()
                if not name.endswith("_hash") and name not in ("metrics", "filter")
            }
            for row in lines(folder, "own_choice")
        ]
        rewrite(folder, "own_choice", rows)
    assert compare(*map(str, logs), ["own_choice"]).rows == before.rows
    rows[4]["arguments"]["gen_args_0"]["arg_0"] = "something else"
    rewrite(logs[1], "own_choice", rows)
    assert compare(*map(str, logs), ["own_choice"]).remarks == (
        "own_choice: 1 documents only in A, 1 only in B; they are left out",
    )


def test_without_results_the_scores_from_0_to_1_are_averaged(logs: tuple[Path, Path]) -> None:
    before = [each for each in compare(*map(str, logs)).rows if each.task == "own_choice"]
    (path,) = logs[0].rglob("results_*.json")
    path.unlink()
    assert list(compare(*map(str, logs), ["own_choice"]).rows) == before


def test_several_filters_are_compared_each(logs: tuple[Path, Path]) -> None:
    for folder in logs:
        rows = lines(folder, "own_text")
        strict = [row | {"filter": "strict", "exact_match": 0.0} for row in rows]
        rewrite(folder, "own_text", [*rows, *strict])
        (path,) = folder.rglob("results_*.json")
        results = json.loads(path.read_text())
        results["results"]["own_text"]["exact_match,strict"] = 0.0
        path.write_text(json.dumps(results))
    found = {each.metric: each for each in compare(*map(str, logs), ["own_text"]).rows}
    assert set(found) == {"exact_match", "exact_match (strict)"}
    assert found["exact_match (strict)"].difference == paired_difference([0] * 40, [0] * 40)


def test_a_task_of_another_version_or_of_one_run_alone_is_said(logs: tuple[Path, Path]) -> None:
    (path,) = logs[1].rglob("results_*.json")
    results = json.loads(path.read_text())
    results["versions"]["own_choice"] = 2.0
    path.write_text(json.dumps(results))
    next(logs[0].rglob("samples_own_text_*")).unlink()
    assert compare(*map(str, logs)).remarks == (
        "only in B: own_text",
        "own_choice: version Yaml of the task in A, 2.0 in B",
    )


def test_the_command_prints_the_table_and_the_flips_and_writes_all_of_them(
    stock: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", *map(str, stock.values()), "flips=1", f"out={out}"]) == 0
    said = capsys.readouterr().out
    assert "| own_choice  | acc_norm        |  40 |" in said
    found = compare(*map(str, stock.values()))
    of = [each for each in found.flips if (each.task, each.metric) == ("own_choice", "acc_norm")]
    for kind in (LOST, GAINED):
        those = [each for each in of if each.kind == kind]
        assert f"own_choice, acc_norm: {kind} in {len(those)} documents, the first 1" in said
        assert f"| {those[0].doc_id} " in said
    assert (out / "table.md").read_text().startswith(said.split("\n\n" + str(out))[0][:200])
    table = pd.read_csv(out / "table.csv")
    assert table["p"].iloc[0] == pytest.approx(found.rows[0].difference.p)
    assert (table["b"] - table["a"]).tolist() == pytest.approx(table["difference"].tolist())
    flips = pd.read_csv(out / "flips.csv")
    assert flips["question"].tolist() == [each.question for each in found.flips]
    assert main(["compare", *map(str, stock.values()), "flips=0", "task=own_choice", "metric=acc"]) == 0
    assert capsys.readouterr().out.count("\n") == 6


def test_answers_of_other_kinds_of_tasks_are_what_differs_between_them() -> None:
    """Choices that stand in the prompt, as winogrande's do; choices weighed without their prompt; several filters."""
    mutual = {"acc_mutual_info": 1.0, "metrics": ["acc", "acc_mutual_info"]}
    answers = [["-2.0", "False"], ["-1.0", "True"]]
    prompts = {"arguments": {f"gen_args_{at}": {"arg_0": f"the {at}", "arg_1": " fits"} for at in range(2)}}
    texts = {"arguments": {f"gen_args_{at}": {"arg_0": "which", "arg_1": f" {at}"} for at in range(2)}}
    for given, metric, expected in (
        ({**prompts, "filtered_resps": answers}, "acc", "the 1"),
        ({**prompts, "filtered_resps": answers}, "acc_norm", "–"),
        ({**texts, "filtered_resps": answers * 2, **mutual}, "acc", "1"),
        ({**texts, "filtered_resps": answers * 2, **mutual}, "acc_mutual_info", "–"),
        ({"filtered_resps": [["seven"]]}, "exact_match", "seven"),
        ({"filtered_resps": [["-2.0", "False"]]}, "acc", "–"),
    ):
        row = row_of({"doc_id": 0, "acc": 1.0, **given}, " ")
        assert answer(row, metric, row.get("choices")) == expected
    assert answer({"loglikelihoods": [-4.0, -3.0]}, "acc_bytes", ["ééé", "e"]) == "ééé"


@pytest.mark.parametrize(
    ("question", "shown"),
    [
        ("Question: which?\nAnswer:", "Question: which? Answer:"),
        (
            "An example of a question.\n\nIts answer.\n\nThe question that is to be answered?",
            "The question that is to be",
        ),
        (
            "A passage of some length, which is long.\n\nQuestion: a | b?\n\nAnswer:",
            "A passage of some length, which is long. Q",
        ),
        ("\x1b[31mred\x07", "[31mred"),
        ("x" * 100 + " end", f"{'x' * 45} … {'x' * 41} end"),
    ],
)
def test_a_question_is_one_line_of_its_own_words(question: str, shown: str) -> None:
    line = asked(question)
    assert line.startswith(shown)
    assert len(line) <= 95
    assert line.isprintable()
    assert "|" not in line.replace(r"\|", "")


def test_long_answers_are_cut_around_the_place_where_they_differ() -> None:
    same = "word " * 40
    a, b = answered(f"{same}one {same}", f"{same}two {same}")
    assert a != b
    assert "… word word" in a
    assert " one " in a
    assert " two " in b
    assert answered("yes\n", "no") == ("yes", "no")


def test_folders_may_be_named_by_a_pattern(stock: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(stock["a"] / "*"), f"{stock['b']}*", "flips=0"]) == 0
    assert "own_text" in capsys.readouterr().out


def damaged(logs: tuple[Path, Path]) -> None:
    (path,) = logs[0].rglob("samples_own_choice_*")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])


def without_numbers(logs: tuple[Path, Path]) -> None:
    rewrite(logs[0], "own_choice", [{"doc": {}, "acc": 1.0}])


def strange_answers(logs: tuple[Path, Path]) -> None:
    rows = lines(logs[0], "own_choice")
    rewrite(logs[0], "own_choice", [rows[0], rows[1] | {"filtered_resps": [["a"], ["b"]]}])


def empty(logs: tuple[Path, Path]) -> None:
    rewrite(logs[0], "own_choice", [])


def broken_results(logs: tuple[Path, Path]) -> None:
    next(logs[1].rglob("results_*.json")).write_text("{")


def no_identity(logs: tuple[Path, Path]) -> None:
    kept = ("doc_id", "filter", "metrics", "acc", "acc_norm")
    rows = lines(logs[0], "own_choice")
    rewrite(logs[0], "own_choice", [{name: row[name] for name in kept} for row in rows])


def other_documents(logs: tuple[Path, Path]) -> None:
    for task in ("own_choice", "own_rolling", "own_text"):
        rewrite(logs[1], task, [row | {"doc_hash": f"other {row['doc_id']}"} for row in lines(logs[1], task)])


def two_models(logs: tuple[Path, Path]) -> None:
    (place,) = {path.parent for path in logs[0].rglob("samples_*")}
    other = place.with_name("another")
    other.mkdir()
    for path in place.iterdir():
        (other / path.name).write_bytes(path.read_bytes())


def no_samples(logs: tuple[Path, Path]) -> None:
    for path in logs[1].rglob("samples_*"):
        path.unlink()


def no_common_task(logs: tuple[Path, Path]) -> None:
    for folder, task in zip(logs, ("own_choice", "own_text"), strict=True):
        for path in folder.rglob("samples_*"):
            if task not in path.name:
                path.unlink()


FAILURES = {
    damaged: (1, r"samples_own_choice_\S+\.jsonl, line \d+: damaged \(JSONDecodeError: "),
    without_numbers: (1, r"jsonl, line 1: damaged \(KeyError: 'doc_id'\)"),
    strange_answers: (1, r"jsonl, line 2: damaged \(ValueError: could not convert string to float"),
    empty: (1, r"samples_own_choice_\S+: has no documents"),
    broken_results: (1, r"results_\S+\.json: can't be read \("),
    no_identity: (1, "own_choice: a log has neither doc_hash nor prompts to know documents by; allowed: logs of"),
    other_documents: (1, "A and B have nothing to compare: own_choice: 40 documents only in A, 40 only in B"),
    two_models: (
        2,
        r"^A: '\S+' given, which has several runs of own_choice \(\S+another, .*\); allowed: the folder of",
    ),
    no_samples: (
        2,
        r"^B: '\S+' given, with results but no samples of lm-eval \(--log_samples writes them\); allowed: ",
    ),
    no_common_task: (2, "^B: its tasks own_text given beside those of A, own_choice; allowed: logs with a task in"),
}


@pytest.mark.parametrize("damage", FAILURES, ids=lambda each: each.__name__)
def test_what_does_not_fit_is_one_line(
    damage: Any, logs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(logs)
    status, said = refused(capsys, *logs)
    assert status == FAILURES[damage][0]
    assert pd.Series([said]).str.contains(FAILURES[damage][1]).all(), said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("A", "compare: 1 folders given; allowed: two, and setting=value (see --help)"),
        ("A B C", "compare: 3 folders given; allowed: two, and setting=value (see --help)"),
        ("A nowhere", "B: 'nowhere' given, no such folder; allowed: a folder with lm-eval's logs"),
        ("A nowhere/*", "B: 'nowhere/*' given, no such folder; allowed: a folder with lm-eval's logs"),
        ("A .", "B: '.' given, no logs there; allowed: a folder with lm-eval's logs"),
        ("A B task=piqa", "task: 'piqa' is unknown; allowed: own_choice, own_rolling, own_text"),
        ("A B metric=f1", "metric: 'f1' is unknown; allowed: acc, acc_norm, byte_perplexity, exact_match"),
        ("A B metric=[]", "metric: [] given; allowed: a metric, several as [a,b], or null"),
        ("A B flips=-1", "flips: -1 given; allowed: a whole number from 0 up, or null"),
        ("A B flip=3", "flip: 'flip' is unknown (did you mean flips?); allowed: "),
    ],
)
def test_a_mistake_in_what_is_typed_is_one_line(
    typed: str,
    said: str,
    stock: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {name.upper(): str(path) for name, path in stock.items()}
    status, line = refused(capsys, *(places.get(each, each) for each in typed.split()))
    assert status == 2
    assert line.startswith(said)
