"""What documents contribute to a metric, and how their contributions become it: from that follows its interval."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from chai_eval.report.statistics import (
    Aggregate,
    Difference,
    bits_per_byte,
    bootstrap_difference,
    paired_difference,
    perplexity,
)

AGGREGATES: tuple[Aggregate, ...] = (perplexity, bits_per_byte)


@dataclass(frozen=True)
class Measured:
    """A metric of one result.

    Attributes
    ----------
    value, n
        The metric, and of how many documents.
    scores
        Per document, [documents], where it is their mean; None where it is made otherwise.
    parts
        Log-likelihood and weight of each document, [documents, 2], where the samples hold such; None elsewhere.
    """

    value: float
    n: int
    scores: NDArray[np.float64] | None = None
    parts: NDArray[np.float64] | None = None

    @property
    def percent(self) -> bool:
        """Whether it is a mean of scores between 0 and 1."""
        return self.scores is not None and bool(((self.scores >= 0) & (self.scores <= 1)).all())

    @property
    def aggregate(self) -> Aggregate | None:
        """What makes the metric of its parts, found by trying; None where nothing known does."""
        if self.parts is None:
            return None
        columns = self.parts[:, 0], self.parts[:, 1]
        return next((each for each in AGGREGATES if np.isclose(each(*columns, 0), self.value, rtol=1e-6, atol=0)), None)

    def of(self, documents: Sequence[int]) -> Measured:
        """The metric of some of the documents; nan where it isn't known how it is made, unless they are all there."""
        if self.scores is not None:
            some = self.scores[list(documents)]
            return Measured(float(some.mean()), len(some), some)
        aggregate = self.aggregate
        if aggregate is None or self.parts is None:
            return Measured(self.value if len(documents) == self.n else math.nan, len(documents))
        parts = self.parts[list(documents)]
        return Measured(float(aggregate(parts[:, 0], parts[:, 1], 0)), len(parts), parts=parts)


def samples_of(samples: pd.DataFrame, metric: str) -> tuple[pd.DataFrame, str]:
    """The rows and the name of the column that hold a metric, `acc` or `exact_match (strict-match)`."""
    column, _, filtered = metric.removesuffix(")").partition(" (")
    return samples[samples["filter"] == filtered] if filtered and "filter" in samples else samples, column


def measured(column: pd.Series[Any] | None, value: float) -> Measured:
    """Find how a metric was made of what the samples hold about it, one entry per document."""
    if column is None or not len(column):
        return Measured(value, 0)
    n = len(column)
    if pd.api.types.is_numeric_dtype(column):
        scores = column.to_numpy(dtype=float)
        if math.isclose(scores.mean(), value, abs_tol=1e-9):
            return Measured(value, n, scores)
        return Measured(value, n, parts=np.column_stack([scores, np.ones(n)]))
    try:
        parts = np.array([json.loads(each) for each in column], dtype=float)
    except (TypeError, ValueError):
        return Measured(value, n)
    return Measured(value, n, parts=parts if parts.shape == (n, 2) and (parts[:, 1] > 0).all() else None)


def difference(before: Measured, after: Measured) -> Difference:
    """The difference on the same documents, in the same order, with the interval that belongs to the metric.

    Without an interval where it isn't known how the metric is made.
    """
    if before.scores is not None and after.scores is not None:
        return paired_difference(before.scores, after.scores)
    aggregate = before.aggregate
    if aggregate is not None and aggregate is after.aggregate and before.parts is not None and after.parts is not None:
        return bootstrap_difference(aggregate, before.parts, after.parts)
    return Difference(100 * (after.value - before.value), math.nan, math.nan)
