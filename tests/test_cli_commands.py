"""One command line for all commands: how each is named, explained, and refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from chai_eval.calibration.settings import AnalysisSettings, CalibrationSettings
from chai_eval.cli import main
from chai_eval.cli.commands import COMMANDS
from chai_eval.cli.overrides import composed
from chai_eval.cli.request import Request
from chai_eval.measure_settings import MeasureSettings
from chai_eval.report_settings import ReportSettings
from chai_eval.schema import defaults
from chai_eval.scoring.ranks import Ranks
from chai_eval.settings import Settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_run_is_what_is_done_where_no_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for typed in (["limit=0"], ["run", "limit=0"], ["-m", "run", "limit=0"]):
        assert main(typed) == 2
        said.append(capsys.readouterr())
    assert said[0] == said[1] == said[2]
    assert said[0].err == "limit: 0 given; allowed: a whole number from 1 up, or null\n"


@pytest.mark.parametrize(
    ("command", "kind", "prefix"),
    [
        ("run", Settings, ""),
        ("measure", MeasureSettings, "measure."),
        ("calibrate", CalibrationSettings, ""),
        ("analyse", AnalysisSettings, ""),
        ("report", ReportSettings, ""),
    ],
)
def test_help_of_a_command_has_every_setting_of_it(
    command: str, kind: type, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    lines = {line.split()[0].partition("=")[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert {prefix + name for name in defaults(kind)} <= lines


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if not command.own_options])
def test_an_option_that_a_command_does_not_take_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for typed in ["--fast", *([] if COMMANDS[command].sweeps else ["-m"])]:
        assert main([command, typed]) == 2
        assert capsys.readouterr().err.startswith(f"{typed}: unknown option; allowed: ")


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if command.alone])
def test_what_several_processes_cannot_do_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Two(Ranks):
        def leave(self) -> None:
            pass

    monkeypatch.setattr("chai_eval.cli.ranks_of", lambda: Two(0, 2, 0, 2))
    assert main([command]) == 2
    assert capsys.readouterr().err == f"{command}: given with 2 processes of accelerate or torchrun; " + (
        "allowed: one process\n"
    )


def test_a_calibration_of_a_model_given_by_its_path_has_the_name_that_methods_look_for() -> None:
    (name,) = {composed(config, ["path=/models/my llama"])["model"]["name"] for config in ("config", "calibrate")}
    assert name == "my_llama"


def test_what_is_recorded_as_having_made_a_file_can_be_typed_again() -> None:
    request = Request("calibrate", ["text=my file.txt", "out=${x}"], False, False, None, Ranks())
    assert shlex.split(request.line) == ["python", "-m", "chai_eval", "calibrate", "text=my file.txt", "out=${x}"]
