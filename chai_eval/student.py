"""Student's interval of a mean, as every figure with an interval has it that isn't a share of documents."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike


def student_interval(values: ArrayLike, *, level: float = 0.95, unknown: float = math.nan) -> tuple[float, float]:
    """Bounds between which the mean lies, from independent values `[n]`.

    Fewer than two values, values that are not finite and values that are all the same determine no interval: these
    have no spread to judge by, and a point would claim certainty. There the bounds are minus and plus `unknown`:
    infinity where the caller compares them with zero, nan where it shows them.
    """
    given = np.asarray(values, dtype=float)
    if given.size < 2 or not np.isfinite(given).all() or np.ptp(given) == 0:
        return -unknown, unknown
    # Imported where an interval is made: half a second, which tables without one need not pay.
    from statsmodels.stats.weightstats import DescrStatsW

    low, high = DescrStatsW(given).tconfint_mean(alpha=1 - level)
    return float(low), float(high)
