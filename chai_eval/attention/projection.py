"""Some heads of a projection: their weights gathered once, for one request or for all of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Narrow:
    """Some heads of a projection, other ones in every row.

    Attributes
    ----------
    weight : Tensor [taken * head_dim, hidden_size], or [rows, taken * head_dim, hidden_size]
        Of the heads that any row takes; or of each row's own.
    bias : Tensor or None
    pick : Tensor [rows, taken], int64, or None
        Where each row finds its heads among those of `weight`; None where they are all its own.
    head_dim : int
    """

    weight: Tensor
    bias: Tensor | None
    pick: Tensor | None
    head_dim: int

    @classmethod
    def of(cls, projection: nn.Linear, heads: Tensor, head_dim: int, *, own: bool = False) -> Narrow:
        """Gather the weights of `heads`, `[rows, taken]`.

        Parameters
        ----------
        own : bool
            Gather for each row its own heads, rather than for all rows those that any of them takes: worth it for
            many tokens.
        """
        if heads.shape[0] == 1:
            taken, pick = heads[0], None
        elif own:
            taken, pick = heads, None
        else:
            taken, inverse = torch.unique(heads, return_inverse=True)
            pick = inverse.view_as(heads)
        weight = projection.weight.unflatten(0, (-1, head_dim))[taken]  # [..., taken, head_dim, hidden_size]
        bias = None if projection.bias is None else projection.bias.unflatten(0, (-1, head_dim))[taken].flatten(-2)
        return cls(weight.flatten(-3, -2), bias, pick, head_dim)

    def for_rows(self, change: Callable[[Tensor], Tensor]) -> Narrow:
        """The same for rows that were reordered, repeated or selected."""
        return self if self.pick is None else replace(self, pick=change(self.pick))

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[rows, length, hidden_size]` to `[rows, taken, length, head_dim]`."""
        if self.weight.ndim == 2:
            out = nn.functional.linear(hidden, self.weight, self.bias)
        else:
            out = torch.matmul(hidden, self.weight.transpose(-1, -2))
            out = out if self.bias is None else out + self.bias[:, None].to(out.dtype)
        out = out.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.pick is None:
            return out
        return out[torch.arange(out.shape[0], device=out.device)[:, None], self.pick]
