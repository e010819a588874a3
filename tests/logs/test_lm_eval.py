"""Our results and lm-eval's logs of the same scores say the same, to the last digit; what is written is read back."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from lm_eval.utils import make_table

from chai_eval.cli.overrides import jobs_of
from chai_eval.errors import RunError
from chai_eval.logs.compare import Comparison, compare
from chai_eval.logs.flips import LOST
from chai_eval.logs.lm_eval import write
from chai_eval.report import Row
from chai_eval.run import run
from chai_eval.scoring.tasks import load_task
from chai_eval.session import Session
from chai_eval.settings import TaskSettings
from chai_eval.store.record import read_record, write_record
from tests.logs.made import MODEL, TASKS, lines

RUN = (f"model={MODEL}", "dtype=float32", "device=cpu", "limit=null", "fidelity=0", "debug=true")
UNDER = ("method=chai", "method.clusters=[[2,4]]", "method.probe_tokens=3")


@pytest.fixture(scope="module")
def ours(own_tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Row, ...]]:
    """Our results of the same model and tasks, and the rows of their table."""
    results = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        typed = [*RUN, *UNDER, f"task=[{','.join(TASKS)}]", f"include_path={own_tasks}", f"results_dir={results}"]
        report = run(jobs_of(typed, multirun=False)[0].settings, Session())
    assert not report.failures
    return results / MODEL, report.rows


def key(row: Row) -> tuple[str, str]:
    return row.task, row.metric


def numbers(found: Comparison) -> list[tuple[object, ...]]:
    return [(*key(row), row.n, row.mha, row.method, row.difference) for row in found.rows]


def both(folder: Path) -> tuple[str, str]:
    return str(folder / "*" / "mha-*"), str(folder / "*" / "chai-*")


@pytest.fixture(scope="module")
def written(ours: tuple[Path, tuple[Row, ...]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Our results of both methods as lm-eval would have logged them, a folder each."""
    folders = []
    for pattern in ("*/mha-*", "*/chai-*"):
        folders.append(tmp_path_factory.mktemp("written"))
        for folder in sorted(ours[0].glob(pattern)):
            write(folder, folders[-1])
    return folders[0], folders[1]


def test_a_comparison_of_our_results_is_the_table_of_the_run_to_the_last_digit(
    ours: tuple[Path, tuple[Row, ...]],
) -> None:
    found = {key(row): row for row in compare(*both(ours[0])).rows}
    assert len(ours[1]) == len(TASKS)
    for row in ours[1]:
        assert found[key(row)] == row
    assert any(row.difference.points for row in ours[1])


def test_stock_logs_of_the_same_scores_give_the_same_to_the_last_digit(
    ours: tuple[Path, tuple[Row, ...]], stock: dict[str, Path]
) -> None:
    """Rolling texts are scored in other batches by stock lm-eval, and so to other roundings."""
    tasks = [task for task in TASKS if task != "own_rolling"]
    a, b = both(ours[0])
    expected = compare(a, b, tasks)
    for one, two in ((str(stock["a"]), str(stock["b"])), (a, str(stock["b"])), (str(stock["a"]), b)):
        found = compare(one, two, tasks)
        assert sorted(numbers(found)) == sorted(numbers(expected))
        assert [(each.doc_id, each.kind) for each in found.flips if each.metric == "acc"] == [
            (each.doc_id, each.kind) for each in expected.flips if each.metric == "acc"
        ]
    rolling = compare(str(stock["a"]), str(stock["b"]), ["own_rolling"]).rows[0]
    assert rolling.difference.low == pytest.approx(compare(a, b, ["own_rolling"]).rows[0].difference.low, rel=1e-4)


def test_a_flip_of_our_result_has_the_texts_of_the_other_log(
    ours: tuple[Path, tuple[Row, ...]], stock: dict[str, Path]
) -> None:
    whole = compare(str(stock["a"]), str(stock["b"]), ["own_choice"]).flips
    assert compare(both(ours[0])[0], str(stock["b"]), ["own_choice"]).flips == whole
    alone = compare(*both(ours[0]), ["own_choice"]).flips
    assert {each.question for each in alone} == {"–"}
    assert {each.a for each in alone} <= {"choice 1", "choice 2", "choice 3"}


