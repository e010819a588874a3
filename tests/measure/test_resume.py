"""A measurement that was killed goes on with the points of its grid that it had not come to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from chai_eval.cli import main
from chai_eval.errors import RunError
from chai_eval.measure import grid, stored
from chai_eval.measure.ceiling import Ceiling
from chai_eval.measure.progress import Progress
from chai_eval.store.record import read_record, read_samples

FEW = ["measure.lengths=[8,12,16]", "measure.new_tokens=2", "measure.repetitions=1", "measure.rivals=[sdpa]"]
GIVEN = ["measure", "model=tiny_llama_random", "measure=latency", *FEW]
# Kills itself when it comes to the third point.
CODE = f"""
import os, signal
from chai_eval.measure import ceiling, grid
grid.measure_ceiling = lambda *_, **__: ceiling.Ceiling(1e10, 1e10, 1e11)
measure_latency = grid.measure_latency
def killed(model, contenders, point, *rest):
    if point.length == 16:
        os.kill(os.getpid(), signal.SIGKILL)
    return measure_latency(model, contenders, point, *rest)
grid.measure_latency = killed
from chai_eval.cli import main
main({GIVEN})
"""


def test_a_killed_measurement_goes_on_and_keeps_what_it_had_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (folder,) = tmp_path.glob("results/tiny_llama_random/measure/*")
    assert read_record(folder) is None
    written = {path.stem: json.loads(path.read_text())["found"] for path in folder.glob("parts/*.json")}
    assert sorted(written) == ["12-1-2", "8-1-2", "ceiling"]

    measured: list[int] = []

    def watched(model: Any, contenders: Any, point: Any, *rest: Any, latency: Callable[..., Any]) -> Any:
        measured.append(point.length)
        return latency(model, contenders, point, *rest)

    latency = grid.measure_latency
    monkeypatch.setattr(grid, "measure_latency", lambda *given: watched(*given, latency=latency))
    monkeypatch.setattr(grid, "measure_ceiling", lambda *_, **__: pytest.fail("measured again"))
    monkeypatch.chdir(tmp_path)
    assert main(GIVEN) == 0
    assert measured == [16]
    record = read_record(folder)
    assert record is not None
    assert [point["length"] for point in record["points"]] == [8, 12, 16]
    assert record["points"][:2] == [written["8-1-2"]["figures"], written["12-1-2"]["figures"]]
    seconds = [each["seconds"] for name in ("8-1-2", "12-1-2") for each in written[name]["samples"]]
    assert read_samples(folder).seconds.tolist()[: len(seconds)] == seconds
    assert not (folder / "parts").exists()


def test_a_measurement_waits_for_another_process_that_writes_to_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "measure_ceiling", lambda *_, **__: Ceiling(1e10, 1e10, 1e11))
    monkeypatch.chdir(tmp_path)
    assert main(GIVEN) == 0
    (lock,) = tmp_path.glob("results/.locks/*.lock")
    (record,) = tmp_path.glob("results/tiny_llama_random/measure/*/record.json")
    record.unlink()
    other = FileLock(lock)
    other.acquire()

    def until_said(said: object) -> None:
        assert not record.exists()
        other.release()

    monkeypatch.setattr(stored.log, "warning", lambda said, *_: until_said(said))
    assert main(GIVEN) == 0
    assert record.exists()
    assert not other.is_locked


def test_parts_of_another_question_and_damaged_ones_are_measured_again(tmp_path: Path) -> None:
    first, second = Ceiling(1.0, 2.0, 3.0), Ceiling(4.0, 5.0, 6.0)
    assert Progress(tmp_path, {"threads": 1}).part("ceiling", Ceiling, lambda: first) == first
    assert Progress(tmp_path, {"threads": 1}).part("ceiling", Ceiling, lambda: second) == first
    assert Progress(tmp_path, {"threads": 2}).part("ceiling", Ceiling, lambda: second) == second
    path = tmp_path / "ceiling.json"
    path.write_text(path.read_text().replace("4.0", "7.0"))
    assert Progress(tmp_path, {"threads": 2}).part("ceiling", Ceiling, lambda: first) == first


def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"ceiling\.json: can't be written \(File exists\)"):
        Progress(tmp_path / "file").part("ceiling", Ceiling, lambda: Ceiling(1.0, 1.0, 1.0))
