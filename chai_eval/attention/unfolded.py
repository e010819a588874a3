"""Requests that share a context in branches of one row, as rows of their own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chai_eval.attention.rows import CONTEXT, Rows


class Unfolded(NamedTuple):
    """Rows with branches as rows of their own: each has the context and one branch.

    Attributes
    ----------
    rows : Rows
        Of the requests alone.
    row : Tensor [requests], int64
        Which row each comes from.
    column : Tensor [requests, length], int64
        And from which columns; those of padding are 0.
    """

    rows: Rows
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Unfolded:
        assert rows.branch is not None
        found = []
        for row, (length, numbers) in enumerate(zip(rows.lengths.tolist(), rows.branch.tolist(), strict=True)):
            numbers = numbers[:length]
            for branch in range(max(max(numbers) + 1, 1)):
                found.append((row, [at for at, own in enumerate(numbers) if own in (CONTEXT, branch)]))
        device, longest = rows.lengths.device, max(len(columns) for _, columns in found)
        lengths = torch.tensor([len(columns) for _, columns in found], device=device)
        column = torch.tensor([columns + [0] * (longest - len(columns)) for _, columns in found], device=device)
        alone = Rows(None, None, lengths, None, None, len(found), longest, longest)
        return cls(alone, torch.tensor([row for row, _ in found], device=device), column)

    def unfold(self, states: Tensor) -> Tensor:
        """`[rows, heads, length, head_dim]` to those of each request."""
        return states[self.row[:, None], :, self.column].transpose(1, 2)

    def fold(self, states: Tensor, length: int) -> Tensor:
        """And back, to rows of `length`; every request of a row has the same in its context."""
        real = torch.arange(self.column.shape[1], device=states.device) < self.rows.lengths[:, None]
        row, column = self.row[:, None].expand_as(self.column)[real], self.column[real]
        out = states.new_zeros(int(self.row[-1]) + 1, states.shape[1], length, states.shape[3])
        out[row, :, column] = states.transpose(1, 2)[real]
        return out
