"""Narrow projections: queries and keys of representatives only, where a model's attention module allows it.

At a few thousand tokens the projections of a large model outweigh the products of queries and keys several times over,
so this is where time is. The attention module's own forward is stood in for; whatever it can't do, the module does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from chai_eval.attention.clustered import shared_attention
from chai_eval.attention.inject import attention_layers
from chai_eval.attention.masks import Window, window_given
from chai_eval.attention.passes import ForwardPass, Takeover
from chai_eval.attention.probed import Plan, exact_attention
from chai_eval.attention.projection import Narrow
from chai_eval.attention.row_layer import RowLayer, distinct

Prefill = Literal["auto", "two_step", "one_pass"]

# Fewest tokens of a single request for which a second, narrow step costs less than it saves.
LEAST_TOKENS = 64


@dataclass(frozen=True)
class Family:
    """How an attention module of a kind computes queries and keys.

    Attributes
    ----------
    rotary : bool
        They are turned by their positions.
    output : str
        Name of the output projection.
    scaled_query : bool
        Queries are scaled before the product, which then has a scaling of 1.
    """

    rotary: bool
    output: str
    scaled_query: bool


FAMILIES = {
    "LlamaAttention": Family(True, "o_proj", False),
    "MistralAttention": Family(True, "o_proj", False),
    "Qwen2Attention": Family(True, "o_proj", False),
    "OPTAttention": Family(False, "out_proj", True),
}


def family_of(module: nn.Module) -> Family | None:
    """The family of an attention module, or None where it takes the general path.

    That is so for other architectures, and where projections are not plain `nn.Linear` (quantised, adapted) or the
    module is moved about by accelerate.
    """
    family = FAMILIES.get(type(module).__name__)
    if family is None or hasattr(module, "_hf_hook"):
        return None
    plain = all(type(getattr(module, name)) is nn.Linear for name in ("q_proj", "k_proj", "v_proj"))
    return family if plain else None


@contextmanager
def narrowed(model: PreTrainedModel, plans: dict[int, Plan], handle: Takeover, prefill: Prefill) -> Iterator[None]:
    """Let the attention modules of clustered layers project representatives only, while the context lasts.

    Parameters
    ----------
    plans : dict of int to Plan
        Of the layers that are clustered.
    handle : Takeover
        Of the take-over that computes everything else.
    """
    changed = []
    try:
        for index, module in attention_layers(model).items():
            family = family_of(module)
            if family is not None and index in plans:
                narrow = NarrowAttention(module, family, plans[index], prefill)
                module.forward = partial(_forward, narrow, handle)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward


def _forward(
    narrow: NarrowAttention, handle: Takeover, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    module = narrow.module
    run = handle.run
    path = narrow.path(run) if run is not None and not args else None
    if run is None or path is None:
        if run is not None:
            handle.paths["whole"] += 1
        return type(module).forward(module, hidden_states, *args, **kwargs)
    handle.paths[path] += 1
    run.layers_seen.add(narrow.index)
    window = window_given(module.config.model_type, kwargs.get("attention_mask"))
    narrow.plan.check_window(window)
    out = narrow.attend(hidden_states, kwargs.get("position_embeddings"), run, path, window)
    return getattr(module, narrow.family.output)(out.flatten(-2)), None


@dataclass(frozen=True)
class NarrowAttention:
    """Clustered attention of one layer straight from the hidden states."""

    module: Any
    family: Family
    plan: Plan
    prefill: Prefill

    @property
    def index(self) -> int:
        """Number of the layer."""
        return int(self.module.layer_idx)

    def path(self, run: ForwardPass) -> str | None:
        """Which narrow path a pass may take: "decode", "two_step", or None for the module's own."""
        store, rows = run.store(self.index), run.rows
        if store is not None and store.membership is not None:
            return "decode"
        if self.prefill == "one_pass" or rows.past is not None or rows.branch is not None:
            return None
        if rows.shortest <= self.plan.probe_tokens:
            return None
        if self.prefill == "two_step" or (rows.count == 1 and rows.length >= LEAST_TOKENS):
            return "two_step"
        return None

    def attend(
        self, hidden: Tensor, turn: tuple[Tensor, Tensor] | None, run: ForwardPass, path: str, window: Window | None
    ) -> Tensor:
        """Output of every head before the output projection.

        Parameters
        ----------
        hidden : Tensor [batch, tokens, hidden_size]
        turn : pair of Tensor [batch or 1, tokens, head_dim], or None
            Cosine and sine of the positions.

        Returns
        -------
        Tensor [batch, tokens, heads, head_dim]
        """
        rows, store = run.rows, run.store(self.index)
        if store is not None:
            store.count(rows.tokens)
        hidden = rows.gather(hidden[:, None])[:, 0]  # [rows, length, hidden_size]
        if turn is not None:
            cos, sin = (rows.gather(each.expand(rows.batch, -1, -1)[:, None])[:, 0] for each in turn)
            turn = (cos, sin)
        if path == "decode":
            assert store is not None
            out = self._decode(hidden, turn, run, store, window)
        else:
            out = self._two_step(hidden, turn, run, store, window)
        return rows.scatter(out)

    def _decode(
        self,
        hidden: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        run: ForwardPass,
        store: RowLayer,
        window: Window | None,
    ) -> Tensor:
        membership = store.membership
        assert membership is not None
        assert store.kept_heads is not None
        if "query" not in store.narrow:
            store.narrow["query"] = Narrow.of(self.module.q_proj, membership.representative, self._head_dim)
            store.narrow["key"] = Narrow.of(self.module.k_proj, store.kept_heads, self._head_dim)
        query = self._turned(self._scaled(store.narrow["query"](hidden)), turn)
        key = self._turned(store.narrow["key"](hidden), turn)
        if self.plan.share_value:
            if "value" not in store.narrow:
                store.narrow["value"] = Narrow.of(self.module.v_proj, store.kept_heads, self._head_dim)
            value = store.narrow["value"](hidden)
        else:
            value = self._every(self.module.v_proj, hidden)
        store.append(key, value, run.rows)
        return shared_attention(
            query, *store.with_room(), membership, run.rows, self._scaling,
            slot=store.slot, window=window, share_value=self.plan.share_value,
        )  # fmt: skip

    def _two_step(
        self,
        hidden: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        run: ForwardPass,
        store: RowLayer | None,
        window: Window | None,
    ) -> Tensor:
        module, probe, rows = self.module, self.plan.probe_tokens, run.rows
        early_hidden, late_hidden = hidden[:, :probe], hidden[:, probe:]
        early_turn = late_turn = None
        if turn is not None:
            early_turn = (turn[0][:, :probe], turn[1][:, :probe])
            late_turn = (turn[0][:, probe:], turn[1][:, probe:])
        key_heads = module.k_proj.out_features // self._head_dim
        if probe:
            early_query = self._turned(self._scaled(self._every(module.q_proj, early_hidden)), early_turn)
            early_key = self._turned(self._every(module.k_proj, early_hidden), early_turn)
            membership = self.plan.membership_of(early_query, early_key, self._scaling)
        else:
            membership = self.plan.known(rows.count, hidden.device)
        heads = membership.cluster.shape[1]
        kept, slot = distinct(membership.representative // (heads // key_heads), key_heads)
        query = Narrow.of(module.q_proj, membership.representative, self._head_dim, own=True)(late_hidden)
        query = self._turned(self._scaled(query), late_turn)
        key = self._turned(Narrow.of(module.k_proj, kept, self._head_dim, own=True)(late_hidden), late_turn)
        row = torch.arange(rows.count, device=hidden.device)[:, None]
        if self.plan.share_value:
            early_value = self._every(module.v_proj, early_hidden)
            late_value = Narrow.of(module.v_proj, kept, self._head_dim, own=True)(late_hidden)
            value = torch.cat((early_value[row, kept], late_value), 2)
        else:
            value = self._every(module.v_proj, hidden)
            early_value = value[:, :, :probe]
        if probe:
            key = torch.cat((early_key[row, kept], key), 2)
        out = shared_attention(
            query, key, value, membership, rows, self._scaling,
            slot=slot, first=probe, window=window, share_value=self.plan.share_value,
        )  # fmt: skip
        if probe:
            early = exact_attention(early_query, early_key, early_value, self._scaling)
            out = torch.cat((early, out), 2)
        if store is not None:
            store.append(key, value, rows)
            store.membership, store.slot, store.kept_heads = membership, slot, kept
        return out

    @property
    def _head_dim(self) -> int:
        return int(self.module.head_dim)

    @property
    def _scaling(self) -> float:
        return 1.0 if self.family.scaled_query else float(self.module.scaling)

    def _scaled(self, query: Tensor) -> Tensor:
        return query * self.module.scaling if self.family.scaled_query else query

    def _every(self, projection: nn.Linear, hidden: Tensor) -> Tensor:
        """All heads of a projection: `[rows, length, hidden_size]` to `[rows, heads, length, head_dim]`."""
        return projection(hidden).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)

    def _turned(self, states: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """Turn queries or keys `[rows, heads, length, head_dim]` by their positions, as the model's own code does."""
        if turn is None:
            return states
        rotate = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        return rotate(states, states[:, :0], *turn)[0]
