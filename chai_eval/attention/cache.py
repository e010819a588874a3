"""A cache in rows: V whole, and K of the heads that are still read once a method knows which those are."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from torch import Tensor
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


class Remembered(MutableMapping[tuple[int, str], Tensor]):
    """What methods remember in a cache, by (layer, name)."""

    def __init__(self, layers: list[RowLayer]) -> None:
        self._layers = layers

    def __getitem__(self, key: tuple[int, str]) -> Tensor:
        return self._layers[key[0]].state[key[1]]

    def __setitem__(self, key: tuple[int, str], value: Tensor) -> None:
        self._layers[key[0]].state[key[1]] = value

    def __delitem__(self, key: tuple[int, str]) -> None:
        del self._layers[key[0]].state[key[1]]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter([(index, name) for index, layer in enumerate(self._layers) for name in layer.state])

    def __len__(self) -> int:
        return sum(len(layer.state) for layer in self._layers)
