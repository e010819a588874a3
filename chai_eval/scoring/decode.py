"""Score through the cache: the context at once, then its continuations token by token, as a server would run them.

What comes out is what packed rows give, up to rounding; what differs is the path: a method's prefill, what it keeps of
keys and values after it, and its attention of one new token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from chai_eval.attention.logits import keeping
from chai_eval.attention.passes import cache_in
from chai_eval.scoring.finite import check_finite
from chai_eval.scoring.lm import PackedLM
from chai_eval.scoring.pack import ScoringRequest, Tokens


@dataclass(frozen=True)
class Decoding:
    """Requests that are decoded together: contexts, each prefilled once, and what goes on from each.

    `continued` has, by context, the numbers of those requests, longest continuation first.
    """

    contexts: tuple[Tokens, ...]
    continued: tuple[tuple[int, ...], ...]

    @property
    def requests(self) -> list[int]:
        """Numbers of the requests that it scores."""
        return [number for numbers in self.continued for number in numbers]


def decodings(requests: Sequence[ScoringRequest], batch_tokens: int) -> list[Decoding]:
    """Plan which requests are decoded together: those of one context, and contexts of similar length, longest first.

    The plan depends on the requests and the budget alone: so many tokens are in the cache at most, rows times the
    longest of them; a longer request is decoded alone.
    """

    def length(numbers: Sequence[int]) -> int:
        return max(len(requests[number].fed) for number in numbers)

    def rows(numbers: Sequence[int]) -> int:
        # A continuation of one token is predicted by the context, and has no row of its own.
        return max(sum(len(requests[number].continuation) > 1 for number in numbers), 1)

    by_context: dict[Tokens, list[int]] = {}
    for number, request in enumerate(requests):
        by_context.setdefault(request.context, []).append(number)
    parts: list[tuple[int, ...]] = []
    for numbers in by_context.values():
        numbers.sort(key=lambda number: (-len(requests[number].continuation), requests[number].continuation))
        most = max(batch_tokens // length(numbers), 1)
        parts += [tuple(numbers[start : start + most]) for start in range(0, len(numbers), most)]
    parts.sort(
        key=lambda part: (-length(part), [(requests[each].context, requests[each].continuation) for each in part])
    )
    plan: list[list[tuple[int, ...]]] = []
    for part in parts:
        # The first of a batch is its longest.
        if not plan or (sum(map(rows, plan[-1])) + rows(part)) * length(plan[-1][0]) > batch_tokens:
            plan.append([])
        plan[-1].append(part)
    return [Decoding(tuple(requests[part[0]].context for part in each), tuple(each)) for each in plan]


class DecodedLM(PackedLM):
    """lm-eval's view of a model under a method, with continuations decoded on the cache that the method keeps.

    The cache is the method's `ClusteredCache`, or under plain attention the model's own.
    """

    def _plan(self, asked: Sequence[ScoringRequest]) -> Sequence[Decoding]:
        # Where rotary embeddings look at a whole pass, what a request needs isn't what its neighbours need.
        return decodings(asked, 1 if self._rotary else self.batch_tokens)

    @torch.inference_mode()
    def _score(self, batch: Decoding, asked: Sequence[ScoringRequest]) -> list[Any]:
        """Decode a batch: for each of its requests the log-likelihood and whether it is what greedy decoding gives."""
        self._rotary.forget()
        cached = _Cached(self.model, batch.contexts)
        scores: dict[int, list[Any]] = {number: [0.0, True] for number in batch.requests}
        going, at = batch.requests, 0
        row = [context for context, numbers in enumerate(batch.continued) for _ in numbers]  # of each that goes on
        while True:
            target = [asked[number].continuation[at] for number in going]
            for number, (chosen, best) in zip(going, cached.scored(row, target), strict=True):
                scores[number] = [scores[number][0] + chosen, scores[number][1] and best]
            left = [index for index, number in enumerate(going) if len(asked[number].continuation) > at + 1]
            if not left:
                return list(scores.values())
            cached.keep([row[index] for index in left])
            cached.step([target[index] for index in left])
            going, row, at = [going[index] for index in left], list(range(len(left))), at + 1


class _Cached:
    """Rows of a cache that grow by a token at a time, and the `log_probabilities` of each row's next token.

    They are `[rows, vocabulary]`, float32.
    """

    def __init__(self, model: PreTrainedModel, contexts: Sequence[Tokens]) -> None:
        """Prefill contexts, each in a row of its own, padded on the left as texts are that go on."""
        self._model = model
        self._cache: dict[str, Cache] = {}
        width = max(map(len, contexts))
        tokens = torch.tensor([[0] * (width - len(each)) + list(each) for each in contexts])
        real = [[0] * (width - len(each)) + [1] * len(each) for each in contexts]
        self._mask = torch.tensor(real, device=model.device)
        self._tokens = torch.empty(len(contexts), 0, dtype=torch.int64, device=model.device)  # all fed so far
        self.log_probabilities = self._fed(tokens.to(model.device))

    def keep(self, rows: list[int]) -> None:
        """Go on with some of the rows, one of them as often as it is named."""
        if rows != list(range(len(self._mask))):
            index = torch.tensor(rows, device=self._mask.device)
            self._mask, self._tokens = self._mask[index], self._tokens[index]
            for cache in self._cache.values():
                cache.batch_select_indices(index)

    def step(self, tokens: list[int]) -> None:
        """Feed every row its next token."""
        fed = torch.tensor(tokens, device=self._mask.device)[:, None]
        self._mask = torch.cat([self._mask, torch.ones_like(fed)], dim=1)
        self.log_probabilities = self._fed(fed)

    def scored(self, rows: list[int], target: list[int]) -> list[tuple[float, bool]]:
        """Log-likelihood of tokens that follow rows, and whether each is the most likely one."""
        of, token = (torch.tensor(each, device=self._mask.device) for each in (rows, target))
        best = self.log_probabilities.argmax(-1)[of] == token
        return list(zip(self.log_probabilities[of, token].tolist(), best.tolist(), strict=True))

    def _fed(self, tokens: Tensor) -> Tensor:
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        position = (self._mask.cumsum(1) - 1).clamp(min=0)
        whole = {"input_ids": self._tokens, "attention_mask": self._mask, "position_ids": position}
        new = {"input_ids": tokens, "position_ids": position[:, -tokens.shape[1] :]}
        out = self._model(**{**whole, **new}, use_cache=True, **keeping(self._model, 1), **self._cache)
        self._cache = cache_in(out)
        found = out.logits[:, -1].log_softmax(-1, dtype=torch.float32)  # as for packed rows
        check_finite(self._model, {**whole, "use_cache": False}, found.amax(-1))
        return found