def test_what_is_written_is_read_back_with_equal_numbers(
    ours: tuple[Path, tuple[Row, ...]], written: tuple[Path, Path]
) -> None:
    expected = compare(*both(ours[0]))
    found = compare(*map(str, (next(each.iterdir()).parent for each in written)))
    assert sorted(map(str, numbers(found))) == sorted(map(str, numbers(expected)))
    assert found.flips == expected.flips


def test_lm_evals_own_table_takes_what_is_written(
    ours: tuple[Path, tuple[Row, ...]], written: tuple[Path, Path]
) -> None:
    tables = []
    for path in sorted(written[1].rglob("results_*.json")):
        results = json.loads(path.read_text())
        tables.append(make_table(results))
        (task,) = results["results"]
        record = read_record(next((ours[0] / task).glob("chai-*")))
        for metric, each in record["metrics"].items():
            assert results["results"][task][f"{metric},none"] == each["value"]
    shown = "\n".join(tables)
    assert all(task in shown for task in TASKS)
    assert "acc_norm" in shown


def test_lines_have_what_stock_lines_have_as_far_as_a_result_knows_it(
    written: tuple[Path, Path], stock: dict[str, Path]
) -> None:
    for task in TASKS:
        (path,) = written[0].rglob(f"samples_{task}_*.jsonl")
        ours = {row["doc_id"]: row for row in map(json.loads, path.read_text().splitlines())}
        for row in lines(stock["a"], task):
            mine = ours[row["doc_id"]]
            for name in ("doc_hash", "prompt_hash", "filter", "metrics"):
                assert mine[name] == row[name]
            assert set(mine) - set(row) <= {"lengths"}
            assert len(mine["filtered_resps"]) in (0, len(row["filtered_resps"]))
            if task == "own_text":
                assert mine["filtered_resps"] == row["filtered_resps"]


def test_the_same_is_written_twice(ours: tuple[Path, tuple[Row, ...]], tmp_path: Path) -> None:
    folder = next(ours[0].glob("own_choice/chai-*"))
    first, second = (write(folder, tmp_path / name) for name in "ab")
    assert first.relative_to(tmp_path / "a") == second.relative_to(tmp_path / "b")
    for one in first.parent.iterdir():
        assert one.read_bytes() == (second.parent / one.name).read_bytes()


def test_a_folder_without_a_result_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^\S+: no finished result$"):
        write(tmp_path, tmp_path / "out")


def test_several_methods_below_a_folder_are_refused_and_the_newest_of_one_is_taken(
    ours: tuple[Path, tuple[Row, ...]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"^A: .* has several runs of own_choice \(.*chai-.*, .*mha-.*\); allowed"):
        compare(str(ours[0]), str(ours[0]))
    folder = next(ours[0].glob("own_choice/chai-*"))
    record = read_record(folder)
    samples = pd.read_parquet(folder / "samples.parquet")
    for day, score in (("2001", 0.0), ("2002", 1.0)):
        other = {**record, "finished": f"{day}-01-01T00:00:00+00:00", "metrics": {"acc": {"value": score}}}
        write_record(tmp_path / f"chai-{day}", other, samples.assign(acc=score))
    found = compare(str(tmp_path), str(folder))
    assert found.rows[0].mha == 1.0
    assert found.remarks[0].startswith("A has 2 logs of own_choice; the newest, of 2002-01-01")


@pytest.mark.assets
def test_flips_of_the_papers_tasks_have_the_texts_that_were_scored(tmp_path: Path) -> None:
    typed = [*RUN, *UNDER, "task=piqa", "limit=40", f"results_dir={tmp_path}"]
    report = run(jobs_of([each for each in typed if each != "limit=null"], multirun=False)[0].settings, Session())
    assert not report.failures
    found = compare(*both(tmp_path / MODEL)).flips
    documents = pd.DataFrame(list(load_task("piqa", TaskSettings(source="local")).eval_docs))
    assert found
    for each in found:
        document = documents.iloc[each.doc_id]
        assert each.question == f"Question: {document.goal}\nAnswer:"
        right = document[f"sol{document.label + 1}"].strip()
        assert (each.a if each.kind == LOST else each.b) == right
        assert {each.a, each.b} == {document.sol1.strip(), document.sol2.strip()}
