"""What a method changes in attention, and how that is put into a model: one way for all methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.inject import take_over
from chai_eval.attention.layer import attend
from chai_eval.attention.masks import Window, window_given
from chai_eval.attention.passes import AttentionCall, ForwardPass, Takeover
from chai_eval.attention.shape import attention_layers
from chai_eval.attention.sharing import Plan
from chai_eval.attention.sources import Computed, ModuleKind, Projected, Source, module_kind

Prefill = Literal["auto", "two_step", "one_pass"]

# Fewest tokens of a single request for which a second, narrow step costs less than it saves.
LEAST_TOKENS = 64


class Hooks:
    """What a method changes in attention. Each hook changes nothing unless a subclass says otherwise.

    In a layer they come in this order: `states`, `keys`, then attention (with shared scores, or the method's own), in
    which queries meet keys under `reads`, and `heads`.

    `plans` are for layers in which heads share scores, by number. With `prefill` "two_step" the tokens after the probe
    are projected for representatives only, in a second step, which "auto" does where it pays; "one_pass" never. Results
    are the same up to rounding.
    """

    # What becomes of a key depends on its position, not on its distance from queries alone.
    by_position = False

    # Tokens leave the cache: columns of keys are not those of tokens, by which `keys` would say what is read.
    drops_tokens = False

    # Layers whose own attention asks its source for less than there is, so that it pays to project no more.
    narrow: Set[int] = frozenset()

    def __init__(self, plans: Mapping[int, Plan] | None = None, prefill: Prefill = "auto") -> None:
        self.plans = plans or {}
        self.prefill = prefill

    @property
    def fixed_steps(self) -> bool:
        """Once every row has seen its probe, a pass of one token asks the host nothing, so that it may be captured.

        It is for a subclass to say so: what it computes must depend on nothing that the host keeps of a request.
        """
        return type(self) is Hooks and all(plan.guard is None for plan in self.plans.values())

    def installed(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Whatever else the method needs in the model's modules."""
        return nullcontext()

    def states(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Other queries, keys and values, before anything is scored or cached.

        Queries are `[rows, heads, length, head_dim]`, keys and values `[rows, kv_heads, length, head_dim]`; other key
        and value heads may be given back, as many as divide the query heads.
        """
        return query, key, value

    def keys(self, call: AttentionCall, source: Source) -> Tensor | None:
        """The keys that each query may read: `[rows or 1, heads or 1, length, key columns]`, bool; None for all.

        What causality and windows hide stays hidden. Where heads share scores it is the same for all heads.
        """
        return None

    def reads(self, call: AttentionCall, query: Tensor, key: Tensor, first: int) -> Tensor | None:
        """The keys that each query may read, by both: `[rows, n, queries, keys]`, bool; None for all.

        Where heads share scores it is asked for representatives, after their probe; attention of a method's own does
        not ask. Queries, `[rows, n, queries, head_dim]`, are in columns `first` and after; keys, `[rows, n or a divisor
        of it, keys, head_dim]`, are those of the whole rows, perhaps with free room behind.
        """
        return None

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        """Attention of the method's own, `[rows, heads, length, head_dim]`; None for softmax attention as it is."""
        return None

    def heads(self, call: AttentionCall, out: Tensor) -> Tensor:
        """Other outputs of heads, `[rows, heads, length, head_dim]`, before the output projection."""
        return out

    def attend(self, call: AttentionCall, source: Source) -> Tensor:
        """Attention of one layer under all hooks but `states`."""
        chosen = self.keys(call, source)
        if chosen is not None:
            call = replace(call, view=replace(call.view, chosen=chosen))
        if self.changes("reads"):
            call = replace(call, view=replace(call.view, choose=partial(self.reads, call)))
        out = self.attention(call, source)
        if out is None:
            out = attend(self.plans.get(call.index), source, call.view, call.store)
        return self.heads(call, out)

    def check_window(self, layer: int, window: Window | None) -> None:
        """Refuse a layer that looks back no further than `window` where that is too near; raises UnsupportedModel."""
        if layer in self.plans:
            self.plans[layer].check_window(window)

    def changes(self, hook: Literal["states", "keys", "reads", "attention"]) -> bool:
        """Whether a hook may change anything."""
        return getattr(type(self), hook) is not getattr(Hooks, hook)


class Composed(Hooks):
    """Several methods' hooks, one after the other; at most one of them shares scores or has its own attention."""

    def __init__(self, parts: Sequence[Hooks]) -> None:
        sharing = next((part for part in parts if part.plans), Hooks())
        super().__init__(sharing.plans, sharing.prefill)
        self.parts = parts
        self.by_position = any(part.by_position for part in parts)
        self.narrow = frozenset().union(*(part.narrow for part in parts))

    @property
    def fixed_steps(self) -> bool:
        return all(part.fixed_steps for part in self.parts)

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.installed(model))
            yield

    def states(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for part in self.parts:
            query, key, value = part.states(call, query, key, value)
        return query, key, value

    def keys(self, call: AttentionCall, source: Source) -> Tensor | None:
        chosen = [each for part in self.parts if (each := part.keys(call, source)) is not None]
        return None if not chosen else torch.stack(torch.broadcast_tensors(*chosen)).all(0)

    def reads(self, call: AttentionCall, query: Tensor, key: Tensor, first: int) -> Tensor | None:
        chosen = [each for part in self.parts if (each := part.reads(call, query, key, first)) is not None]
        return None if not chosen else torch.stack(torch.broadcast_tensors(*chosen)).all(0)

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        return next((out for part in self.parts if (out := part.attention(call, source)) is not None), None)

    def heads(self, call: AttentionCall, out: Tensor) -> Tensor:
        for part in self.parts:
            out = part.heads(call, out)
        return out

    def check_window(self, layer: int, window: Window | None) -> None:
        for part in self.parts:
            part.check_window(layer, window)

    def changes(self, hook: Literal["states", "keys", "reads", "attention"]) -> bool:
        return any(part.changes(hook) for part in self.parts)


@contextmanager
def apply(model: PreTrainedModel, hooks: Hooks, *, made_by: str = "") -> Iterator[Takeover]:
    """Run a model under a method's hooks while the context lasts; `made_by` marks its caches, see `take_over`."""

    def computed(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return hooks.attend(call, Computed(*hooks.states(call, query, key, value)))

    probe = max((plan.probe_tokens for plan in hooks.plans.values()), default=0)
    with (
        take_over(model, computed, made_by=made_by, probe_tokens=probe, own_positions=hooks.by_position) as handle,
        ExitStack() as stack,
    ):
        if not hooks.changes("states"):  # which needs all heads of what the model computes
            for index, module in attention_layers(model).items():
                kind = module_kind(module) if index in hooks.plans.keys() | hooks.narrow else None
                if kind is not None:
                    module.forward = partial(_projecting, module, kind, hooks, handle)
                    stack.callback(delattr, module, "forward")
        stack.enter_context(hooks.installed(model))
        handle.fixed_steps = hooks.fixed_steps
        yield handle


def _projecting(
    module: Any, kind: ModuleKind, hooks: Hooks, handle: Takeover, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """The forward of an attention module that projects what is asked for only, where it pays; else the module's own."""
    forward, index = handle.current, int(module.layer_idx)
    if forward is None:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    path = None if args else _path(hooks, forward, index)
    handle.paths[path or "whole"] += 1
    if path is None:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    forward.layers_seen.add(index)
    rows, store = forward.rows, forward.store(index)
    if store is not None:
        store.count(rows.tokens)
    rotary = kwargs.get("position_embeddings") if kind.rotary else None
    if rotary is not None:
        cos, sin = (rows.gather(each.expand(rows.batch, -1, -1)[:, None])[:, 0] for each in rotary)
        rotary = (cos, sin)
    hidden = rows.gather(hidden_states[:, None])[:, 0]  # [rows, length, hidden_size]
    gathered = store.projections if store is not None and path == "decode" else None
    source = Projected(module, kind, hidden, rotary, gathered)
    view = forward.view(
        1.0 if kind.scaled_query else float(module.scaling),
        window_given(module.config.model_type, kwargs.get("attention_mask")),
    )
    out = hooks.attend(AttentionCall(index, module, view, forward), source)
    return getattr(module, kind.output)(rows.scatter(out).flatten(-2)), None


def _path(hooks: Hooks, forward: ForwardPass, index: int) -> str | None:
    """Where not all is projected: "narrow" everywhere, or representatives alone in "decode", or in "two_step" after a
    prompt's probe."""
    store, rows = forward.store(index), forward.rows
    if index in hooks.narrow:
        return "narrow"
    if store is not None and store.shared is not None:
        return "decode"
    if hooks.prefill == "one_pass" or rows.past is not None or rows.branch is not None:
        return None
    if rows.shortest <= hooks.plans[index].probe_tokens:
        return None
    if hooks.prefill == "two_step" or (rows.count == 1 and rows.length >= LEAST_TOKENS):
        return "two_step"
    return None
