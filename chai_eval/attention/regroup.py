"""A guard against drift: heads that have come to attend unlike their representative change over to another one.

Representatives stay what they are, as the past keys of other heads are gone (docs/design.md, section 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chai_eval.attention.linkage import TIE
from chai_eval.attention.membership import Membership, cosine_distance
from chai_eval.attention.probe import repeat_heads
from chai_eval.attention.rows import Rows
from chai_eval.attention.shape import AttentionShape
from chai_eval.attention.sharing import SharedHeads
from chai_eval.attention.sources import Source
from chai_eval.attention.view import View

# Names under which the cache remembers keys of the probe tokens, and queries and keys of the tokens that decide, of all
# heads; and each row's clusters, as long as others of its batch have not seen their probe.
PROBE_KEY, WINDOW_QUERY, WINDOW_KEY, REGROUPED = "probe_key", "window_query", "window_key", "regrouped"


@dataclass(frozen=True)
class Guard:
    """When heads change over, and which.

    Attributes
    ----------
    every : int
        Whenever a request has a multiple of so many tokens, the last `window` of them decide.
    window : int
        Less than `every` by the probe at least.
    threshold : float
        A head whose distance to its representative is above it goes to the nearest one.
    """

    every: int
    window: int
    threshold: float

    def numbers(self, shape: AttentionShape, probe_tokens: int) -> int:
        """How many numbers of a request it remembers in a layer."""
        keys = shape.kv_heads * (probe_tokens + self.window)
        return shape.head_dim * (shape.heads * self.window + keys)

    def stretches(self, rows: Rows, first: int) -> Iterator[tuple[int, int]]:
        """Columns of the pass from `first` on, cut wherever some row has a multiple of `every` tokens."""
        stops = {first, rows.length}
        for before, new in {*zip(before_pass(rows).tolist(), rows.lengths.tolist(), strict=True)}:
            stops.update(range(self.every - before % self.every, new + 1, self.every))
        return itertools.pairwise(sorted(stop for stop in stops if stop >= first))

    def note(self, state: dict[str, Tensor], source: Source, rows: Rows, start: int, stop: int) -> None:
        """Remember queries and keys of all heads of those tokens in columns `start` to `stop - 1` that will decide."""
        column = torch.arange(start, stop, device=source.device)
        at = (before_pass(rows)[:, None] + column) % self.every - (self.every - self.window)
        deciding = (at >= 0) & (column < rows.lengths[:, None])
        if not bool(deciding.any()):
            return
        some = deciding.any(0).nonzero()
        part = slice(int(some[0]), int(some[-1]) + 1)
        row, new = deciding[:, part].nonzero(as_tuple=True)
        columns = slice(start + part.start, start + part.stop)
        for name, states in ((WINDOW_QUERY, source.query(columns=columns)), (WINDOW_KEY, source.key(columns=columns))):
            shape = (rows.count, states.shape[1], self.window, states.shape[3])
            filled = state[name].clone() if name in state else states.new_zeros(shape)
            filled[row, :, at[:, part][row, new]] = states[row, :, new]
            state[name] = filled

    def after(self, shared: SharedHeads, state: dict[str, Tensor], view: View, stop: int) -> SharedHeads:
        """The clusters from column `stop` on: other ones in rows that have come to a multiple of `every` there."""
        rows = view.rows
        due = ((before_pass(rows) + stop) % self.every == 0) & (stop <= rows.lengths)
        if not bool(due.any()):
            return shared
        distance = cosine_distance(self._features(state, view.scaling).cpu())  # on the host, as the probe's
        membership = shared.membership.changed(lambda each: each.to(distance.device))
        cluster, representative = membership.cluster, membership.representative
        apart = distance.gather(2, representative[:, None].expand(-1, cluster.shape[1], -1))  # [rows, heads, clusters]
        nearest = (apart <= apart.amin(-1, keepdim=True) + TIE).to(torch.uint8).argmax(-1)
        moves = (apart.gather(2, cluster[..., None])[..., 0] > self.threshold) & due.to(cluster.device)[:, None]
        return _regrouped(shared, torch.where(moves, nearest, cluster))

    def _features(self, state: dict[str, Tensor], scaling: float) -> Tensor:
        """What the tokens that decide attend to, among themselves and the probe's tokens: `[rows, heads, n]`, float32.

        For other tokens not all heads' keys are there.
        """
        query, key = state[WINDOW_QUERY], torch.cat((state[PROBE_KEY], state[WINDOW_KEY]), dim=2)
        scores = query.float() @ repeat_heads(key, query.shape[1]).float().transpose(-1, -2) * scaling
        probe = key.shape[2] - self.window
        future = torch.ones(self.window, key.shape[2], dtype=torch.bool, device=key.device).triu(probe + 1)
        return scores.masked_fill(future, float("-inf")).softmax(-1).flatten(-2)

    def earlier(self, shared: SharedHeads, state: dict[str, Tensor]) -> SharedHeads:
        """The clusters that rows had come to, of a probe that was looked at anew for the sake of other rows."""
        if REGROUPED not in state:
            return shared
        before = state[REGROUPED]
        return _regrouped(shared, torch.where(before < 0, shared.membership.cluster, before))

    def keep(self, shared: SharedHeads, state: dict[str, Tensor], rows: Rows) -> None:
        """Remember the clusters that rows have come to, until all have seen their probe."""
        past_first = before_pass(rows) + rows.lengths >= self.every
        state[REGROUPED] = torch.where(past_first[:, None], shared.membership.cluster, -1)


def before_pass(rows: Rows) -> Tensor:
    """Tokens of each row before this pass, `[rows]`."""
    return torch.zeros_like(rows.lengths) if rows.past is None else rows.past


def _regrouped(shared: SharedHeads, cluster: Tensor) -> SharedHeads:
    membership = shared.membership
    return replace(shared, membership=Membership(cluster.to(membership.cluster.device), membership.representative))
