"""The commands of the command line. What takes seconds to import (torch, lm-eval, pandas) is imported as they begin."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chai_eval.calibration.settings import parse_analysis, parse_calibration
from chai_eval.cli.help import analyse_help, calibrate_help, frontier_help, help_text, measure_help
from chai_eval.cli.measure import run_measurements
from chai_eval.cli.overrides import composed
from chai_eval.cli.sweep import run_jobs
from chai_eval.frontier.settings import parse_frontier
from chai_eval.scoring.ranks import Ranks

if TYPE_CHECKING:
    from chai_eval.session import Session


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes
    ----------
    arguments
        Settings and options as they were typed, without the command and without `-m`, which is `multirun`.
    debug
        Whether the traceback of an unexpected error is wanted.
    session
        Models that are loaded already.
    ranks
        Processes that do this together.
    """

    command: str
    arguments: list[str]
    multirun: bool
    debug: bool
    session: Session | None
    ranks: Ranks

    @property
    def line(self) -> str:
        """What can be typed again."""
        return shlex.join(["python", "-m", "chai_eval", self.command, *self.arguments])


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
    return run_jobs(
        request.arguments,
        multirun=request.multirun,
        debug=request.debug,
        session=request.session,
        ranks=request.ranks,
    )


def _measure(request: Request) -> int:
    return run_measurements(request.arguments, request.session)


def _calibrate(request: Request) -> int:
    settings = parse_calibration(composed("calibrate", request.arguments))
    from chai_eval.calibrate import main

    main(settings, request.line)
    return 0


def _analyse(request: Request) -> int:
    settings = parse_analysis(composed("analyse", request.arguments))
    from chai_eval.analyse import main

    main(settings, request.line)
    return 0


def _frontier(request: Request) -> int:
    settings = parse_frontier(composed("frontier", request.arguments))
    from chai_eval.frontier.command import main

    main(settings, request.line)
    return 0


def _status(request: Request) -> int:
    from chai_eval.cli.status import status

    return status(request.arguments)


def _benchmark(request: Request) -> int:
    from chai_eval.benchmark.command import main

    return main(request.arguments)


GOES_ON = "what was {} is kept, the same command goes on from there"

COMMANDS = {
    "run": Command(_run, help_text, GOES_ON.format("scored"), sweeps=True),
    "measure": Command(_measure, measure_help, GOES_ON.format("measured"), alone=True),
    "calibrate": Command(_calibrate, calibrate_help, GOES_ON.format("read"), alone=True),
    "analyse": Command(_analyse, analyse_help, GOES_ON.format("read"), alone=True),
    "frontier": Command(_frontier, frontier_help, GOES_ON.format("compared"), alone=True),
    "status": Command(_status, help_text, "nothing was changed"),
    "benchmark": Command(_benchmark, help_text, GOES_ON.format("measured"), own_options=True, alone=True),
}
