"""Whether our multi-head attention, put into a model, gives the model's own logits: asked before anything is scored.

Asked in every way in which attention is computed: padded, packed, through a cache, as `generate` calls it; on a text
longer than every window of the config, so that a window that gets lost is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.inject import take_over
from chai_eval.attention.layer import full_attention, stored
from chai_eval.attention.logits import keeping, logits_at
from chai_eval.attention.masks import UnsupportedModel, Window
from chai_eval.attention.passes import AttentionCall, Takeover, cache_in
from chai_eval.attention.rope import rotary_lengths
from chai_eval.attention.rows import Rows
from chai_eval.attention.shape import attention_layers, attention_shape
from chai_eval.attention.shards import shard

# How far our logits may lie from the model's, relative to the largest, before we say that its attention is another.
# Rounding alone stays an order of magnitude below.
TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.05}

# Tokens of the text, where no window asks for more; tokens beyond the widest window; tokens of the branches.
LEAST_TOKENS, BEYOND, BRANCH = 24, 12, 3
# Tokens that are decoded after the rest went into the cache, all but the last in one pass.
DECODED = 6
# Last tokens whose logits are compared: for a text of thousands of tokens all of them would take gigabytes.
COMPARED = 512


def own_scores(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every head by its own scores, as an `Attend`."""
    return full_attention(query, *stored(call.store, key, value, call.rows), call.view)


@torch.no_grad()
def check_agreement(model: PreTrainedModel) -> dict[int, Window | None]:
    """Compare our multi-head attention with a model's own; return how far back each layer looks, by its number.

    Raises UnsupportedModel where logits differ, or the attention can't be taken over.
    """
    attention_layers(model)
    kind, texts = model.config.model_type, _Texts.of(model)
    with _reason(kind, "can't be run by itself"):
        stock = [texts.padded(model), texts.cached(model), texts.alone(model)]
    with _reason(kind, "can't be taken over"), take_over(model, own_scores) as handle:
        ours = [texts.padded(model), texts.cached(model), texts.packed(model)]
    _check_shapes(model, handle)
    for way, found, expected in zip(("", " through a cache", " in packed rows"), ours, stock, strict=True):
        if _differ(found, expected):
            raise UnsupportedModel(
                f"model: attention of {kind} is more than softmax(QK)V (our own gives other logits{way}), so it can't "
                "be taken over; allowed: models of softmax attention alone"
            )
    return handle.windows


def longest_window(config: Any) -> int:
    """The widest window or chunk of a config that a text within its positions can reach beyond; 0 without any.

    Whatever is named so counts, whether the model uses it or not.
    """
    most = getattr(config, "max_position_embeddings", None) or torch.iinfo(torch.int64).max
    values = {name: value for name, value in config.to_dict().items() if "window" in name or "chunk" in name}
    named = [value for name, value in values.items() if name not in ("max_window_layers", "chunk_size_feed_forward")]
    widths = [width for value in named for width in (value if isinstance(value, list) else [value])]
    return max((width for width in widths if type(width) is int and 0 < width < most), default=0)


