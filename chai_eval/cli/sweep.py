"""One run or many: checked together, run one after the other or by a Hydra launcher, failures told at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chai_eval.cli.overrides import Job, jobs_of
from chai_eval.cli.request import Request
from chai_eval.errors import RunError, SettingError
from chai_eval.hub import check_hub
from chai_eval.scoring.ranks import Ranks

if TYPE_CHECKING:
    from chai_eval.run import Report


def run_jobs(request: Request) -> int:
    """Run what is asked for and print its tables, in the first of several processes; return the exit status.

    Raises
    ------
    SettingError
        For a wrong setting of any job; none has been started then.
    """
    ranks, multirun = request.ranks, request.multirun
    jobs = jobs_of(request.arguments, multirun=multirun)
    if ranks.size > 1:
        for job in jobs:
            _check_together(job, ranks)
    if request.session is None and not multirun:
        check_hub(jobs[0].settings.model)

    # From here on torch and lm-eval are needed, which take seconds to import; a mistyped setting is told before.
    from chai_eval.cli.launch import launch
    from chai_eval.run import attempt, check
    from chai_eval.session import Session

    session = request.session or Session(ranks=ranks)
    for job in jobs:
        try:
            check(job.settings, session)
        except RunError:
            # Documents that can't be had fail their own job, when its turn comes.
            if not multirun:
                raise
    reports = launch(jobs) if jobs[0].launcher != "basic" else []
    for number, job in enumerate(jobs):
        if number == len(reports):
            if multirun:
                sys.stderr.write(f"[{number + 1}/{len(jobs)}] {job.label}\n")
            reports.append(attempt(job.settings, session))
        _print(reports[number], request.debug)
    _print_together(jobs, reports)
    return _conclude(jobs, reports, multirun)


def _check_together(job: Job, ranks: Ranks) -> None:
    """Refuse what several processes can't do together."""
    import torch

    model, started = job.settings.model, f"with {ranks.size} processes of accelerate or torchrun"
    if job.launcher != "basic":
        raise SettingError(f"launcher: {job.launcher!r} given {started}; allowed: basic, or one process")
    if model.device_map is not None:
        raise SettingError(f"model.device_map: {model.device_map!r} given {started}; allowed: null, or one process")
    if job.settings.measure is not None:
        raise SettingError(f"measure: given {started}; allowed: off, or one process")
    gpus = torch.cuda.device_count()
    if model.device in ("auto", "cuda") and 0 < gpus < ranks.local_size:
        raise SettingError(
            f"model.device: {model.device!r} given with {ranks.local_size} processes on {gpus} GPUs; "
            f"allowed: at most {gpus} processes, or a device that they share"
        )


def _print(report: Report, debug: bool) -> None:
    from chai_eval.report import render

    if report.header is not None and report.rows:
        render(report.header, report.rows, sys.stdout)
    if report.measurement is not None:
        from chai_eval.measure.table import tables

        sys.stdout.write("\n" + tables(report.measurement.record))
    if debug:
        sys.stderr.write("".join(each.trace or "" for each in report.failures))


def _print_together(jobs: Sequence[Job], reports: Sequence[Report]) -> None:
    """Print the scores of a sweep once more, in one table."""
    from chai_eval.report import render_sweep

    runs = [
        (job.label, each.header, each.rows)
        for job, each in zip(jobs, reports, strict=True)
        if each.header is not None and each.rows
    ]
    if len(runs) > 1:
        sys.stdout.write("\n")
        render_sweep(runs, sys.stdout)


def _conclude(jobs: Sequence[Job], reports: Sequence[Report], multirun: bool) -> int:
    """Say on one last line what failed; 2 where only wrong settings did."""
    failed = [(job.label, each.failures) for job, each in zip(jobs, reports, strict=True) if each.failures]
    if not failed:
        return 0
    said = []
    for label, failures in failed:
        lines = "; ".join(f"{each.what}: {each.why}" if each.what else each.why for each in failures)
        said.append(f"{label} ({lines})" if multirun else lines)
    every = [each for _, failures in failed for each in failures]
    prefix = f"{len(failed)} of {len(jobs)} jobs failed: " if multirun else ""
    hint = " (unexpected; debug=true shows where)" if any(each.trace for each in every) else ""
    sys.stderr.write(prefix + "; ".join(said) + hint + "\n")
    return 2 if all(each.setting for each in every) else 1
