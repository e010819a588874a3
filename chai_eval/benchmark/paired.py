"""Methods on the same sequences beside one of them: what each loses, and what it loses more, sequence by sequence."""

from __future__ import annotations

import json
import math
from typing import Any

from chai_eval.methods import Method
from chai_eval.scoring.fidelity import Fidelity, plain, student_mean


def line(name: str, found: Fidelity, beside: Fidelity, title: str) -> dict[str, str]:
    """A line of a table: mean divergence, and what is more than that of the method `beside`, under that title."""
    mean, last = found.divergence, found.positions.iloc[-1]
    more, low, high = (f"{each:+.4f}" for each in difference(found, beside))
    return {
        "method": name,
        "KL (nats)": f"{mean.value:.4f}",
        "95 % interval": f"{mean.low:.4f} to {mean.high:.4f}",
        title: "–" if found is beside else f"{more} ({low} to {high})",
        f"from token {last['start']:.0f} on": f"{last['kl']:.4f}",
    }


def difference(found: Fidelity, beside: Fidelity) -> tuple[float, float, float]:
    """Mean over sequences of what a method loses more than another, and its 95 % interval (Student's)."""
    mean = student_mean((found.samples["divergence"] - beside.samples["divergence"]).to_numpy(), -math.inf, math.inf)
    return mean.value, mean.low, mean.high


def record(method: Method, found: Fidelity, beside: Fidelity, name: str) -> dict[str, Any]:
    """What a record has of a method, with what it loses more than the one `beside` under that name."""
    more = [None if math.isnan(each) else round(each, 6) for each in difference(found, beside)]
    return {
        "settings": {"name": method.name, **method.settings()},
        **plain(found),
        name: dict(zip(("value", "low", "high"), more, strict=True)),
        "positions": json.loads(found.positions.to_json(orient="records", double_precision=6)),
        "per_sequence": [round(each, 6) for each in found.samples["divergence"]],
    }
