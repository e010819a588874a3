"""The command line: what was asked for, done, or said in one line why not.

Exit status: 0 when every task finished, 1 for what went wrong while running, 2 for a wrong setting, 130 when
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

from chai_eval.cli.console import quiet_libraries
from chai_eval.errors import RunError, SettingError, failure_line
from chai_eval.scoring.ranks import Ranks, ranks_of

if TYPE_CHECKING:
    from chai_eval.session import Session

HELP = ("-h", "--help")
SWEEP = ("-m", "--multirun")


def main(arguments: Sequence[str] | None = None, session: Session | None = None) -> int:
    """Run `python -m chai_eval`; return the exit status.

    Parameters
    ----------
    arguments
        What the user typed, of this process by default.
    session
        Models that are loaded already.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        ranks = ranks_of()
    except RunError as error:
        return _say(failure_line(error), 1)
    if ranks.size == 1:
        return _run(given, session, ranks)
    try:
        with nullcontext() if ranks.first else _silence(debug=wants_traceback(given)):
            return _run(given, session, ranks)
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


def _run(given: list[str], session: Session | None, ranks: Ranks) -> int:
    try:
        return _dispatch(given, session, ranks)
    except SettingError as error:
        return _say(failure_line(error), 2)
    except RunError as error:
        return _say(failure_line(error), 1)
    except KeyboardInterrupt:
        return _say("interrupted: what was scored is kept, the same command goes on from there", 130)
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if wants_traceback(given):
            traceback.print_exc()
            return 1
        return _say(f"{failure_line(error)} (unexpected; debug=true shows where)", 1)


def wants_traceback(given: Sequence[str]) -> bool:
    """Whether the traceback of an unexpected error is wanted."""
    return "debug=true" in [each.lower() for each in given] or os.environ.get("HYDRA_FULL_ERROR", "0") != "0"


def _dispatch(given: list[str], session: Session | None, ranks: Ranks) -> int:
    from chai_eval.cli.help import help_text

    if any(each in HELP for each in given):
        sys.stdout.write(help_text())
        return 0
    if "--version" in given:
        from chai_eval import __version__

        sys.stdout.write(f"chai-eval {__version__}\n")
        return 0
    multirun = any(each in SWEEP for each in given)
    rest = [each for each in given if each not in SWEEP]
    for each in rest:
        if each.startswith("-"):
            raise SettingError(f"{each}: unknown option; allowed: -m, --multirun, -h, --help, --version, setting=value")
    quiet_libraries()
    if rest[:1] == ["status"]:
        from chai_eval.cli.status import status

        return status(rest[1:])

    from chai_eval.cli.sweep import run_jobs

    return run_jobs(rest, multirun=multirun, debug=wants_traceback(given), session=session, ranks=ranks)


def _say(line: str, status: int) -> int:
    sys.stderr.write(line + "\n")
    return status
