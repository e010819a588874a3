"""The commands of the command line. What takes seconds to import (torch, lm-eval, pandas) is imported as they begin."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from chai_eval.calibration.settings import AnalysisSettings, CalibrationSettings
from chai_eval.cli.experiment import names_experiment, run_experiments
from chai_eval.cli.help import ANALYSE, CALIBRATE, COMPARE, FRONTIER, REPORT, help_text, measure_help, offline_help
from chai_eval.cli.measure import run_measurements
from chai_eval.cli.overrides import composed
from chai_eval.cli.request import Request
from chai_eval.cli.status import status
from chai_eval.cli.sweep import run_jobs
from chai_eval.errors import SettingError
from chai_eval.frontier.settings import FrontierSettings
from chai_eval.logs.settings import CompareSettings
from chai_eval.report_settings import ReportSettings
from chai_eval.schema import read

# What is no setting is a folder; one whose name looks like a setting is typed with ./ before it.
SETTING = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*=")


@dataclass(frozen=True)
class Command:
    """How a command is done and explained, and what is said when it is interrupted.

    Attributes
    ----------
    sweeps
        Whether it takes `-m`.
    alone
        Whether several processes can't do it together.
    own_options
        Whether it reads its arguments itself, `--help` among them.
    """

    work: Callable[[Request], int]
    help: Callable[[], str]
    interrupted: str
    sweeps: bool = False
    alone: bool = False
    own_options: bool = False


def _run(request: Request) -> int:
    return run_experiments(request) if names_experiment(request.arguments) else run_jobs(request)


def _calibrate(request: Request) -> int:
    settings = read(CalibrationSettings, composed("calibrate", request.arguments))
    from chai_eval.calibrate import main

    main(settings, request.line)
    return 0


def _analyse(request: Request) -> int:
    settings = read(AnalysisSettings, composed("analyse", request.arguments))
    from chai_eval.analyse import main

    main(settings, request.line)
    return 0


def _frontier(request: Request) -> int:
    settings = read(FrontierSettings, composed("frontier", request.arguments))
    from chai_eval.frontier.command import main

    main(settings, request.line)
    return 0


def _report(request: Request) -> int:
    settings = read(ReportSettings, composed("report", request.arguments))
    from chai_eval.report.command import main

    main(settings, request.line)
    return 0


def _compare(request: Request) -> int:
    folders = [each for each in request.arguments if not SETTING.match(each)]
    if len(folders) != 2:
        raise SettingError(f"compare: {len(folders)} folders given; allowed: two, and setting=value (see --help)")
    given = composed("compare", [each for each in request.arguments if each not in folders])
    settings = read(CompareSettings, {**given, **dict(zip("ab", folders, strict=True))})
    from chai_eval.logs.command import main

    main(settings, request.line)
    return 0


def _benchmark(request: Request) -> int:
    from chai_eval.benchmark.command import main

    return main(request.arguments)


CALIBRATE_HELP = partial(offline_help, CALIBRATE, CalibrationSettings)
ANALYSE_HELP = partial(offline_help, ANALYSE, AnalysisSettings)
COMPARE_HELP = partial(offline_help, COMPARE, CompareSettings)
REPORT_HELP = partial(offline_help, REPORT, ReportSettings)
FRONTIER_HELP = partial(offline_help, FRONTIER, FrontierSettings)
GOES_ON = "what was {} is kept, the same command goes on from there"

COMMANDS = {
    "run": Command(_run, help_text, GOES_ON.format("scored"), sweeps=True),
    "measure": Command(run_measurements, measure_help, GOES_ON.format("measured"), alone=True),
    "calibrate": Command(_calibrate, CALIBRATE_HELP, GOES_ON.format("read"), alone=True),
    "analyse": Command(_analyse, ANALYSE_HELP, GOES_ON.format("read"), alone=True),
    "frontier": Command(_frontier, FRONTIER_HELP, GOES_ON.format("compared"), alone=True),
    "compare": Command(_compare, COMPARE_HELP, "the same command begins anew", alone=True),
    "report": Command(_report, REPORT_HELP, "the same command begins anew", alone=True),
    "status": Command(status, help_text, "nothing was changed"),
    "benchmark": Command(_benchmark, help_text, GOES_ON.format("measured"), own_options=True, alone=True),
}
