"""Tensors of one clustered layer of LLaMA-7B's shape: 32 heads of 128, in clusters of uneven size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chai_eval.attention import Membership, Rows, membership_from_labels, shared_attention

HEADS, HEAD_DIM = 32, 128
# Free columns behind the keys and values, as a cache that grows in blocks has them.
ROOM = 256


@dataclass(frozen=True)
class LayerTensors:
    """What the attention of one layer is given: queries, and keys and values where a cache holds them.

    Attributes
    ----------
    query, key, value : Tensor
        Of all heads; `key` and `value` are those in use.
    kept_query, kept_key : Tensor
        Of representatives; `kept_key` with the cache's free room behind it.
    room : Tensor
        `value` with the free room behind it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kept_query: Tensor
    kept_key: Tensor
    room: Tensor
    membership: Membership
    rows: Rows
    scaling: float

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of all heads."""
        return (self.key.numel() + self.value.numel()) * self.key.element_size()

    def clustered(self) -> Tensor:
        """Output of every head by its cluster's probabilities."""
        return shared_attention(self.kept_query, self.kept_key, self.room, self.membership, self.rows, self.scaling)

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Queries and keys with every head's replaced by its representative's: what the result is checked by."""
        chosen = self.membership.representative.gather(1, self.membership.cluster)[0]
        return self.query[:, chosen], self.key[:, chosen]


def layer_tensors(
    clusters: int, queries: int, keys: int, *, dtype: torch.dtype, device: torch.device, seed: int
) -> LayerTensors:
    """Random tensors; `queries` new tokens, the last of `keys`."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(heads: int, length: int, room: int = 0) -> Tensor:
        whole = torch.zeros(1, heads, length + room, HEAD_DIM, dtype=dtype, device=device)
        whole[:, :, :length] = torch.randn(1, heads, length, HEAD_DIM, generator=generator).to(dtype)
        return whole

    room = ROOM if queries < keys else 0
    membership = _uneven(clusters, generator, device)
    query, key, value = drawn(HEADS, queries), drawn(HEADS, keys), drawn(HEADS, keys, room)
    kept_key = torch.zeros(1, clusters, keys + room, HEAD_DIM, dtype=dtype, device=device)
    kept_key[:, :, :keys] = key[:, membership.representative[0]]
    rows = Rows.from_mask(None, 1, queries, device)
    if queries < keys:
        rows = rows.after(torch.tensor([keys - queries], device=device), keys - queries, aligned=True)
    kept_query = query[:, membership.representative[0]].contiguous()
    return LayerTensors(query, key, value[:, :, :keys], kept_query, kept_key, value, membership, rows, HEAD_DIM**-0.5)


def _uneven(clusters: int, generator: torch.Generator, device: torch.device) -> Membership:
    labels = torch.cat([torch.arange(clusters), torch.randint(clusters, (HEADS - clusters,), generator=generator)])
    labels = labels[torch.randperm(HEADS, generator=generator)]
    lowest = (labels[:, None] == labels[None, :]).to(torch.uint8).argmax(1)
    return membership_from_labels(lowest[None].to(device), clusters)
