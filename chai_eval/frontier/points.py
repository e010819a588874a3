"""What stands on a frontier: methods at settings that save shares of the cache, and what each was found to lose."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from transformers import PreTrainedModel

from chai_eval.errors import SettingError
from chai_eval.frontier.settings import FrontierSettings
from chai_eval.methods import METHODS, Method
from chai_eval.methods.costs import described_costs
from chai_eval.scoring.fidelity import Fidelity, by_position, plain, summary
from chai_eval.student import student_interval


@dataclass(frozen=True)
class Point:
    """A method at one setting.

    Attributes
    ----------
    label : str
        Unique: the method's name and how often it came before.
    method : Method
    costs : dict
        See `described_costs`.
    """

    label: str
    method: Method
    costs: dict[str, Any]


def points(model: PreTrainedModel, settings: FrontierSettings) -> list[Point]:
    """All methods over their range, those with the same bytes and products once.

    Raises
    ------
    SettingError
        For a method that is unknown, or has no range; where the calibration lacks what one needs.
    """
    wanted = settings.methods or tuple(METHODS)
    found: list[Point] = []
    for name in wanted:
        if name not in METHODS:
            raise SettingError(f"methods: {name!r} given; allowed: {', '.join(METHODS)}")
        given = METHODS[name].at_savings(model, settings.calibrated, settings.saving, settings.tokens)
        if settings.methods and not given:
            raise SettingError(f"methods: {name} given, which saves no share of the cache; allowed: those that do")
        found += [
            Point(f"{name} {number}", each, described_costs(each, model, settings.tokens))
            for number, each in enumerate(given, 1)
        ]
    if not found:
        raise SettingError(f"saving: {list(settings.saving)} given, out of every method's reach; allowed: larger ones")
    return found


def table(found: Sequence[Point], rows: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """One row a point: costs as shares of plain attention's, KL and same token with their intervals.

    Parameters
    ----------
    rows : dict of str to DataFrame
        By label, one row a sequence, as `Fidelity.samples` has them.
    """
    lines = []
    for point in found:
        close: Fidelity = summary(rows[point.label])
        said = plain(close)
        lines.append(
            {
                "method": point.method.name,
                "point": point.label,
                **{name: point.costs["of_mha"][name] for name in ("held", "read", "multiplications")},
                **{f"{name}_per_token": point.costs[name] for name in ("held", "read", "multiplications")},
                **{f"kl{end}": said["divergence"][key] for end, key in ENDS.items()},
                **{f"same_token{end}": said["agreement"][key] for end, key in ENDS.items()},
                "perplexity": said["perplexity"],
                "mha_perplexity": said["baseline_perplexity"],
                "infinite_tokens": close.infinite_tokens,
                "sequences": close.sequences,
                "tokens": close.tokens,
                "settings": json.dumps(point.method.settings(), sort_keys=True),
            }
        )
    frame = pd.DataFrame(lines)
    frame["dominated"] = [_dominated(frame, at) for at in range(len(frame))]
    return frame


def positions(found: Sequence[Point], rows: dict[str, pd.DataFrame], edges: Sequence[int]) -> pd.DataFrame:
    """KL by position in the text: `method`, `point`, and what `by_position` says of each."""
    tables = []
    for point in found:
        own = by_position(rows[point.label], edges)
        own.insert(0, "method", point.method.name)
        own.insert(1, "point", point.label)
        tables.append(own)
    return pd.concat(tables, ignore_index=True)


ENDS = {"": "value", "_low": "low", "_high": "high"}


def _dominated(frame: pd.DataFrame, at: int) -> bool:
    """Whether some point holds and reads no more, loses no more, and one of the three less."""
    own = frame.loc[at, ["held", "read", "kl"]].astype(float)
    others = frame[["held", "read", "kl"]].astype(float)
    return bool(((others <= own + 1e-9).all(axis=1) & (others < own - 1e-9).any(axis=1)).any())


def best_at(frame: pd.DataFrame, rows: dict[str, pd.DataFrame], share: float, of: str = "held") -> str | None:
    """In a sentence, which method loses least where a share at least is saved; None where none saves so much.

    The best and the next best method are compared sequence by sequence, on the same text: where the 95 % interval of
    their difference has zero in it, it can't be told which is better.

    Parameters
    ----------
    of : "held" or "read"
        Which bytes.
    """
    enough = frame[(frame[of] <= 1 - share + 0.005) & np.isfinite(frame["kl"].astype(float))]
    if enough.empty:
        return None
    by_method = enough.loc[enough.groupby("method")["kl"].idxmin()].sort_values("kl")
    first = by_method.iloc[0]
    said = f"{100 * share:.0f} % of the bytes {of} saved: {first['method']} (KL {first['kl']:.3f})"
    if len(by_method) == 1:
        return f"{said}, the only one that saves so much"
    second = by_method.iloc[1]
    low, high = _paired(rows[second["point"]], rows[first["point"]])
    beside = f"{second['method']} (KL {second['kl']:.3f})"
    if low <= 0 <= high:
        return f"{said}; whether it is better than {beside} can't be told ({low:+.4f} to {high:+.4f})"
    return f"{said}; next {beside}, {low:.3f} to {high:.3f} more"


def _paired(one: pd.DataFrame, other: pd.DataFrame) -> tuple[float, float]:
    """95 % interval of the mean difference over sequences (Student's)."""
    difference: NDArray[np.float64] = one["divergence"].to_numpy(float) - other["divergence"].to_numpy(float)
    return student_interval(difference, unknown=math.inf)
