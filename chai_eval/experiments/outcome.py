"""What an experiment found, and how it is written: data, table, figures, record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from chai_eval.checksum import sha256_of, write_document
from chai_eval.errors import RunError
from chai_eval.experiments.figures import FORMATS, save
from chai_eval.experiments.plan import Plan
from chai_eval.files import write_whole
from chai_eval.store.provenance import git_revision, machine, versions
from chai_eval.store.record import LAYOUT, RECORD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = "table.md"
QUICK = "**quick**: far fewer documents, texts or points than the experiment has; a look, no reproduction."


@dataclass(frozen=True)
class Outcome:
    """What an experiment found.

    Attributes
    ----------
    model : dict
        Name, fingerprint, precision and device of the model.
    data : mapping of str to DataFrame
        By the name of the CSV file; `data` is what the experiment is about.
    large : mapping of str to DataFrame
        By the name of the Parquet file: what is behind the data.
    body : str
        Of the table's file: tables and sentences, Markdown.
    figures : mapping of str to callable
        By the name of the file, what draws it.
    sources : dict
        Where the results that it was made of lie, relative to the results folder.
    """

    model: Mapping[str, Any]
    data: Mapping[str, pd.DataFrame]
    body: str
    large: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)
    sources: Mapping[str, Any] = field(default_factory=dict)


def write(plan: Plan, outcome: Outcome, *, drawn: bool) -> None:
    """Write everything to the plan's folder; the record, with checksums of the rest, last.

    Raises
    ------
    RunError
        Where the folder can't be written.
    """
    folder, names = plan.folder, []
    try:
        for name, frame in outcome.data.items():
            names.append(f"{name}.csv")
            quick = frame.assign(quick=plan.quick)
            write_whole(folder / names[-1], quick.to_csv(index=False, float_format="%.6g"))
        for name, frame in outcome.large.items():
            names.append(f"{name}.parquet")
            quick = frame.assign(quick=plan.quick)
            write_whole(folder / names[-1], partial(quick.to_parquet, index=False))
        write_whole(folder / TABLE, page(plan, outcome))
        names.append(TABLE)
        for name in outcome.figures:  # of other data than what was just written
            for ending in FORMATS:
                (folder / f"{name}.{ending}").unlink(missing_ok=True)
        if drawn:
            names += save(outcome.figures, folder, plan.command)
        record = {"layout": LAYOUT, "kind": "experiment", **described(plan, outcome)}
        write_document(folder / RECORD, record, {name: sha256_of(folder / name) for name in names})
    except OSError as error:
        raise RunError(f"results_dir: {folder} can't be written: {error.strerror or error}") from error


def described(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """What the record says: no time of day, so that what is found again is the same to the last byte."""
    experiment = plan.experiment
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "quick": plan.quick,
        "model": dict(outcome.model),
        **plan.as_config(),
        "sources": dict(outcome.sources),
        "command": plan.command,
        "versions": versions(),
        "git": git_revision(),
        "machine": machine(),
    }


def page(plan: Plan, outcome: Outcome) -> str:
    """The table's file."""
    experiment, model = plan.experiment, outcome.model
    facts = [
        f"- The paper: {experiment.paper}",
        f"- Model: {model['name']}, {model['dtype']} on {model['device']}",
        f"- Made by `{plan.command}`",
    ]
    quick = [QUICK] if plan.quick else []
    notes = ["\n".join(f"- {each}" for each in experiment.notes)] if experiment.notes else []
    return "\n\n".join([f"# {plan.title}", *quick, "\n".join(facts), outcome.body.strip("\n"), *notes]) + "\n"


def named(folder: Path, results_dir: Path) -> str:
    """A folder of results as records name it: relative to the folder of all results."""
    return folder.relative_to(results_dir).as_posix()
