"""A forward pass as a method sees it: its rows, its cache, its layers."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from chai_eval.attention.cache import ClusteredCache
from chai_eval.attention.masks import UnsupportedModel, Window
from chai_eval.attention.row_layer import RowLayer
from chai_eval.attention.rows import Rows
from chai_eval.attention.view import View

# What models call their cache, newest name first.
CACHE_NAMES = ("cache", "past_key_values")


@dataclass
class ForwardPass:
    """What the layers of one forward pass share: the rows, and whatever a method has `carried` from layer to layer.

    In a `packed` pass requests lie one after the other in a line, as `rows=` says.
    """

    rows: Rows
    cache: list[RowLayer] | None = None
    carried: dict[str, Any] = field(default_factory=dict)
    layers_seen: set[int] = field(default_factory=set)
    packed: bool = False
    views: dict[tuple[float, Window | None], View] = field(default_factory=dict)

    def view(self, scaling: float, window: Window | None) -> View:
        """What a layer's queries see: the same object, with its masks, for all layers that are alike."""
        asked = (scaling, window)
        if asked not in self.views:
            self.views[asked] = View(self.rows, scaling, window)
        return self.views[asked]

    def store(self, layer: int) -> RowLayer | None:
        """The layer's cache, if there is one."""
        return None if self.cache is None else self.cache[layer]

    def use_cache(self, in_use: bool) -> None:
        """Open the cache for this pass, or close it after."""
        for layer in self.cache or ():
            layer.in_use = in_use


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of the model: of the layer's number, from 0, its module, and what its queries see."""

    index: int
    module: nn.Module
    view: View
    forward: ForwardPass

    @property
    def rows(self) -> Rows:
        """The rows of the pass."""
        return self.view.rows

    @property
    def store(self) -> RowLayer | None:
        """The layer's cache, if there is one."""
        return self.forward.store(self.index)

    @property
    def state(self) -> dict[str, Tensor]:
        """What a method remembers of the layer from pass to pass, `[rows, ...]` each: nothing without a cache."""
        return {} if self.store is None else self.store.state


@dataclass(frozen=True)
class LayerShape:
    """What an attention call was given: heads, and numbers per head of queries and keys, and of values."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass
class Takeover:
    """A model whose attention is taken over, and the forward pass that is going on.

    `paths` counts how often clustered layers projected "whole" (all heads), or representatives only: "two_step" (after
    the probe of a prompt), "decode". `shapes` are those of each layer that went through the attention interface,
    `windows` how far back it looked. Where it has `fixed_steps`, those of a decoding may be captured (`decode_graph`).
    """

    current: ForwardPass | None = None
    fixed_steps: bool = False
    paths: Counter[str] = field(default_factory=Counter)
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, Window | None] = field(default_factory=dict)

    def saw(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Note what a layer was given, `[batch, heads, tokens, head_dim]` each."""
        self.windows[call.index] = call.view.window
        self.shapes[call.index] = LayerShape(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])


# (call, query [rows, heads, length, head_dim], key and value [rows, kv_heads, length, head_dim] of this pass)
# to the output [rows, heads, length, head_dim].
Attend = Callable[[AttentionCall, Tensor, Tensor, Tensor], Tensor]


def positions(rows: Rows) -> Tensor:
    """Position of every token of a packed pass within its request: `[1, tokens]`, int64."""
    if rows.place is None:
        raise ValueError("rows: a packed pass is needed")
    column = torch.arange(rows.length, device=rows.place.device).expand(rows.count, -1)
    by_place = rows.position if rows.position is not None else column
    return by_place.flatten().index_select(0, rows.place)[None]


def packed_pass(rows: Rows, kwargs: dict[str, Any]) -> ForwardPass:
    """The pass of packed rows; gives the model their positions."""
    tokens = _input(kwargs)
    if _given_cache(kwargs) is not None:
        raise ValueError("rows: packed rows given with a cache; allowed: one of the two")
    rows = rows.to(tokens.device)
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = positions(rows)
    kwargs["use_cache"] = False
    return ForwardPass(rows, packed=True)


def padded_pass(
    stack: Any, layers: int, made_by: str, probe_tokens: int, own_positions: bool, kwargs: dict[str, Any]
) -> ForwardPass:
    """The pass of an ordinary batch, with or without a cache.

    With `own_positions` the model is told the position of each token within its request, where it was told none.
    """
    tokens = _input(kwargs)
    batch, length, device = tokens.shape[0], tokens.shape[1], tokens.device
    mask = kwargs.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        raise UnsupportedModel(
            "model: its masks are made before its layers are called, where how far back they look can't be read; "
            "allowed: models that make them beside their layers, such as the text model inside it"
        )
    untold = own_positions and kwargs.get("position_ids") is None
    if untold and mask is not None and mask.ndim == 2 and "position_ids" in inspect.signature(stack.forward).parameters:
        kwargs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
    cache, wanted, config = _given_cache(kwargs), kwargs.get("use_cache"), stack.config
    if cache is None and (config.use_cache if wanted is None else wanted):
        known = inspect.signature(stack.forward).parameters
        cache = kwargs[next(name for name in CACHE_NAMES if name in known)] = ClusteredCache(layers)
    if cache is None:
        return ForwardPass(Rows.from_mask(mask, batch, length, device))
    stored = adopt(cache, layers, made_by, probe_tokens)
    seen = stored[0].seen
    if mask is not None and mask.ndim == 2 and mask.shape[1] == seen + length:
        mask = mask[:, seen:]
    return ForwardPass(stored[0].following(Rows.from_mask(mask, batch, length, device)), stored)


def adopt(cache: Cache, layers: int, made_by: str, probe_tokens: int) -> list[RowLayer]:
    """The row layers of a cache; an empty cache of another kind is given some.

    They are marked with the method and settings that are applied, and the tokens in which it finds its clusters.
    Raises ValueError where the cache already holds tokens that were stored without the method, or under another, or is
    of a kind that its layers can't take the place of.
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


def _input(kwargs: Mapping[str, Any]) -> Tensor:
    for given in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if given is not None:
            return given
    raise ValueError("input_ids: none given")


def cache_in(out: Mapping[str, Any]) -> dict[str, Any]:
    """The cache that a model gave back, by the name under which it takes it again."""
    return next({name: out[name]} for name in CACHE_NAMES if out.get(name) is not None)


def _given_cache(kwargs: Mapping[str, Any]) -> Cache | None:
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
