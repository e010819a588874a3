"""SnapKV: tokens that the latest queries look past are dropped from the cache (Li et al., 2024, arXiv 2404.14469)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import max_pool1d, pad
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks, Rows, Source, UnsupportedModel, View
from chai_eval.attention.masks import Window
from chai_eval.attention.probe import repeat_heads
from chai_eval.attention.row_layer import RowLayer
from chai_eval.attention.shape import attention_shape
from chai_eval.attention.unfolded import Unfolded
from chai_eval.errors import SettingError
from chai_eval.methods.base import LayerFootprint, Method, Positive, Share
from chai_eval.methods.keep import highest, kept_count, kept_counts
from chai_eval.schema import SETTINGS

# What is remembered of each row: tokens so far, and votes for its cached ones since tokens were last dropped.
TOKENS, VOTES = "snapkv_tokens", "snapkv_votes"


@dataclass(frozen=True, config=SETTINGS)
class SnapKV(Method):
    """Every so many tokens the last of them vote on which earlier ones each key head keeps.

    Whenever a request has a multiple of `every` tokens, n, the last `window` of them vote: each earlier token that a
    key head still holds gets the probabilities that their queries gave it, averaged over the query heads of the key
    head. Votes are smoothed by a max-pool over `kernel` neighbours among the tokens that are held. The
    ⌈keep (n − window)⌉ with the most votes stay (the first among ties), and the window; what goes is never read again.
    The paper does so once, at the end of a prompt; done by position, a text is scored alike however it is fed.

    Approximates: the scores of dropped tokens are minus infinity. Saves their keys and values: the cache, and the
    reading of it. Layers that look back through a window are refused.

    Parameters
    ----------
    keep : float
        Share of the earlier tokens that stay.
    every : int
        Tokens after which some are dropped.
    window : int
        Tokens that vote, which stay themselves.
    kernel : int
        Width of the max-pool.
    """

    keep: Share = 0.5
    every: Positive = 64
    window: Positive = 16
    kernel: Positive = 5

    name: ClassVar[str] = "snapkv"

    def __post_init__(self) -> None:
        if self.window >= self.every:
            raise SettingError(
                f"method.window: {self.window} given with every={self.every}; allowed: 1 to {self.every - 1}"
            )
        if self.kernel % 2 == 0:
            raise SettingError(f"method.kernel: {self.kernel} given; allowed: odd numbers")

    @classmethod
    def at_savings(
        cls, model: PreTrainedModel, calibrated: str, savings: Sequence[float], context: int
    ) -> Sequence[Method]:
        return [cls(keep=1 - saving) for saving in savings]

    def hooks(self, model: PreTrainedModel) -> Hooks:
        return _Dropping(self)

    def held(self, tokens: int) -> int:
        """How many tokens of a request of so many are cached."""
        whole = tokens - tokens % self.every
        return tokens if whole == 0 else kept_count(whole - self.window, 1 - self.keep) + self.window + tokens - whole

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint]:
        shape = attention_shape(model)
        return [LayerFootprint(shape.heads, shape.heads, shape.kv_heads, shape.kv_heads, held=self.held)] * shape.layers


class _Dropping(Hooks):
    """Attention stretch by stretch, each of which ends where some request drops tokens (`SnapKV`)."""

    drops_tokens = True

    def __init__(self, settings: SnapKV) -> None:
        super().__init__()
        self.settings = settings

    def check_window(self, layer: int, window: Window | None) -> None:
        if window is not None:
            raise UnsupportedModel(
                f"model: layer {layer} looks back through a window, and snapkv drops tokens by what it sees; allowed: "
                "models without"
            )

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        self.check_window(call.index, call.view.window)
        query, key, value, rows = source.query(), source.key(), source.value(), call.rows
        scaling, store = call.view.scaling, RowLayer() if call.store is None else call.store
        if rows.branch is None:
            return self._attend(query, key, value, rows, scaling, store)
        alone = Unfolded.of(rows)
        query, key, value = alone.unfold(query), alone.unfold(key), alone.unfold(value)
        return alone.fold(self._attend(query, key, value, alone.rows, scaling, store), rows.length)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scaling: float, store: RowLayer) -> Tensor:
        """Attention of a pass whose rows have no branches, `[rows, heads, length, head_dim]`."""
        if TOKENS not in store.state:
            store.state[TOKENS] = torch.zeros_like(rows.lengths)
        ends, out = self._ends(store.state[TOKENS], rows), []
        stops = sorted(ends | {rows.length})
        for start, stop in zip([0, *stops], stops, strict=False):
            lengths = (rows.lengths - start).clamp(0, stop - start)
            count = stop - start
            part = Rows(None, None, lengths, None, None, rows.count, count, count, aligned=rows.aligned)
            if store.lengths is not None:
                part = part.after(store.lengths, store.width, store.aligned)
            of_part = slice(start, stop)
            out.append(
                self._stretch(
                    query[:, :, of_part], key[:, :, of_part], value[:, :, of_part], View(part, scaling), store
                )
            )
            if stop in ends:
                self._drop(store, lengths > 0)
        if ends:  # room was made after the first of them, which a long pass may not have filled
            store.trim()
        return torch.cat(out, dim=2)

    def _ends(self, before: Tensor, rows: Rows) -> set[int]:
        """After how many tokens of the pass some row drops tokens."""
        every, found = self.settings.every, set[int]()
        for had, new in {*zip(before.tolist(), rows.lengths.tolist(), strict=True)}:
            found.update(range(every - had % every, new + 1, every))
        return found

    def _stretch(self, query: Tensor, key: Tensor, value: Tensor, view: View, store: RowLayer) -> Tensor:
        """Attention of tokens among which none are dropped; the store learns of them and of their votes."""
        heads, length, rows, settings = query.shape[1], query.shape[2], view.rows, self.settings
        key, value = store.append(key, value, rows)
        scores = torch.matmul(query, repeat_heads(key, heads).transpose(-1, -2)) * view.scaling
        probabilities = scores.masked_fill(~view.whole_mask(), float("-inf")).softmax(-1, dtype=torch.float32)
        new, tokens = torch.arange(length, device=query.device), store.state[TOKENS]
        voting = ((tokens[:, None] + new) % settings.every >= settings.every - settings.window) & (
            new < rows.lengths[:, None]
        )
        before = store.state.get(VOTES)
        if before is not None or bool(voting.any()):
            of_key_heads = probabilities.unflatten(1, (key.shape[1], -1)).mean(2)  # [rows, kv_heads, length, keys]
            votes = (of_key_heads * voting[:, None, :, None]).sum(2)
            store.state[VOTES] = votes if before is None else votes + pad(before, (0, votes.shape[2] - before.shape[2]))
        store.state[TOKENS] = tokens + rows.lengths
        return torch.matmul(probabilities.to(value.dtype), repeat_heads(value, heads))

    def _drop(self, store: RowLayer, moved: Tensor) -> None:
        """Drop tokens of the rows that have a multiple of `every`, of those that have `moved`, `[rows]`, bool."""
        settings, tokens, votes = self.settings, store.state[TOKENS], store.state[VOTES]
        assert store.lengths is not None
        drops = moved & (tokens % settings.every == 0)
        column, held = torch.arange(votes.shape[2], device=votes.device), store.lengths[:, None, None]
        earlier = column < held - settings.window
        pooled = max_pool1d(votes.masked_fill(~earlier, 0), settings.kernel, stride=1, padding=settings.kernel // 2)
        count = kept_counts(tokens - settings.window, 1 - settings.keep).clamp(min=1)
        # Of rows that drop nothing now there may be more to keep than there is.
        count = torch.where(drops, count, 1)[:, None].expand(votes.shape[:2])
        stay = (highest(pooled.masked_fill(~earlier, -1.0), count) & earlier) | ~(earlier & drops[:, None, None])
        stay = stay & (column < held)
        lengths = stay[:, 0].sum(-1)
        order = (~stay).to(torch.uint8).argsort(dim=-1, stable=True)[..., : int(lengths.max())]
        store.select(order, lengths)
        left = votes.gather(2, order) * ~drops[:, None, None]
        if bool(left.any()):
            store.state[VOTES] = left
        else:
            del store.state[VOTES]
