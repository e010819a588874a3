"""Typed settings of a comparison of two runs; a wrong value is one line in the user's words."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from chai_eval.schema import SETTINGS, Flag, Folder, Text, Whole, setting

Names = Annotated[
    tuple[Annotated[str, Field(strict=True, min_length=1)], ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
    Field(min_length=1),
]

NAMES = "a {0}, several as [a,b], or null"


@dataclass(frozen=True, config=SETTINGS)
class CompareSettings:
    """Which two runs are compared (typed without a name), and what is shown."""

    a: Text
    b: Text
    task: Names | None = setting(
        None, "a task, or several as [piqa,boolq]; null for all that both have", allowed=NAMES.format("task")
    )
    metric: Names | None = setting(
        None, "a metric, or several as [acc,acc_norm]; null for all", allowed=NAMES.format("metric")
    )
    flips: Whole | None = setting(
        5, "documents to show that A has right and B wrong, and as many of the reverse; null for all, 0 for none"
    )
    out: Folder | None = setting(None, "folder to write table.md, table.csv and flips.csv (all of them) to")
    debug: Flag = setting(False, "true shows the traceback of an unexpected error")
