"""`python -m chai_eval.measure [setting=value ...]`: the command line of a measurement that scores nothing."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from chai_eval.cli.console import quiet_libraries
from chai_eval.errors import RunError, SettingError, failure_line
from chai_eval.hub import check_hub

if TYPE_CHECKING:
    from chai_eval.cli.overrides import Job
    from chai_eval.session import Session

USAGE = """\
Measure a model's latency and memory under its own attention and under methods, side by side.

  python -m chai_eval.measure [setting=value ...]

  measure=full                  latency, memory, or full for both
  measure.lengths=[512,2048]    tokens of the prompt
  measure.batch_sizes=[1,8]     prompts at once
  measure.new_tokens=32         tokens generated, the first included
  measure.repetitions=5         timed repetitions, methods in turn within each
  measure.warmup=1              repetitions before those, which don't count
  measure.rivals=auto           the model's own attention: [sdpa,eager,flash]; [rows]: every head, with our cache
  method=chai,v_reuse           methods to measure side by side, and so with several values of a method's setting

Model, method and results_dir as for python -m chai_eval (see its --help). weights=random measures a model whose weights
nobody has here, layers=4 its first layers only.

  python -m chai_eval.measure model=llama7b weights=random layers=4 method.clusters=[[4,4]] dtype=bfloat16
"""


def main(arguments: Sequence[str] | None = None, session: Session | None = None) -> int:
    """Measure what the arguments ask for and print its tables; return the exit status of `python -m chai_eval`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(each in ("-h", "--help") for each in given):
        sys.stdout.write(USAGE)
        return 0
    quiet_libraries()
    try:
        return _run(given, session)
    except SettingError as error:
        return _say(failure_line(error), 2)
    except RunError as error:
        return _say(failure_line(error), 1)
    except KeyboardInterrupt:
        return _say("interrupted: nothing was recorded", 130)
    except Exception as error:
        if "debug=true" in [each.lower() for each in given]:
            traceback.print_exc()
            return 1
        return _say(f"{failure_line(error)} (unexpected; debug=true shows where)", 1)


def _run(given: list[str], session: Session | None) -> int:
    from chai_eval.cli.overrides import jobs_of

    for each in given:
        if each.startswith("-"):
            raise SettingError(f"{each}: unknown option; allowed: -h, --help, setting=value")
    chosen = any(each.split("=", 1)[0] == "measure" for each in given)
    jobs = jobs_of(given if chosen else ["measure=full", *given], multirun=True)
    for job in jobs:
        if job.settings.measure is None:
            raise SettingError("measure: 'off' given; allowed: latency, memory, full")
        if session is None:
            check_hub(job.settings.model)

    from chai_eval.measure.stored import measured
    from chai_eval.measure.table import tables
    from chai_eval.methods import build_method
    from chai_eval.session import Session
    from chai_eval.store import check_writable

    session = session or Session()
    for job in jobs:
        check_writable(job.settings.results_dir)
        build_method(job.settings.method.name, **job.settings.method.options)
    for _, group in groupby(jobs, key=lambda job: replace(job.settings, method=jobs[0].settings.method)):
        together = list(group)
        loaded = session.model(together[0].settings.model)
        found = measured([job.settings for job in together], loaded, _labels(together))
        sys.stdout.write(f"{tables(found.record)}\nresults  {found.path}\n")
        sys.stdout.flush()
    return 0


def _labels(jobs: Sequence[Job]) -> list[str]:
    """Methods by name; those that share one by what was varied."""
    names = [job.settings.method.name for job in jobs]
    varied = [
        " ".join(each.removeprefix("method.") for each in job.label.split() if each.startswith("method."))
        for job in jobs
    ]
    return [
        f"{name} {what}".strip() if names.count(name) > 1 else name for name, what in zip(names, varied, strict=True)
    ]


def _say(line: str, status: int) -> int:
    sys.stderr.write(line + "\n")
    return status
