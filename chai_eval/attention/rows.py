"""Rows: where each request lies in a forward pass, and which tokens see which.

A model sees a tensor of tokens `[batch, tokens]`: padded on the left, on the right, or many requests packed into
one line with no padding at all. A method never wants to know. It sees *rows*: one request a row, its first token
in column 0, so that the probe is always columns 0 to P-1. A row may end in *branches*: several continuations of one
context (the choices of a question), each of which sees the context and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

CONTEXT = -1


@dataclass(frozen=True)
class Rows:
    """How the tokens of one forward pass lie in rows.

    Attributes
    ----------
    index : Tensor [rows, length], int64, or None
        Which token of the flattened `[batch * tokens]` pass stands at each place; padding places repeat some token.
        None where the pass already is in rows (no padding, or padding on the right only).
    place : Tensor [batch * tokens], int64, or None
        The inverse: the place in the flattened `[rows * length]` of each token; tokens that are padding have -1.
    lengths : Tensor [rows], int64
        Tokens of each row that are no padding, branches included.
    branch : Tensor [rows, length], int64, or None
        `CONTEXT` for context tokens, else the number of the branch; None where no row has branches.
    position : Tensor [rows, length], int64, or None
        Position of each token within its request (a branch goes on where the context ends); None where it is the
        column number.
    batch, tokens : int
        Shape of the pass.
    length : int
        Width of the rows.
    past : Tensor [rows], int64, or None
        Where the pass goes on from a cache: tokens of each row before this pass. Column j of the pass is then column
        `past + j` of the row, and keys are those of the whole row; None where rows begin with this pass.
    keys : int or None
        Columns of keys, with `past`.
    aligned : bool
        Known to have no padding, and with `past` to go on at the same column in every row.
    """

    index: Tensor | None
    place: Tensor | None
    lengths: Tensor
    branch: Tensor | None
    position: Tensor | None
    batch: int
    tokens: int
    length: int
    past: Tensor | None = None
    keys: int | None = None
    aligned: bool = False

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.lengths.shape[0]

    @classmethod
    def from_mask(cls, mask: Tensor | None, batch: int, tokens: int, device: torch.device) -> Rows:
        """Rows of an ordinary padded batch: one request a line of the batch.

        The mask, `[batch, tokens]`, is 1 where a token is real, as transformers' `attention_mask`; None where all are.
        """
        if mask is None:
            lengths = torch.full((batch,), tokens, dtype=torch.int64, device=device)
            return cls(None, None, lengths, None, None, batch, tokens, tokens, aligned=True)
        if mask.shape != (batch, tokens):
            raise ValueError(
                f"attention_mask: shape {list(mask.shape)} given; allowed: [batch, tokens] = {[batch, tokens]}"
            )
        real = mask.to(device=device, dtype=torch.bool)
        if bool(real.all()):
            return cls.from_mask(None, batch, tokens, device)
        lengths = real.sum(1)
        if bool((real[:, 1:] <= real[:, :-1]).all()):  # padding on the right only: already in rows
            return cls(None, None, lengths, None, None, batch, tokens, tokens)
        length = max(int(lengths.max()), 1)
        order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)[:, :length]
        index = order + torch.arange(batch, device=device)[:, None] * tokens
        column = real.cumsum(1) - 1 + torch.arange(batch, device=device)[:, None] * length
        place = torch.where(real, column, -1).flatten()
        return cls(index, place, lengths, None, None, batch, tokens, length)

    @classmethod
    def packed(cls, contexts: Sequence[int], branches: Sequence[Sequence[int]]) -> Rows:
        """Rows of requests packed one after the other into a pass of shape `[1, tokens]`, without padding.

        `contexts` says how many tokens each row has in its context, at least 1; `branches` how many in each branch, if
        any, in the order in which they follow it.
        """
        totals = [context + sum(branch) for context, branch in zip(contexts, branches, strict=True)]
        length, tokens = max(totals), sum(totals)
        index = torch.zeros(len(totals), length, dtype=torch.int64)
        position = torch.arange(length).expand(len(totals), length).clone()
        number = torch.full((len(totals), length), CONTEXT, dtype=torch.int64)
        place = torch.empty(tokens, dtype=torch.int64)
        start = 0
        for row, (context, total) in enumerate(zip(contexts, totals, strict=True)):
            index[row, :total] = torch.arange(start, start + total)
            index[row, total:] = start
            place[start : start + total] = torch.arange(total) + row * length
            column = context
            for branch, size in enumerate(branches[row]):
                number[row, column : column + size] = branch
                position[row, column : column + size] = torch.arange(context, context + size)
                column += size
            start += total
        branched = any(len(branch) > 1 for branch in branches)
        of_branch, at = (number, position) if branched else (None, None)
        return cls(index, place, torch.tensor(totals), of_branch, at, 1, tokens, length)

    def to(self, device: torch.device) -> Rows:
        """The same rows with their tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in ("index", "place", "lengths", "branch", "position", "past")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def after(self, past: Tensor, width: int, aligned: bool) -> Rows:
        """The same rows, going on from a cache that holds `past` tokens of each, `[rows]`, the longest `width`."""
        return replace(self, past=past, keys=width + self.length, aligned=self.aligned and aligned)

    @cached_property
    def shortest(self) -> int:
        """Tokens of the shortest row, those in the cache included."""
        return int((self.lengths if self.past is None else self.past + self.lengths).min())

    @cached_property
    def columns(self) -> Tensor:
        """The column of each token of the pass in its row, with `past`: `[rows, length]`, int64."""
        assert self.past is not None
        first = self.past[:, None]
        return first if self.length == 1 else first + torch.arange(self.length, device=first.device)

    def gather(self, states: Tensor) -> Tensor:
        """Bring `[batch, heads, tokens, head_dim]` of the pass into rows: `[rows, heads, length, head_dim]`."""
        if self.index is None:
            return states
        heads, head_dim = states.shape[1], states.shape[-1]
        flat = states.transpose(1, 2).reshape(self.batch * self.tokens, heads, head_dim)
        taken = flat.index_select(0, self.index.flatten())
        return taken.view(self.count, self.length, heads, head_dim).transpose(1, 2)

    def scatter(self, states: Tensor) -> Tensor:
        """Bring `[rows, heads, length, head_dim]` back into the pass: `[batch, tokens, heads, head_dim]`.

        Tokens that are padding get zeros.
        """
        by_token = states.transpose(1, 2)  # [rows, length, heads, head_dim]
        if self.place is None:
            return by_token.contiguous()
        heads, head_dim = states.shape[1], states.shape[-1]
        flat = by_token.reshape(self.count * self.length, heads, head_dim)
        taken = flat.index_select(0, self.place.clamp(min=0))
        if self.batch > 1:  # a packed pass has no padding
            taken = taken.masked_fill((self.place < 0)[:, None, None], 0)
        return taken.view(self.batch, self.tokens, heads, head_dim)

    def key_columns(self, last: int) -> int:
        """How many columns of keys the queries in columns up to `last - 1` may look at."""
        return last if self.keys is None else self.keys
