"""`python -m chai_eval status`: what stands in a results folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from chai_eval.errors import SettingError, wrong
from chai_eval.markdown import markdown
from chai_eval.store.status import Status, list_measurements, list_results, list_set_aside
from chai_eval.task_settings import told


def status(arguments: Sequence[str]) -> int:
    """List the results and measurements in `results_dir` and return 0.

    Raises
    ------
    SettingError
        For a folder that isn't there, or any other setting.
    """
    results_dir = Path("results")
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key != "results_dir" or not value:
            raise SettingError(f"status: {argument!r} given; allowed: results_dir=<folder>")
        results_dir = Path(value).expanduser()
    if arguments and not results_dir.is_dir():
        raise wrong("results_dir", str(results_dir), "a folder with results")
    found = [_line(each) for each in (*list_results(results_dir), *list_measurements(results_dir))]
    set_aside = [f"set aside as damaged: {path}\n" for path in list_set_aside(results_dir)]
    if not found:
        sys.stdout.write(f"no results in {results_dir}\n")
    else:
        columns = ("model", "task", "method", "key", "state", "detail")
        sys.stdout.write("\n".join(markdown(columns, found, left=len(columns))) + "\n")
    sys.stdout.write("".join(set_aside))
    return 0


def _line(each: Status) -> tuple[str, ...]:
    record = each.record or {}
    prompts = "".join(f", {said}" for said in told(record.get("config", {})))
    scores = "".join(f", {name} {metric['value']:.4f}" for name, metric in record.get("metrics", {}).items())
    return each.model, each.task, each.method, each.key, each.state, each.detail + prompts + scores
