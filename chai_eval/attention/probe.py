"""The probe: what every head attends to over the first tokens of a request.

Steps 1 and 2 of the design (docs/design.md, section 3).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Features = Literal["triangle", "full"]


def repeat_heads(states: Tensor, heads: int) -> Tensor:
    """Give every query head its own key or value head: `[rows, kv_heads, n, d]` to `[rows, heads, n, d]`."""
    kv_heads = states.shape[1]
    return states if kv_heads == heads else states.repeat_interleave(heads // kv_heads, dim=1)


def probe_probabilities(query: Tensor, key: Tensor, scaling: float, features: Features = "triangle") -> Tensor:
    """Attention probabilities of every head over the probe tokens: `[rows, heads, probe, probe]`, float32.

    Queries are `[rows, heads, probe, head_dim]`, keys `[rows, kv_heads, probe, head_dim]`; `scaling` is the factor of
    their products (1 where the model scales its queries beforehand, as OPT does). With "full" features the causal mask
    is left out, as the published code does.
    """
    heads, probe = query.shape[1], query.shape[2]
    scores = torch.matmul(query.float(), repeat_heads(key, heads).float().transpose(-1, -2)) * scaling
    if features == "triangle":
        future = torch.ones(probe, probe, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1)


def probe_features(probabilities: Tensor, features: Features = "triangle") -> Tensor:
    """What heads are compared by: the lower triangle of `[rows, heads, probe, probe]` with its diagonal.

    It is `[rows, heads, probe * (probe + 1) / 2]`; for "full" the whole block, `[rows, heads, probe * probe]`.
    """
    if features == "full":
        return probabilities.flatten(-2)
    row, column = torch.tril_indices(*probabilities.shape[-2:], device=probabilities.device)
    return probabilities[..., row, column]
