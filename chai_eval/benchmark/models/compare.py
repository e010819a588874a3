"""What a model says under a method that changes nothing, beside what the stock model says of each text alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import Plan
from chai_eval.attention.passes import cache_in
from chai_eval.attention.shape import attention_shape
from chai_eval.benchmark.models.build import HEADS, LAYERS, VOCABULARY
from chai_eval.methods import Method, build_method
from chai_eval.methods.chai import CHAI
from chai_eval.scoring.pack import ScoringRequest, batches, documents, packed_input

# Texts, in tokens, all longer than a window. Padded to 130 on the left, the second has not begun in the first chunk
# that goes into a cache, nor in the second; in the third it has fewer tokens than CHAI looks at first.
LENGTHS = (130, 37, 90)
CHUNKS = (60, 25, 12, 1, 1, 31)
PROMPTS, NEW_TOKENS = (50, 9), 8
# Tokens of a context that requests must share to be branches of one row: those that CHAI looks at first.
SHARED_CONTEXT = 5


class EveryHead(CHAI):
    """CHAI with every head its own cluster, by way of all that clustering does (counts of all heads would skip it)."""

    def plans(self, model: PreTrainedModel) -> dict[int, Plan]:
        super().plans(model)
        shape = attention_shape(model)
        return {layer: self._plan(shape.heads) for layer in range(shape.layers)}


def _every_head(model: PreTrainedModel) -> Method:
    config = model.config.get_text_config(decoder=True)
    heads, layers = getattr(config, "num_attention_heads", HEADS), getattr(config, "num_hidden_layers", LAYERS)
    return EveryHead(clusters=[heads] * layers)


# Methods at settings that change nothing. So small a sparsity drops nothing, but chooses as any other does.
METHODS: dict[str, Callable[[PreTrainedModel], Method]] = {
    "mha": lambda model: build_method("mha"),
    "chai": _every_head,
    "spatten": lambda model: build_method("spatten", token_sparsity=1e-12, head_sparsity=1e-12, spare_layers=1),
    "dejavu": lambda model: build_method("dejavu", sparsity=0.0),
}


@dataclass(frozen=True)
class Reference:
    """What the stock model says, each text run alone, without padding and without a cache.

    Log-probabilities `[tokens, vocabulary]` of what follows each token of each text, of the tokens of each request's
    continuation, and of what follows each prompt and its most likely continuations.
    """

    texts: list[Tensor]
    by_token: list[Tensor]
    requests: list[ScoringRequest]
    scored: list[Tensor]
    prompts: list[Tensor]
    continued: list[Tensor]


@torch.no_grad()
def reference(model: PreTrainedModel) -> Reference:
    """Ask the stock model."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in LENGTHS]
    first, second, third = (tuple(text.tolist()) for text in texts)
    requests = [
        # A context that is longer than a window, and branches of which one is, too.
        ScoringRequest(first[:70], first[70:]),
        ScoringRequest(first[:70], second[:11]),
        ScoringRequest(first[:70], third[:29]),
        ScoringRequest(second[:9], second[9:]),
        ScoringRequest(second[:9], third[60:]),
        ScoringRequest(third[:8], third[8:]),
    ]
    scored = [_alone(model, torch.tensor(each.fed))[len(each.context) - 1 :] for each in requests]
    prompts = [text[:length] for text, length in zip(texts, PROMPTS, strict=False)]
    continued = []
    for text in prompts:
        for _ in range(NEW_TOKENS):
            last = _alone(model, text)
            text = torch.cat((text, last[-1].argmax()[None]))
        continued.append(last[-NEW_TOKENS:])
    return Reference(texts, [_alone(model, text) for text in texts], requests, scored, prompts, continued)


@dataclass(frozen=True)
class Mode:
    """One way to run texts through a model, and what should come out."""

    name: str
    run: Callable[[PreTrainedModel, Reference], list[Tensor]]
    expected: Callable[[Reference], list[Tensor]]
    off: Callable[[Tensor, Tensor], float]
    stock: bool = True  # the stock model can run so, too


