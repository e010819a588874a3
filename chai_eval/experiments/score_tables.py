"""The tables of an experiment that scores, in Markdown."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from chai_eval.experiments.plan import Plan
from chai_eval.experiments.score_rows import ALL
from chai_eval.markdown import table
from chai_eval.report.paper import LEGEND, shown


def body(plan: Plan, ours: pd.DataFrame, beside: pd.DataFrame | None) -> str:
    """Tables with what has to be said about them."""
    shortened = plan.scoring.task.limit
    documents = "all documents" if shortened is None else f"the first {shortened} documents of each task"
    parts = [f"Scores on {documents}, differences from MHA on the same ones.", _ours(plan, ours)]
    parts += _judged(plan, ours, beside)
    if beside is not None:
        parts += [f"Every run against {beside['against'].iloc[0]}, on the same documents:", _against(plan, beside)]
    return "\n\n".join(parts)


def _run(plan: Plan) -> str:
    return "run (quick)" if plan.quick else "run"


def _ours(plan: Plan, frame: pd.DataFrame) -> str:
    lines = []
    several = len({*frame["verdict"].dropna()}) > 1
    paper = bool(frame["paper"].notna().any())
    for each in frame.to_dict("records"):
        line = {
            _run(plan): each["run"], "task": each["task"], "n": str(each["n"]), "MHA": _number(each["mha"]),
            "score": _number(each["score"]), **_difference(each),
            "KL (nats)": _number(each.get("kl"), 3), "same token (%)": _number(each.get("same_token"), 1, 100),
            "K,V held (%)": _number(each["held"], 1, 100),
        }  # fmt: skip
        if paper:
            signed = each["method"] != "mha"
            line[f"paper, {plan.experiment.paper_model}"] = shown(_given(each["paper"]), signed)
        if several:
            line["verdict"] = "–" if each["task"] == ALL else str(_given(each["verdict"]) or "–")
        lines.append(line)
    return table(lines, left=2).rstrip("\n")


def _judged(plan: Plan, ours: pd.DataFrame, beside: pd.DataFrame | None) -> list[str]:
    """What verdicts mean; where all rows have the same, which."""
    found = {*ours["verdict"].dropna(), *([] if beside is None else beside.get("verdict", pd.Series()).dropna())}
    if len(found) == 1:
        (only,) = found
        return [f"Beside the paper: {only}."]
    return [f"Beside the paper, {LEGEND}"]


def _against(plan: Plan, frame: pd.DataFrame) -> str:
    paper, lines = "paper" in frame, []
    for each in frame.to_dict("records"):
        line = {
            _run(plan): each["run"], "task": each["task"], "n": str(each["n"]), **_difference(each),
            "told apart": _told_apart(each["low"], each["high"]),
        }  # fmt: skip
        if "kl_difference" in frame:
            low, high = each["kl_difference_low"], each["kl_difference_high"]
            line["KL, difference"] = _number(each["kl_difference"], 4, signed=True)
            line["KL, 95 % interval"] = _interval(low, high, 4)
            line["by KL"] = _told_apart(-high, -low)
        if paper:
            line[f"paper, {plan.experiment.paper_model}"] = shown(_given(each["paper"]))
            line["verdict"] = str(_given(each["verdict"]) or "–")
        lines.append(line)
    return table(lines, left=2).rstrip("\n")


def _told_apart(low: float, high: float) -> str:
    """What an interval of a difference says, where more is better."""
    if math.isnan(low):
        return "–"
    return "worse" if high < 0 else "better" if low > 0 else "no"


def _difference(each: dict[Any, Any]) -> dict[str, str]:
    return {
        "difference (pp)": _number(each["difference"], signed=True),
        "95 % interval": _interval(each["low"], each["high"]),
        "p": _number(each["p"], 3),
    }


def _interval(low: float, high: float, digits: int = 2) -> str:
    if math.isnan(low) or math.isnan(high):
        return "–"
    return f"{_number(low, digits, signed=True)} to {_number(high, digits, signed=True)}"


def _number(value: float | None, digits: int = 2, times: float = 1.0, *, signed: bool = False) -> str:
    if value is None or math.isnan(value):
        return "–"
    rounded = round(times * value, digits) + 0.0  # a negative zero becomes a plain one
    return f"{rounded:+.{digits}f}" if signed else f"{rounded:.{digits}f}"


def _given(value: Any) -> Any:
    """None for what pandas has in place of nothing."""
    return None if isinstance(value, float) and math.isnan(value) else value
