"""One run or many: checked together, run one after the other or by a Hydra launcher, failures told at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chai_eval.cli.outcome import Outcome, attempt
from chai_eval.cli.overrides import Job, jobs_of
from chai_eval.errors import RunError, SettingError
from chai_eval.hub import check_hub
from chai_eval.scoring.ranks import Ranks

if TYPE_CHECKING:
    from chai_eval.session import Session


def run_jobs(
    arguments: Sequence[str],
    *,
    multirun: bool,
    debug: bool,
    session: Session | None = None,
    ranks: Ranks | None = None,
) -> int:
    """Run what the arguments ask for and print its tables; return the exit status.

    Parameters
    ----------
    ranks
        Processes that do this together; only the first prints.

    Raises
    ------
    SettingError
        For a wrong setting of any job; none has been started then.
    """
    ranks = ranks or Ranks()
    jobs = jobs_of(arguments, multirun=multirun)
    if ranks.size > 1:
        for job in jobs:
            _check_together(job, ranks)
    if session is None and not multirun:
        check_hub(jobs[0].settings.model)

    # From here on torch and lm-eval are needed, which take seconds to import; a mistyped setting is told before.
    from chai_eval.cli.launch import launch
    from chai_eval.run import check
    from chai_eval.session import Session

    session = session or Session(ranks=ranks)
    for job in jobs:
        try:
            check(job.settings, session)
        except RunError:
            # Documents that can't be had fail their own job, when its turn comes.
            if not multirun:
                raise
    if jobs[0].launcher != "basic":
        outcomes = launch(jobs)
        for outcome in outcomes:
            _print(outcome, debug)
    else:
        outcomes = []
        for number, job in enumerate(jobs, start=1):
            if multirun:
                sys.stderr.write(f"[{number}/{len(jobs)}] {job.label}\n")
            outcomes.append(attempt(job.settings, session, job.label))
            _print(outcomes[-1], debug)
    _print_together(outcomes)
    return _conclude(outcomes, multirun)


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


def _print(outcome: Outcome, debug: bool) -> None:
    from chai_eval.report import render

    if outcome.report is not None and outcome.report.rows:
        render(outcome.report.header, outcome.report.rows, sys.stdout)
    if outcome.report is not None and outcome.report.measurement is not None:
        from chai_eval.measure.table import tables

        sys.stdout.write("\n" + tables(outcome.report.measurement.record))
    for each in outcome.failures:
        if debug and each.trace:
            sys.stderr.write(each.trace)


def _print_together(outcomes: Sequence[Outcome]) -> None:
    """Print the scores of a sweep once more, in one table."""
    from chai_eval.report import render_sweep

    runs = [(each.label, each.report.header, each.report.rows) for each in outcomes if each.report and each.report.rows]
    if len(runs) > 1:
        sys.stdout.write("\n")
        render_sweep(runs, sys.stdout)


def _conclude(outcomes: Sequence[Outcome], multirun: bool) -> int:
    """Say on one last line what failed; 2 where only wrong settings did."""
    failed = [outcome for outcome in outcomes if outcome.failures]
    if not failed:
        return 0
    said = []
    for outcome in failed:
        lines = [f"{each.what}: {each.why}" if each.what else each.why for each in outcome.failures]
        said.append(f"{outcome.label} ({'; '.join(lines)})" if multirun else "; ".join(lines))
    prefix = f"{len(failed)} of {len(outcomes)} jobs failed: " if multirun else ""
    hint = " (unexpected; debug=true shows where)" if any(e.trace for o in failed for e in o.failures) else ""
    sys.stderr.write(prefix + "; ".join(said) + hint + "\n")
    return 2 if all(each.setting for outcome in failed for each in outcome.failures) else 1