@dataclass(frozen=True)
class _Texts:
    """Tokens of a long text `[long]`, and of a short one `[short]` that goes on in two ways, `[2, branch]`; int64."""

    long: Tensor
    short: Tensor
    branches: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Texts:
        config = model.config.get_text_config()
        length = max(LEAST_TOKENS, longest_window(config) + BEYOND)
        positions = getattr(config, "max_position_embeddings", None) or length
        length = max(min(length, positions), DECODED + 2)
        generator = torch.Generator().manual_seed(0)
        embeddings: Any = model.get_input_embeddings()
        vocabulary = min(config.vocab_size, embeddings.weight.shape[0])
        first = min(3, vocabulary - 1)  # not the special tokens that stand first in most vocabularies

        def draw(*shape: int) -> Tensor:
            return torch.randint(first, vocabulary, shape, generator=generator).to(model.device)

        return cls(draw(length), draw(max(length // 3, 2)), draw(2, BRANCH))

    def padded(self, model: PreTrainedModel) -> Tensor:
        """Logits of the last tokens of a batch of both, padded on the left: `[tokens, vocabulary]`, real ones only."""
        ids, mask = self._batch()
        logits = _logits(model, COMPARED, input_ids=ids, attention_mask=mask, use_cache=False)
        return logits[mask[:, -logits.shape[1] :].bool()]

    def cached(self, model: PreTrainedModel) -> Tensor:
        """The same of the last tokens, which meet the others in a cache."""
        ids, mask = self._batch()
        rotary_lengths(model).forget()
        cache: dict[str, Any] = {}
        found, start = [], 0
        for stop in (ids.shape[1] - DECODED, ids.shape[1] - 1, ids.shape[1]):
            given = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop], "use_cache": True}
            out = model(**given, **cache, **keeping(model, 1))  # as `generate` asks
            cache, start = cache_in(out), stop
            found.append(out.logits[:, -1])
        return torch.cat(found)

    def alone(self, model: PreTrainedModel) -> Tensor:
        """Logits of the last tokens of the long text, then of the short one's with either end, each without padding."""
        both = torch.cat((self.short.expand(2, -1), self.branches), 1)
        long = _logits(model, COMPARED, input_ids=self.long[None], use_cache=False)[0]
        short = _logits(model, BRANCH, input_ids=both, use_cache=False)
        return torch.cat((long, short[:, -BRANCH:].flatten(0, 1)))

    def packed(self, model: PreTrainedModel) -> Tensor:
        """The same from packed rows, the short text computed once for both of its ends."""
        device, short = self.long.device, torch.cat((self.short, self.branches.flatten()))
        if rotary_lengths(model):  # what the long text needs isn't for the short one
            rows = [Rows.packed([len(self.long)], [[]]), Rows.packed([len(self.short)], [[BRANCH] * 2])]
            texts = [self.long, short]
        else:
            rows = [Rows.packed([len(self.long), len(self.short)], [[], [BRANCH] * 2])]
            texts = [torch.cat((self.long, short))]
        ends = torch.arange(2 * BRANCH, device=device) - 2 * BRANCH  # counted from the last token
        last = torch.arange(-min(len(self.long), COMPARED), 0, device=device)
        wanted = [torch.cat((last - len(short), ends))] if len(texts) == 1 else [last, ends]
        found = [
            logits_at(model, at + len(text), input_ids=text[None], rows=row.to(device))
            for row, text, at in zip(rows, texts, wanted, strict=True)
        ]
        return torch.cat(found)

    def _batch(self) -> tuple[Tensor, Tensor]:
        missing = len(self.long) - len(self.short)
        ids = torch.stack((self.long, torch.nn.functional.pad(self.short, (missing, 0), value=int(self.short[0]))))
        mask = torch.ones_like(ids)
        mask[1, :missing] = 0
        return ids, mask


def _logits(model: PreTrainedModel, last: int, **given: Any) -> Tensor:
    """Logits of the last tokens `[batch, tokens, vocabulary]`, of a model that forgot the passes before."""
    rotary_lengths(model).forget()
    logits: Tensor = model(**given, **keeping(model, last)).logits
    return logits[:, -last:]


def _check_shapes(model: PreTrainedModel, handle: Takeover) -> None:
    """Refuse layers that differ in their heads, from the config or from each other."""
    kind, expected = model.config.model_type, attention_shape(model).heads // shard(model).size
    first = handle.shapes[0]
    for layer, shape in sorted(handle.shapes.items()):
        if shape != first:
            raise UnsupportedModel(
                f"model: heads of {kind} differ from layer to layer ({shape} in layer {layer}, {first} in layer 0); "
                "allowed: models whose layers are alike"
            )
    if first.heads != expected or first.heads % first.kv_heads:
        raise UnsupportedModel(
            f"model: {kind} attends with {first}, its config says {expected} heads; allowed: models that "
            "attend with the heads of their config"
        )


def _differ(ours: Tensor, stock: Tensor) -> bool:
    """Whether logits are others; minus infinity (a padded vocabulary) must stand in the same places."""
    if stock.isnan().any() or (stock == torch.inf).any():
        return False  # said where scores are checked, with the layer in which it begins
    finite = stock.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        return True
    limit = TOLERANCE.get(stock.dtype, 0.1) * stock[finite].abs().max()
    return bool((ours[finite] - stock[finite]).abs().max() > limit)


@contextmanager
def _reason(kind: str, what: str) -> Iterator[None]:
    """Turn whatever a model's own code raises into one line."""
    try:
        yield
    except (UnsupportedModel, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise UnsupportedModel(
            f"model: {kind} {what} ({type(error).__name__}: {text}); allowed: models whose attention goes through "
            "transformers' AttentionInterface"
        ) from error
