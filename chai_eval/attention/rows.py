"""Rows: where each request lies in a forward pass, and which tokens see which.

A model sees a tensor of tokens `[batch, tokens]`: padded on the left, on the right, or many requests packed into
one line with no padding at all. A method never wants to know. It sees *rows*: one request a row, its first token
in column 0, so that the probe is always columns 0 to P-1. A row may end in *branches*: several continuations of one
context (the choices of a question), each of which sees the context and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from chai_eval.attention.masks import Window, width, within

CONTEXT = -1

# From queries, keys and the first query's column (`View.choosing`) to the keys that each query may read, `[rows or 1, n
# or 1, queries, keys]`, bool; None for all.
Choose = Callable[[Tensor, Tensor, int], Tensor | None]


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

        Parameters
        ----------
        mask : Tensor [batch, tokens] or None
            1 where a token is real, as in transformers' `attention_mask`; None where all are.
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
    def packed(
        cls, contexts: Sequence[int], branches: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> Rows:
        """Rows of requests packed one after the other into a pass of shape `[1, tokens]`, without padding.

        Parameters
        ----------
        contexts : sequence of int
            Tokens in the context of each row, at least 1.
        branches : sequence of sequences of int
            Tokens in each branch of each row, in the order in which they follow the context; may be empty.
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
        return cls(
            index.to(device),
            place.to(device),
            torch.tensor(totals, device=device),
            number.to(device) if branched else None,
            position.to(device) if branched else None,
            1,
            tokens,
            length,
        )

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


@dataclass(frozen=True)
class View:
    """Which keys the queries of a layer see: causality, branches, a window, and the keys that a method chose.

    Padding stands at the end of a row, so it is never seen by a token that is real. (What a padding query sees does
    not matter; it always sees column 0, so that its softmax is finite.)

    Attributes
    ----------
    rows : Rows
    scaling : float
        Factor of the products of queries and keys.
    window : int, Chunk or None
        Width of the sliding window, or the chunks, where the layer has any.
    chosen : Tensor [rows or 1, heads or 1, length, key columns], bool, or None
        Keys that a method lets each query read; None for all.
    choose : callable or None
        Says so once queries meet keys, see `choosing`.
    """

    rows: Rows
    scaling: float
    window: Window | None = None
    chosen: Tensor | None = None
    choose: Choose | None = None
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def binding(self) -> Window | None:
        """The window, where there are rows long enough for it to hide anything."""
        hides = self.window is not None and width(self.window) < (self.rows.keys or self.rows.length)
        return self.window if hides else None

    @property
    def causal(self) -> bool:
        """Every column sees the columns up to its own, and nothing else is masked."""
        rows = self.rows
        return rows.branch is None and rows.past is None and self.binding is None and self.chosen is None

    @property
    def whole(self) -> View:
        """The view of queries that do not choose."""
        return self if self.choose is None else replace(self, choose=None)

    def choosing(self, query: Tensor, key: Tensor, first: int = 0) -> View:
        """The view of queries once they meet their keys.

        Parameters
        ----------
        query : Tensor [rows, n, queries, head_dim]
            In columns `first` and after.
        key : Tensor [rows, n or a divisor of it, key columns or more, head_dim]
        """
        chosen = None if self.choose is None else self.choose(query, key, first)
        if chosen is None:
            return self.whole
        chosen = pad(chosen, (0, 0, first, 0), value=True)
        return replace(self, chosen=chosen if self.chosen is None else chosen & self.chosen, choose=None)

    def mask(self, first: int, last: int) -> Tensor | None:
        """What the queries in columns `first` to `last - 1` see among the first `rows.key_columns(last)` keys.

        Returns
        -------
        Tensor [rows or 1, heads or 1, last - first, key columns], bool, or None
            None where nothing need be masked (one new token), or it is plain causality, which kernels know without a
            mask: where queries and keys both begin with column 0.
        """
        rows = self.rows
        if first == 0 and self.causal:
            return None
        if rows.aligned and rows.past is not None and rows.length == 1 and self.binding is None and self.chosen is None:
            return None  # one new token in every row sees all there is
        asked = (first, last)
        if asked not in self._masks:  # every layer asks the same
            self._masks[asked] = self._mask(first, last)
        return self._masks[asked]

    def whole_mask(self) -> Tensor:
        """What every query of the pass sees: `[rows or 1, heads or 1, length, key columns]`, bool."""
        mask = self.mask(0, self.rows.length)
        if mask is not None:
            return mask
        length, keys = self.rows.length, self.rows.key_columns(self.rows.length)
        return torch.ones(length, keys, dtype=torch.bool, device=self.rows.lengths.device).tril(keys - length)[
            None, None
        ]

    def future(self, queries: int) -> Tensor:
        """Among columns that so many queries stand in, those ahead of each query: `[queries, queries]`, bool."""
        asked = (-queries, -queries)
        if asked not in self._masks:  # every block, cluster and layer asks the same
            square = torch.ones(queries, queries, dtype=torch.bool, device=self.rows.lengths.device)
            self._masks[asked] = square.triu(1)
        return self._masks[asked]

    def _mask(self, first: int, last: int) -> Tensor:
        rows, device = self.rows, self.rows.lengths.device
        keys = rows.key_columns(last)
        query = torch.arange(first, last, device=device)[None, :, None]
        key = torch.arange(keys, device=device)[None, None, :]
        if rows.past is not None:
            query = query + rows.past[:, None, None]
        seen = key <= query
        if rows.branch is not None:
            of_query, of_key = rows.branch[:, first:last, None], rows.branch[:, None, :last]
            seen = seen & ((of_key == CONTEXT) | (of_key == of_query))
        if self.binding is not None:
            if rows.position is not None:  # branches stand further right than their position says
                query, key = rows.position[:, first:last, None], rows.position[:, None, :last]
            seen = seen & within(self.binding, query, key)
        seen = seen[:, None]
        return seen if self.chosen is None else seen & self.chosen[:, :, first:last, :keys]
