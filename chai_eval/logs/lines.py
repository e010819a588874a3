"""A line of lm-eval's log of samples: a document under a filter, what was asked and answered, and its scores."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any


def row_of(sample: Mapping[str, Any], delimiter: str) -> dict[str, Any]:
    """A line as `TaskLog.samples` has it; raises nearly anything for one that lm-eval didn't write.

    Parameters
    ----------
    delimiter
        What stands between a prompt and a choice.
    """
    requests = _requests(sample)
    row: dict[str, Any] = {"doc_id": int(sample["doc_id"])}
    row |= {name: str(sample[name]) for name in ("doc_hash", "prompt_hash") if name in sample}
    row["filter"] = str(sample.get("filter", "none"))
    if requests and isinstance(requests[0][0], str):
        row["question"] = requests[0][0]
        row.setdefault("prompt_hash", hashlib.sha256(requests[0][0].encode()).hexdigest())
    answers = sample.get("filtered_resps") or []
    if len(answers) > 1 and all(isinstance(each, list) and each for each in answers):
        count = len(answers) // 2 if "acc_mutual_info" in sample else len(answers)
        row["loglikelihoods"] = [float(each[0]) for each in answers[:count]]
        choices = [each[1] for each in requests[:count] if len(each) > 1 and isinstance(each[1], str)]
        if len(set(choices)) > 1:
            row["choices"] = choices
            row["lengths"] = [len(each.removeprefix(delimiter)) for each in choices]
        elif choices:  # a choice is a prompt then (winogrande), and they end alike
            row["choices"] = [str(each[0]) for each in requests[:count]]
        elif "lengths" in sample:
            row["lengths"] = sample["lengths"]
    elif answers:
        response = answers[0][0] if isinstance(answers[0], list) and len(answers[0]) == 1 else answers[0]
        row |= {"response": response} if isinstance(response, str) else {}
    names = sample.get("metrics")
    if not isinstance(names, list):  # lm-eval before it named them
        names = [name for name, value in sample.items() if name not in row and isinstance(value, int | float)]
    return row | {name: _number(sample[name]) for name in names if name in sample}


def _requests(sample: Mapping[str, Any]) -> list[list[Any]]:
    """What the model was asked, `[prompt, continuation]` each."""
    given = sample.get("arguments") or []
    each = given.values() if isinstance(given, dict) else given
    return [list(one.values()) if isinstance(one, dict) else list(one) for one in each]


def _number(value: Any) -> float | str:
    """A metric of one document; what is no number (parts of a corpus metric) as JSON text."""
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) else json.dumps(value)