def largest(mode: Mode, found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of what came out from what should have, over all texts."""
    return max(map(mode.off, found, expected))


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of log-probabilities, relative to those below -1; infinite where any is no number."""
    off = (found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    off = off.masked_fill(found == expected, 0.0)  # minus infinity on both sides
    return float("inf") if bool(off.isnan().any()) else float(off.max())


def less_likely(found: Tensor, continued: Tensor) -> float:
    """How much less likely, in nats, the first generated token that isn't the stock model's own is than that one."""
    best = continued.argmax(-1)
    for token, own, log_probabilities in zip(found, best, continued, strict=True):
        if token != own:
            return float(log_probabilities[own] - log_probabilities[token])
    return 0.0


def _logits(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **kwargs).logits


def _alone(model: PreTrainedModel, text: Tensor) -> Tensor:
    return _logits(model, text[None])[0].log_softmax(-1)


def padded(texts: Sequence[Tensor], side: str = "left") -> tuple[Tensor, Tensor]:
    """A batch of texts and its attention mask."""
    width = max(map(len, texts))
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        where = slice(width - len(text), width) if side == "left" else slice(0, len(text))
        ids[row, where], mask[row, where] = text, 1
    return ids, mask


def _positions(model: PreTrainedModel, mask: Tensor) -> dict[str, Tensor]:
    """Positions of left-padded texts, as `generate` gives them, where the model takes any."""
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if takes else {}


def _by_row(logits: Tensor, mask: Tensor) -> list[Tensor]:
    return [row[real.bool()].log_softmax(-1) for row, real in zip(logits, mask, strict=True)]


def _plain(model: PreTrainedModel, asked: Reference) -> list[Tensor]:
    return [_alone(model, text) for text in asked.texts]


def _padded_left(model: PreTrainedModel, asked: Reference) -> list[Tensor]:
    ids, mask = padded(asked.texts)
    return _by_row(_logits(model, ids, attention_mask=mask, **_positions(model, mask)), mask)


def _padded_right(model: PreTrainedModel, asked: Reference) -> list[Tensor]:
    ids, mask = padded(asked.texts, "right")
    return _by_row(_logits(model, ids, attention_mask=mask), mask)


def _packed(model: PreTrainedModel, asked: Reference) -> list[Tensor]:
    """As the product scores: requests in one line, those that share a context as branches of one row."""
    (batch,) = batches(documents(asked.requests, SHARED_CONTEXT), 10_000)
    line = packed_input(batch, asked.requests)
    found = _logits(model, line.tokens, rows=line.rows)[0, line.keep][line.source].log_softmax(-1)
    by_request = dict(zip(batch.requests, found.split(line.counts), strict=True))
    return [by_request[number] for number in range(len(asked.requests))]


def _cached(chunks: Sequence[int]) -> Callable[[PreTrainedModel, Reference], list[Tensor]]:
    """All texts in one left-padded batch, so many columns at a time through a cache."""

    def run(model: PreTrainedModel, asked: Reference) -> list[Tensor]:
        ids, mask = padded(asked.texts)
        positions = _positions(model, mask)
        cache: dict[str, Any] = {}
        logits, start = [], 0
        for stop in accumulate(chunks):
            part = {name: each[:, start:stop] for name, each in positions.items()}
            out = model(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **part, **cache)
            cache = cache_in(out)
            logits.append(out.logits)
            start = stop
        return _by_row(torch.cat(logits, 1), mask)

    return run


def _generated(model: PreTrainedModel, asked: Reference) -> list[Tensor]:
    ids, mask = padded(asked.prompts)
    asked_for = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generate: Any = model.generate
    return list(generate(input_ids=ids, attention_mask=mask, **asked_for)[:, ids.shape[1] :])


ALONE = Mode("alone", _plain, attrgetter("by_token"), difference)
MODES = (
    ALONE,
    Mode("padded left", _padded_left, attrgetter("by_token"), difference),
    Mode("padded right", _padded_right, attrgetter("by_token"), difference),
    Mode("packed", _packed, attrgetter("scored"), difference, stock=False),
    Mode("cached, in chunks", _cached(CHUNKS), attrgetter("by_token"), difference),
    Mode("cached, token by token", _cached((110, *[1] * 20)), attrgetter("by_token"), difference),
    Mode("generated", _generated, attrgetter("continued"), less_likely),
)
