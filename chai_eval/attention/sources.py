"""Where a layer's queries, keys and values come from: computed by the model, or projected head by head as asked.

At a few thousand tokens the projections of a large model outweigh the products of queries and keys several times over,
so projecting representatives only is where time is. It takes an attention module whose projections are known here;
everything else goes the general way, with the states that the module computed itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from chai_eval.attention.shards import own_part
from chai_eval.attention.sharing import heads_of

EVERY_COLUMN = slice(None)


@dataclass(frozen=True)
class Computed:
    """States that the model's attention module computed: `[rows, heads or kv_heads, length, head_dim]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @property
    def kv_heads(self) -> int:
        """Key and value heads of the layer."""
        return self.keys.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the states are."""
        return self.keys.device

    def query(self, heads: Tensor | None = None, columns: slice = EVERY_COLUMN) -> Tensor:
        """Queries, scaled where the model scales them before the product; after a rotary embedding, as keys are."""
        return heads_of(self.queries[:, :, columns], heads)

    def key(self, heads: Tensor | None = None, columns: slice = EVERY_COLUMN) -> Tensor:
        return heads_of(self.keys[:, :, columns], heads)

    def value(self, heads: Tensor | None = None, columns: slice = EVERY_COLUMN) -> Tensor:
        return heads_of(self.values[:, :, columns], heads)


@dataclass(frozen=True)
class ModuleKind:
    """How an attention module of a kind computes its states; `output` is the name of its output projection.

    A rotary embedding is of queries and keys; a `scaled_query` is scaled before the product, whose scaling is then 1.
    """

    output: str
    rotary: bool = True
    scaled_query: bool = False


KINDS = {
    "LlamaAttention": ModuleKind("o_proj"),
    "MistralAttention": ModuleKind("o_proj"),
    "Qwen2Attention": ModuleKind("o_proj"),
    "OPTAttention": ModuleKind("out_proj", rotary=False, scaled_query=True),
}


def module_kind(module: nn.Module) -> ModuleKind | None:
    """The kind of an attention module, or None where it computes its states itself.

    That is so for other architectures, and where projections are not plain `nn.Linear` (quantised, adapted) or the
    module is moved about by accelerate.
    """
    kind = KINDS.get(type(module).__name__)
    if kind is None or hasattr(module, "_hf_hook"):
        return None
    plain = all(type(getattr(module, name)) is nn.Linear for name in ("q_proj", "k_proj", "v_proj"))
    return kind if plain else None


@dataclass(frozen=True)
class Projected:
    """States that an attention module projects when they are asked for, of those that are asked for, as `Computed`.

    Attributes
    ----------
    hidden : Tensor [rows, length, hidden_size]
    rotary : pair of Tensor [rows, length, head_dim], or None
        Cosine and sine of the positions.
    projections : dict of str to HeadProjection, or None
        Of the heads that the cache keeps, gathered once for its rows; None where a pass gathers its own.
    """

    module: Any
    kind: ModuleKind
    hidden: Tensor
    rotary: tuple[Tensor, Tensor] | None
    projections: dict[str, HeadProjection] | None

    @property
    def kv_heads(self) -> int:
        return int(own_part(self.module.k_proj.weight).shape[0] // self.module.head_dim)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def query(self, heads: Tensor | None = None, columns: slice = EVERY_COLUMN) -> Tensor:
        query = self._project("q_proj", heads, columns)
        return self._rotated(query * self.module.scaling if self.kind.scaled_query else query, columns)

    def key(self, heads: Tensor | None = None, columns: slice = EVERY_COLUMN) -> Tensor:
        return self._rotated(self._project("k_proj", heads, columns), columns)

    def value(self, heads: Tensor | None = None, columns: slice = EVERY_COLUMN) -> Tensor:
        return self._project("v_proj", heads, columns)

    def _project(self, name: str, heads: Tensor | None, columns: slice) -> Tensor:
        projection, hidden = getattr(self.module, name), self.hidden[:, columns]
        if heads is None:
            return projection(hidden).unflatten(-1, (-1, self.module.head_dim)).transpose(1, 2)
        if self.projections is None:
            return HeadProjection.of(projection, heads, self.module.head_dim, each_row=True)(hidden)
        if name not in self.projections:
            self.projections[name] = HeadProjection.of(projection, heads, self.module.head_dim)
        return self.projections[name](hidden)

    def _rotated(self, states: Tensor, columns: slice) -> Tensor:
        """Rotary embedding of queries or keys, by the model's own code."""
        if self.rotary is None:
            return states
        cos, sin = (each[:, columns] for each in self.rotary)
        rotate = sys.modules[type(self.module).__module__].apply_rotary_pos_emb
        return rotate(states, states[:, :0], cos, sin)[0]


# Queries, keys and values of a pass, `[rows, heads, columns, head_dim]`, of some columns and of the heads that each row
# names, `[rows, taken]`, or of all.
Source = Computed | Projected


@dataclass(frozen=True)
class HeadProjection:
    """Some heads of a projection, other ones in every row.

    Attributes
    ----------
    weight : Tensor [taken * head_dim, hidden_size], or [rows, taken * head_dim, hidden_size]
        Of the heads that any row takes; or of each row's own.
    pick : Tensor [rows, taken], int64, or None
        Where each row finds its heads among those of `weight`; None where they are all its own.
    """

    weight: Tensor
    bias: Tensor | None
    pick: Tensor | None
    head_dim: int

    @classmethod
    def of(cls, projection: nn.Linear, heads: Tensor, head_dim: int, *, each_row: bool = False) -> HeadProjection:
        """Gather the weights of `heads`, `[rows, taken]`: of those that any row takes.

        With `each_row` those of each row beside each other, which is worth it for many tokens.
        """
        if heads.shape[0] == 1:
            taken, pick = heads[0], None
        elif each_row:
            taken, pick = heads, None
        else:
            taken, inverse = torch.unique(heads, return_inverse=True)
            pick = inverse.view_as(heads)
        weight = own_part(projection.weight).unflatten(0, (-1, head_dim))[taken]  # [..., taken, head_dim, hidden_size]
        bias = projection.bias
        bias = None if bias is None else own_part(bias).unflatten(0, (-1, head_dim))[taken].flatten(-2)
        return cls(weight.flatten(-3, -2), bias, pick, head_dim)

    def for_rows(self, change: Callable[[Tensor], Tensor]) -> HeadProjection:
        """The same for rows that were reordered, repeated or selected."""
        return self if self.pick is None else replace(self, pick=change(self.pick))

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[rows, length, hidden_size]` to `[rows, taken, length, head_dim]`."""
        if self.weight.ndim == 2:
            out = nn.functional.linear(hidden, self.weight, self.bias)
        else:
            out = torch.matmul(hidden, self.weight.transpose(-1, -2))
            out = out if self.bias is None else out + self.bias[:, None].to(out.dtype)
        return heads_of(out.unflatten(-1, (-1, self.head_dim)).transpose(1, 2), self.pick)
