"""A cache in rows: V whole, and K of the heads that are still read once a method knows which those are."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from torch import Tensor
from transformers import Cache, DynamicCache

from chai_eval.attention.row_layer import RowLayer


class ClusteredCache(Cache):
    """transformers' cache with `RowLayer`s.

    Parameters
    ----------
    layers : int
    """

    def __init__(self, layers: int) -> None:
        self.rows = [RowLayer() for _ in range(layers)]
        super().__init__(layers=list(self.rows))

    def nbytes(self) -> int:
        """Bytes of storage of all layers."""
        return sum(layer.nbytes() for layer in self.rows)

    def logical_elements(self) -> int:
        """Elements of keys and values of all layers that belong to real tokens and kept heads."""
        return sum(layer.logical_elements() for layer in self.rows)


def adopt(cache: Cache, layers: int, made_by: str, probe_tokens: int) -> list[RowLayer]:
    """The row layers of a cache; an empty cache of another kind is given some.

    Parameters
    ----------
    made_by : str
        The method and settings that are applied.
    probe_tokens : int
        Tokens in which it finds its clusters.

    Raises
    ------
    ValueError
        Where the cache already holds tokens that were stored without the method, or under another, or is of a kind
        that its layers can't take the place of.
    """
    own = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, RowLayer)]
    if len(own) == layers:
        if own[0].seen and own[0].made_by != made_by:
            raise ValueError("cache: filled under another method or other settings; allowed: those that filled it")
        for layer in own:
            layer.made_by, layer.probe_tokens = made_by, probe_tokens
        return own
    # Others are promised a place, a size or a precision that these layers don't keep to.
    if not isinstance(cache, DynamicCache | ClusteredCache) or cache.offloading:
        kind = f"{'offloaded ' if getattr(cache, 'offloading', False) else ''}{type(cache).__name__}"
        raise ValueError(f"cache: {kind} given to a method; allowed: none, an empty DynamicCache, or one of its own")
    if cache.get_seq_length() > 0:
        raise ValueError("cache: filled without the method that is applied; allowed: an empty cache, or one of its own")
    own = [RowLayer(made_by, probe_tokens) for _ in range(layers)]
    cache.layers = list(own)
    cache.layer_class_to_replicate = None
    return own


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
