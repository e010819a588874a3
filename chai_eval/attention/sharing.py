"""Which heads share scores in a layer: how a method says it (`Plan`), and what is read and cached for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chai_eval.attention.masks import Chunk, UnsupportedModel, Window, width
from chai_eval.attention.membership import Membership

if TYPE_CHECKING:
    from chai_eval.attention.regroup import Guard

# From queries `[rows, heads, probe, head_dim]` and keys `[rows, kv_heads, probe, head_dim]` of the probe tokens and the
# scaling of their products to the membership of every row.
Cluster = Callable[[Tensor, Tensor, float], Membership]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How heads of a layer share scores, with so many representatives (`clusters`); see `FixedPlan` and `ProbePlan`.

    With `share_value` members take their representative's values too, so its whole output. In the first `probe_tokens`
    of a request every head has its own scores; the membership is found from them. A `guard` moves heads of such a
    membership to other representatives, further on in the text.
    """

    clusters: int
    share_value: bool = False
    probe_tokens: int = 0
    guard: Guard | None = None

    def check_window(self, window: Window | None) -> None:
        """Refuse a window that some of the probe tokens lie outside of: what heads attend to there is another matter.

        Raises UnsupportedModel.
        """
        if window is not None and self.guard is not None:
            raise UnsupportedModel(
                f"method.recluster_every: {self.guard.every} given for a model that looks back through a window; "
                "allowed: 0, or models without"
            )
        if window is not None and width(window) < self.probe_tokens:
            what = "chunks of attention" if isinstance(window, Chunk) else "sliding window"
            raise UnsupportedModel(
                f"method.probe_tokens: {self.probe_tokens} given; allowed: 1 to {width(window)}, the model's {what}"
            )


@dataclass(frozen=True, kw_only=True)
class FixedPlan(Plan):
    """One membership (of one row) for every request, known beforehand."""

    membership: Membership

    @classmethod
    def of(cls, membership: Membership, *, share_value: bool = False) -> FixedPlan:
        """The plan of a membership of one row."""
        return cls(clusters=membership.clusters, share_value=share_value, membership=membership)


@dataclass(frozen=True, kw_only=True)
class ProbePlan(Plan):
    """A membership for each request, found by `cluster` from its first `probe_tokens` tokens (at least 1)."""

    cluster: Cluster


def side_by_side(plans: Sequence[Plan | None], heads: Sequence[int]) -> Plan | None:
    """The plan of a layer whose blocks of neighbouring heads, so many `heads` each, have plans of their own.

    None where every head has its own scores: of a block, or of the layer. All that there are find their membership
    from the same number of probe tokens, or all have one that is fixed; none has a guard, which looks at all heads.
    """
    known = [each for each in plans if each is not None]
    if len(plans) == 1 or not known:
        return plans[0]
    first = known[0]
    if isinstance(first, FixedPlan):
        device = first.membership.cluster.device
        of_blocks = [
            each.membership if isinstance(each, FixedPlan) else Membership.every_head(1, own, device)
            for each, own in zip(plans, heads, strict=True)
        ]
        return FixedPlan.of(Membership.side_by_side(of_blocks), share_value=first.share_value)

    def cluster(query: Tensor, key: Tensor, scaling: float) -> Membership:
        queries = query.split(list(heads), dim=1)
        keys = key.split([own * key.shape[1] // query.shape[1] for own in heads], dim=1)
        return Membership.side_by_side(
            [
                each.cluster(some, of_some, scaling)
                if isinstance(each, ProbePlan)
                else Membership.every_head(len(some), some.shape[1], some.device)
                for each, some, of_some in zip(plans, queries, keys, strict=True)
            ]
        )

    return ProbePlan(
        clusters=sum(own if each is None else each.clusters for each, own in zip(plans, heads, strict=True)),
        share_value=first.share_value,
        probe_tokens=first.probe_tokens,
        cluster=cluster,
    )


@dataclass(frozen=True)
class SharedHeads:
    """What a membership leaves to be computed and cached in a layer.

    Attributes
    ----------
    membership : Membership
        Of every row.
    key_heads : Tensor [rows, kept], int64
        The key heads that some representative reads. A row that reads fewer than another has some that none reads.
    slot : Tensor [rows, clusters], int64, or None
        Which of them each representative reads; None where they correspond one to one.
    share_value : bool
        Members take their representative's values too: those of `key_heads` are all that is needed.
    """

    membership: Membership
    key_heads: Tensor
    slot: Tensor | None
    share_value: bool = False

    @classmethod
    def of(cls, membership: Membership, kv_heads: int, *, share_value: bool = False) -> SharedHeads:
        """From the membership of a layer's heads, which read `kv_heads` key and value heads."""
        read = membership.representative // (membership.cluster.shape[1] // kv_heads)
        if bool((read.sort(1).values.diff(dim=1) > 0).all()):  # each representative reads its own
            return cls(membership, read, None, share_value)
        present = torch.zeros(len(read), kv_heads, dtype=torch.bool, device=read.device).scatter(1, read, True)
        most = int(present.sum(1).max())
        kept = torch.argsort((~present).to(torch.uint8), dim=1, stable=True)[:, :most]
        return cls(membership, kept, (present.cumsum(1) - 1).gather(1, read), share_value)

    @property
    def value_heads(self) -> Tensor | None:
        """The value heads that are needed, `[rows, kept]`; None for all."""
        return self.key_heads if self.share_value else None

    def for_rows(self, change: Callable[[Tensor], Tensor]) -> SharedHeads:
        """The same for rows that were reordered, repeated or selected."""
        slot = None if self.slot is None else change(self.slot)
        return SharedHeads(self.membership.changed(change), change(self.key_heads), slot, self.share_value)


def heads_of(states: Tensor, heads: Tensor | None) -> Tensor:
    """Of `[rows, heads, n, head_dim]` the heads that each row names, `[rows, taken]`; all where none are named."""
    if heads is None:
        return states
    if states.shape[2] == 1:  # a gather by elements, but of few of them, and one operation
        return states.gather(1, heads[:, :, None, None].expand(-1, -1, 1, states.shape[3]))
    return states[torch.arange(len(states), device=states.device)[:, None], heads]
