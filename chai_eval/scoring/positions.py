"""Divergence by position in a text, so that drift shows: in bins of tokens counted from a sequence's first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pandas as pd
from torch import Tensor

# Where the first bins begin: the paper's probe is one of its own. Later ones begin at twice as many tokens.
FIRST = (0, 5, 16)
NAMED = "divergence_from_"


def position_edges(tokens: int) -> tuple[int, ...]:
    """Where bins begin, and the last one ends, in sequences of so many tokens, whose last one predicts nothing."""
    doubling = (FIRST[-1] << step for step in range(tokens.bit_length()))
    return (*(edge for edge in (*FIRST[:-1], *doubling) if edge < tokens - 1), tokens - 1)


def bin_means(divergence: Tensor, edges: Sequence[int]) -> dict[str, float]:
    """Mean divergence of a sequence's tokens, `[predicted tokens]`, in each bin that it reaches."""
    bins = {start: divergence[start:end] for start, end in itertools.pairwise(edges)}
    return {f"{NAMED}{start}": float(inside.mean()) for start, inside in bins.items() if len(inside)}


def without_bins(samples: pd.DataFrame) -> pd.DataFrame:
    """The samples without what `bin_means` put beside the other columns."""
    return samples.loc[:, ~samples.columns.str.startswith(NAMED)]
