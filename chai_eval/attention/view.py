"""Views: what the queries of a layer see of their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from chai_eval.attention.masks import Window, width, within
from chai_eval.attention.rows import CONTEXT, Rows

# From queries, keys and the first query's column (`View.choosing`) to the keys that each query may read, `[rows or 1, n
# or 1, queries, keys]`, bool; None for all.
Choose = Callable[[Tensor, Tensor, int], Tensor | None]


@dataclass(frozen=True)
class View:
    """Which keys the queries of a layer see: causality, branches, a window, and the keys that a method chose.

    Padding stands at the end of a row, so it is never seen by a token that is real. (What a padding query sees does
    not matter; it always sees column 0, so that its softmax is finite.)

    Attributes
    ----------
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
        """The view of queries in columns `first` and after, `[rows, n, queries, head_dim]`, once they meet their keys.

        Keys are `[rows, n or a divisor of it, key columns or more, head_dim]`.
        """
        chosen = None if self.choose is None else self.choose(query, key, first)
        if chosen is None:
            return self.whole
        chosen = pad(chosen, (0, 0, first, 0), value=True)
        return replace(self, chosen=chosen if self.chosen is None else chosen & self.chosen, choose=None)

    def mask(self, first: int, last: int) -> Tensor | None:
        """What the queries in columns `first` to `last - 1` see among the first `rows.key_columns(last)` keys.

        It is `[rows or 1, heads or 1, last - first, key columns]`, bool; None where nothing need be masked (one new
        token), or it is plain causality, which kernels know without a mask: queries and keys both begin with column 0.
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
