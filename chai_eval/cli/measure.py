"""`chai-eval measure`: latency and memory of methods side by side, without scoring."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from chai_eval.cli.overrides import Job, jobs_of
from chai_eval.errors import SettingError
from chai_eval.hub import check_hub

if TYPE_CHECKING:
    from chai_eval.session import Session


def run_measurements(arguments: Sequence[str], session: Session | None = None) -> int:
    """Measure what the arguments ask for, print its tables and return 0; several values of a setting need no `-m`.

    Raises
    ------
    SettingError
        For a wrong setting, before anything is measured.
    RunError
    """
    chosen = any(each.split("=", 1)[0] == "measure" for each in arguments)
    jobs = jobs_of(arguments if chosen else ["measure=full", *arguments], multirun=True)
    for job in jobs:
        if job.settings.measure is None:
            raise SettingError("measure: 'off' given; allowed: latency, memory, full")
        if session is None:
            check_hub(job.settings.model)

    # These need torch, which takes seconds to import; a mistyped setting is told before.
    from chai_eval.measure.stored import measured
    from chai_eval.measure.table import tables
    from chai_eval.methods import build_method
    from chai_eval.session import Session
    from chai_eval.store.folder import check_writable

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
