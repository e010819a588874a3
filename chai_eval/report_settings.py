"""Typed settings of a report; a wrong value is one line in the user's words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from chai_eval.errors import wrong
from chai_eval.schema import SETTINGS, Flag, Folder, Whole, setting

FOLDERS = "a folder with records, or several as [a,b]"


def _folders(given: Any) -> Any:
    text = str(given).strip() if isinstance(given, str | Path) else ""
    each = [one.strip(" '\"") for one in text[1:-1].split(",")] if text[:1] + text[-1:] == "[]" else given
    each = [each] if isinstance(each, str | Path) else each
    if not isinstance(each, list | tuple) or not each or not all(isinstance(one, str | Path) and one for one in each):
        raise ValueError
    folders = tuple(Path(one).expanduser() for one in each)
    for folder in folders:
        if not folder.is_dir():
            raise wrong("results_dir", str(folder), FOLDERS)
    return folders


@dataclass(frozen=True, config=SETTINGS)
class ReportSettings:
    """Everything that a report is told."""

    results_dir: Annotated[tuple[Path, ...], BeforeValidator(_folders)] = setting(
        (Path("results"),), f"where records are: {FOLDERS}", composed="results", allowed=FOLDERS
    )
    out: Folder = setting(Path("results/report"), "folder to write to")
    saving: Annotated[float, Field(strict=True, ge=0, lt=1)] = setting(
        0.14, "share of the K,V bytes to be saved, at which methods are ranked", allowed="a number from 0 to below 1"
    )
    documents: Whole = setting(6, "documents whose answer changed, shown of each method; their number is always told")
    figures: Flag | None = setting(None, "draw figures: true, false; null where matplotlib is installed")
    debug: Flag = setting(False, "true shows the traceback of an unexpected error")
