"""Whole processes on a tiny random model: killed, started twice at once, started again."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from chai_eval.cli import main
from tests.kill_and_resume import arguments, results, write_documents

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_a_run_killed_at_random_moments_ends_equal_to_one_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "kill_and_resume.py"), "--kills", "5"],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 results equal" in done.stdout


def test_two_processes_on_one_sweep_score_each_result_once(tmp_path: Path) -> None:
    write_documents(tmp_path / "documents", 30)
    command = [sys.executable, "-m", "chai_eval", "-m", "method.probe_tokens=2,5"]
    command += arguments(tmp_path / "documents", tmp_path / "results")
    both = [subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=ENVIRONMENT, cwd=tmp_path) for _ in range(2)]
    ended = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    scored = [line for _, error in ended for line in error.splitlines() if ": scoring " in line]
    # Three tasks under MHA and under CHAI with two settings.
    assert len(scored) == 9
    assert ended[0][0] == ended[1][0]
    assert ended[0][0].count("| piqa ") == 4  # twice in tables of their own, twice in that of the sweep


# Two tasks in each of two jobs, which share their baselines. Folders are relative: jobs must find them elsewhere, too.
SWEEP = ["-m", "method.probe_tokens=2,5", *arguments(Path("documents"), Path("results"), "piqa,boolq")]
LAUNCHERS = {"joblib": [], "submitit_local": [], "ray": ["hydra.launcher.ray.init.num_cpus=2"]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object]]:
    """What a plain sweep prints, and its results. In this process: another would take longer to start than to sweep."""
    printed, folder = StringIO(), tmp_path_factory.mktemp("plain")
    write_documents(folder / "documents", 4)
    with chdir(folder), redirect_stdout(printed):
        assert main(SWEEP) == 0
    return printed.getvalue(), results(folder / "results")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_gives_the_results_of_a_plain_sweep(
    launcher: str, plain: tuple[str, dict[str, object]], tmp_path: Path
) -> None:
    write_documents(tmp_path / "documents", 4)
    launched = subprocess.run(
        [sys.executable, "-m", "chai_eval", *SWEEP, f"launcher={launcher}", *LAUNCHERS[launcher]],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        cwd=tmp_path,
    )
    assert launched.returncode == 0, launched.stderr
    assert (launched.stdout, results(tmp_path / "results")) == plain
    assert len(plain[1]) == 6
