from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from chai_eval.cli import main
from chai_eval.errors import SettingError
from chai_eval.store.folder import ResultFolder, check_writable
from chai_eval.store.journal import Journal
from chai_eval.store.record import LAYOUT, write_record
from chai_eval.store.status import list_results

ROOT = Path(__file__).parents[2]


def folder(results_dir: Path, task: str = "piqa", key: str = "0123456789ab") -> ResultFolder:
    return ResultFolder(results_dir, "tiny", task, "chai", key)


def test_a_result_lies_under_model_task_and_method_with_key(tmp_path: Path) -> None:
    assert folder(tmp_path).path == tmp_path / "tiny" / "piqa" / "chai-0123456789ab"
    assert folder(tmp_path, task="group/task").path.parent == tmp_path / "tiny" / "group__task"


HOLD = """
import sys, time
from pathlib import Path
from chai_eval.store.folder import ResultFolder
with ResultFolder(Path(sys.argv[1]), "tiny", "piqa", "chai", "0123456789ab").held():
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(results_dir: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(results_dir), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_says_who_holds_a_result_and_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holder(tmp_path, 1.0) as process, folder(tmp_path).held():
        assert process.wait(timeout=1) == 0
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert f"process {process.pid} on " in said[0]


def test_a_killed_holder_holds_nothing_any_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holder(tmp_path, 60) as process:
        process.kill()
        process.wait()
        started = time.monotonic()
        with folder(tmp_path).held():
            assert time.monotonic() - started < 10
    assert caplog.records == []


def test_two_results_are_held_independently(tmp_path: Path) -> None:
    with folder(tmp_path).held(), folder(tmp_path, task="boolq").held():
        pass


def finish(result: ResultFolder) -> None:
    write_record(result.path, {"n_documents": 7, "metrics": {"acc": {"value": 1.0}}}, pd.DataFrame({"acc": [1.0]}))


def test_status_tells_finished_partial_failed_running_and_unreadable_apart(tmp_path: Path) -> None:
    finished, partial, failed, running, old = (
        folder(tmp_path, task) for task in ("finished", "partial", "failed", "piqa", "old")
    )
    finish(finished)
    for unfinished in (partial, failed, running):
        unfinished.begin({"n_requests": 40})
        with Journal(unfinished.journal) as journal:
            journal.append_many([("a", 1), ("b", 2)])
    failed.fail("logits are not finite in layer 3")
    old.path.mkdir(parents=True)
    (old.path / "record.json").write_text('{"layout": 0}')
    with running.held():
        listed = {result.task: result for result in list_results(tmp_path)}
    assert {task: result.state for task, result in listed.items()} == {
        "finished": "finished",
        "partial": "partial",
        "failed": "failed",
        "piqa": "running",
        "old": "unreadable",
    }
    assert listed["partial"].detail == "2 of 40 requests"
    assert "logits are not finite in layer 3" in listed["failed"].detail
    assert f"process {os.getpid()}" in listed["piqa"].detail
    assert "layout 0" in listed["old"].detail


def test_a_new_attempt_forgets_the_failure_and_counts_the_seconds_spent_before(tmp_path: Path) -> None:
    result = folder(tmp_path)
    assert result.begin({}) == 0
    with Journal(result.journal) as journal:
        journal.append_many([("a", 1)])
    os.utime(result.journal, (time.time() + 5, time.time() + 5))
    result.fail("out of memory")
    assert result.begin({}) == pytest.approx(5, abs=1)
    assert list_results(tmp_path)[0].state == "partial"


ODD = [
    ("record.json", '{"layout": 1}', "n_documents is missing"),
    ("record.json", '{"layout": 1, "n_documents": 7, "metrics": {"acc": null}}', "acc is None"),
    ("samples.parquet", "PAR1", "samples.parquet: not readable"),
    ("samples.parquet", None, "samples.parquet: not readable (it is missing)"),
    ("attempt.json", "[]", "attempt.json: holds []"),
    ("attempt.json", "{}", "attempt.json: started is None"),
    ("attempt.json", '{"started": "now", "seconds_before": 0}', "attempt.json: started is 'now'"),
    ("attempt.json", '{"started": 1, "seconds_before": 0, "n_requests": "many"}', "n_requests is 'many'"),
    ("attempt.json", "{", "attempt.json: can't be read"),
    ("failed.json", "[]", "failed.json: holds []"),
    ("failed.json", "{}", "failed.json: why is None"),
    ("failed.json", '{"why": 3}', "failed.json: why is 3"),
]


@pytest.mark.parametrize(("name", "content", "said"), ODD, ids=[f"{name} {content}" for name, content, _ in ODD])
def test_an_odd_file_makes_its_own_result_unreadable_and_no_other(
    tmp_path: Path, name: str, content: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = folder(tmp_path, "odd")
    finish(folder(tmp_path))
    if name == "samples.parquet":
        finish(odd)
    odd.path.mkdir(parents=True, exist_ok=True)
    (odd.path / name).unlink(missing_ok=True)
    if content is not None:
        (odd.path / name).write_text(content)
    listed = {result.task: result for result in list_results(tmp_path)}
    assert (listed["odd"].state, listed["piqa"].state) == ("unreadable", "finished")
    assert said in listed["odd"].detail
    assert main(["status", f"results_dir={tmp_path}"]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not a readable record"),
        ('{"layout": 0}', "layout 0"),
        (f'{{"layout": {LAYOUT}, "kind": "measure"}}', "lacks"),
    ],
    ids=str,
)
def test_a_measurement_that_cannot_be_read_is_listed_as_such(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(folder(tmp_path))
    measurement = tmp_path / "llama" / "measure" / "ba9876543210"
    measurement.mkdir(parents=True)
    (measurement / "record.json").write_text(content)
    assert main(["status", f"results_dir={tmp_path}"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "ba9876543210" in line)
    assert "unreadable" in line
    assert said in line


def test_a_journal_that_is_a_directory_makes_its_result_unreadable(tmp_path: Path) -> None:
    folder(tmp_path).journal.mkdir(parents=True)
    assert [(each.state, "can't be read" in each.detail) for each in list_results(tmp_path)] == [("unreadable", True)]


@pytest.mark.parametrize("content", ["[]", "{}", "{", '{"started": "now", "seconds_before": null}', '{"started": NaN}'])
def test_an_odd_note_on_an_attempt_does_not_keep_the_next_one_from_going_on(tmp_path: Path, content: str) -> None:
    result = folder(tmp_path)
    with Journal(result.journal) as journal:
        journal.append_many([("a", 1)])
    (result.path / "attempt.json").write_text(content)
    assert result.begin({"n_requests": 2}) == 0
    assert list_results(tmp_path)[0].detail == "1 of 2 requests"


@pytest.mark.parametrize("inside", ["", "new", "new/deep"])
def test_checking_a_results_folder_leaves_no_trace(tmp_path: Path, inside: str) -> None:
    check_writable(tmp_path / inside)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inside", ["file", "file/below"])
def test_a_results_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"^results_dir: .* can't be written .*; allowed: [^\n]+$"):
        check_writable(tmp_path / inside)


def test_a_file_system_that_takes_no_files_is_a_wrong_setting() -> None:
    if not Path("/proc/self").is_dir():
        pytest.skip("needs a /proc file system")
    with pytest.raises(SettingError, match=r"^results_dir: "):
        check_writable(Path("/proc/self/results"))


def test_a_result_that_was_set_aside_is_no_result_and_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(folder(tmp_path))
    aside = folder(tmp_path).set_aside()
    finish(folder(tmp_path))
    again = folder(tmp_path).set_aside()
    assert [path.name for path in (aside, again)] == ["chai-0123456789ab.damaged-1", "chai-0123456789ab.damaged-2"]
    assert list_results(tmp_path) == []
    assert main(["status", f"results_dir={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [f"set aside as damaged: {path}" for path in (aside, again)]


@pytest.mark.parametrize("name", ["record.json", "samples.parquet"])
def test_status_lists_a_damaged_result_as_unreadable_with_the_remedy(tmp_path: Path, name: str) -> None:
    finish(folder(tmp_path))
    path = folder(tmp_path).path / name
    path.write_bytes(path.read_bytes().replace(b"1.0", b"0.5").replace(b"PAR1", b"PAR2"))
    (listed,) = list_results(tmp_path)
    assert (listed.state, listed.record) == ("unreadable", None)
    assert "not what was written" in listed.detail
    assert listed.detail.endswith("; the command that made it, given again, makes it anew")
