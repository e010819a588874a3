"""The Kullback-Leibler divergence of next-token distributions, also where some tokens are ruled out; imports torch."""

from __future__ import annotations

import math

from torch import Tensor


def kl_divergence(expected: Tensor, given: Tensor) -> Tensor:
    """KL(expected ‖ given) of distributions by their logarithms: Σ p (log p − log q), where 0 log 0 is 0.

    Logarithms may be −inf, as of the tokens that only pad a vocabulary: where p is nought the term is, and where q
    alone is nought the divergence is infinite.

    Parameters
    ----------
    expected, given : Tensor [..., vocabulary]
        Log-probabilities, in the precision to compute in.

    Returns
    -------
    Tensor [...]
        In nats; never below zero.
    """
    terms = expected.exp() * (expected - given)
    # By the logarithms: a probability too small for the precision is none that is ruled out.
    terms = terms.masked_fill(given == -math.inf, math.inf).masked_fill(expected == -math.inf, 0)
    return terms.sum(-1).clamp(min=0)  # below zero by rounding only
