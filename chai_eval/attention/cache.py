"""A cache in rows: V whole, and K of the heads that are still read once a method knows which those are."""

from __future__ import annotations

from transformers import Cache

from chai_eval.attention.row_layer import RowLayer


class ClusteredCache(Cache):
    """transformers' cache with so many `RowLayer`s."""

    def __init__(self, layers: int) -> None:
        self.rows = [RowLayer() for _ in range(layers)]
        super().__init__(layers=list(self.rows))

    def nbytes(self) -> int:
        """Bytes of storage of all layers."""
        return sum(layer.nbytes() for layer in self.rows)
