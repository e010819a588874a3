"""The command line: what was asked for, done, or said in one line why not.

Exit status: 0 when everything finished, 1 for what went wrong while running, 2 for a wrong setting, 130 when
interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from chai_eval import __version__
from chai_eval.cli.commands import COMMANDS, Command
from chai_eval.cli.console import quiet_libraries
from chai_eval.cli.request import Request
from chai_eval.errors import RunError, SettingError, failure_line
from chai_eval.scoring.ranks import ranks_of

if TYPE_CHECKING:
    from chai_eval.session import Session

HELP = ("-h", "--help")
SWEEP = ("-m", "--multirun")


def main(arguments: Sequence[str] | None = None, session: Session | None = None) -> int:
    """Run `chai-eval`, or `python -m chai_eval`; return the exit status.

    Parameters
    ----------
    arguments
        What the user typed, of this process by default: a command of `COMMANDS` (`run` where none is named), then its
        settings.
    session
        Models that are loaded already.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    named = next((each for each in given if not each.startswith("-")), "run")
    name = named if named in COMMANDS else "run"
    if name == named and name in given:
        given.remove(name)
    debug = "debug=true" in [each.lower() for each in given] or os.environ.get("HYDRA_FULL_ERROR", "0") != "0"
    try:
        ranks = ranks_of()
    except RunError as error:
        return _say(failure_line(error), 1)
    multirun = any(each in SWEEP for each in given) and not COMMANDS[name].own_options
    settings = [each for each in given if not multirun or each not in SWEEP]
    request = Request(name, settings, multirun, debug, session, ranks)
    if ranks.size == 1:
        return _run(request)
    try:
        with nullcontext() if ranks.first else _silence(debug=debug):
            return _run(request)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        ranks.leave()


@contextmanager
def _silence(*, debug: bool) -> Iterator[None]:
    """Print nothing, but for what may help to find an error."""
    with (
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
        nullcontext() if debug else redirect_stderr(nowhere),
    ):
        yield


def _run(request: Request) -> int:
    command = COMMANDS[request.command]
    try:
        return _dispatch(command, request)
    except SettingError as error:
        return _say(failure_line(error), 2)
    except RunError as error:
        return _say(failure_line(error), 1)
    except KeyboardInterrupt:
        return _say(f"interrupted: {command.interrupted}", 130)
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if request.debug or command.own_options:
            traceback.print_exc()
            return 1
        return _say(f"{failure_line(error)} (unexpected; debug=true shows where)", 1)


def _dispatch(command: Command, request: Request) -> int:
    if request.ranks.size > 1 and command.alone:
        processes = f"{request.ranks.size} processes of accelerate or torchrun"
        raise SettingError(f"{request.command}: given with {processes}; allowed: one process")
    if command.own_options:
        return command.work(request)
    if any(each in HELP for each in request.arguments):
        sys.stdout.write(command.help())
        return 0
    if "--version" in request.arguments:
        sys.stdout.write(f"chai-eval {__version__}\n")
        return 0
    options = ", ".join([*(SWEEP if command.sweeps else ()), *HELP, "--version", "setting=value"])
    for each in [*request.arguments, *(SWEEP[:1] if request.multirun and not command.sweeps else ())]:
        if each.startswith("-"):
            raise SettingError(f"{each}: unknown option; allowed: {options}")
    quiet_libraries()
    return command.work(request)


def _say(line: str, status: int) -> int:
    sys.stderr.write(line + "\n")
    return status
