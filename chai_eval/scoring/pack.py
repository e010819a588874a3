"""Lay scoring requests out in rows: choices that share a context share its tokens, and nothing is padding.

Pure: token lists in, rows and batches out. The order and the batches depend on the requests and the budget alone, so
that a run that was interrupted meets the very batches, and numbers, of one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import Tensor

from chai_eval.attention import Rows
from chai_eval.errors import RunError

Tokens = tuple[int, ...]

# A row's attention grows with the square of its length, so branches share a context only where that saves tokens worth
# mentioning (the context is at least an eighth of the branch), and a row holds at most as much as four whole requests.
LEAST_SHARE, MOST_REQUESTS = 1 / 8, 4


@dataclass(frozen=True)
class ScoringRequest:
    """A continuation to be scored after a context, in tokens."""

    context: Tokens
    continuation: Tokens

    @property
    def fed(self) -> Tokens:
        """The tokens that a model must see: all but the last."""
        return self.context + self.continuation[:-1]

    def truncated(self, max_length: int) -> ScoringRequest:
        """Drop tokens from the left until all but the last fit, as lm-eval does; RunError for a longer continuation."""
        if len(self.continuation) > max_length:
            raise RunError(
                f"task: a continuation of {len(self.continuation)} tokens is to be scored; allowed: up to the model's "
                f"{max_length} positions"
            )
        excess = len(self.context) + len(self.continuation) - (max_length + 1)
        return self if excess <= 0 else ScoringRequest(self.context[excess:], self.continuation)


@dataclass(frozen=True)
class Document:
    """One row: tokens that several requests begin with (`context`), and how each goes on (`branches`).

    A continuation's last token is never fed, only predicted. Of each request there are its number; that of its branch,
    or None where the context is all that is fed; and how many tokens at the end of both are followed by one to score.
    """

    context: Tokens
    branches: tuple[Tokens, ...]
    requests: tuple[tuple[int, int | None, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens that the model computes."""
        return len(self.context) + sum(map(len, self.branches))

    @property
    def longest(self) -> int:
        """Tokens of its longest request."""
        return len(self.context) + max(map(len, self.branches), default=0)


@dataclass(frozen=True)
class Batch:
    """Documents for one forward pass of shape `[1, tokens]`."""

    documents: tuple[Document, ...]

    @property
    def requests(self) -> list[int]:
        """Numbers of the requests that the pass scores."""
        return [request for document in self.documents for request, _, _ in document.requests]

    @property
    def tokens(self) -> int:
        """Tokens that the model computes."""
        return sum(document.tokens for document in self.documents)


@dataclass(frozen=True)
class PackedInput:
    """What goes into the model for a batch, tokens `[1, tokens]` in rows, and where its scores come out.

    `keep`, `[kept]`, are the positions whose logits are needed, ascending; `source`, `[scored]`, says for every scored
    token which of these predicts it. `target`, `[scored]`, are the tokens to score, request after request in the order
    of `Batch.requests`, so many of each (`counts`).
    """

    tokens: Tensor
    rows: Rows
    keep: Tensor
    source: Tensor
    target: Tensor
    counts: list[int]


def documents(
    requests: Sequence[ScoringRequest],
    shared_context: int,
    batch_tokens: int | None = None,
    alike: Callable[[int], Hashable] = lambda length: None,
) -> list[Document]:
    """Group requests by context into rows, in the order in which contexts first occur.

    Choices often begin alike as well; what all of them share is part of the row's context too. A start shorter than
    `shared_context` is not shared: what a method looks at first then differs from choice to choice. No row is made
    larger than `batch_tokens` by sharing. Each request has at least one token in context and continuation.
    """
    by_context: dict[tuple[Tokens, Hashable], list[int]] = {}
    for number, request in enumerate(requests):
        by_context.setdefault((request.context, alike(len(request.fed))), []).append(number)
    rows: list[Document] = []
    for numbers in by_context.values():
        by_fed: dict[Tokens, list[int]] = {}
        for number in numbers:
            by_fed.setdefault(requests[number].fed, []).append(number)
        shared = tuple(commonprefix(list(by_fed)))  # noqa: RUF071 - of tokens, no path's characters
        together, alone = _sharing(list(by_fed), shared, shared_context, batch_tokens)
        rows.extend(_document(shared, {fed: by_fed[fed] for fed in row}, requests) for row in together)
        rows.extend(_document(fed, {fed: by_fed[fed]}, requests) for fed in alone)
    return rows


def _sharing(
    texts: list[Tokens], shared: Tokens, shared_context: int, batch_tokens: int | None
) -> tuple[list[list[Tokens]], list[Tokens]]:
    """Which texts go into a row together, and which into rows of their own."""
    if len(texts) == 1 or len(shared) < shared_context:
        return [], texts
    longest = max(map(len, texts))
    most = max(longest, min(MOST_REQUESTS * longest, batch_tokens or MOST_REQUESTS * longest))
    together: list[list[Tokens]] = []
    alone = []
    used = 0
    for text in texts:
        branch = len(text) - len(shared)
        if len(shared) < LEAST_SHARE * branch:
            alone.append(text)
            continue
        if not together or used + branch > most:
            together.append([])
            used = len(shared)
        together[-1].append(text)
        used += branch
    return together, alone


def _document(context: Tokens, by_fed: dict[Tokens, list[int]], requests: Sequence[ScoringRequest]) -> Document:
    branches: list[Tokens] = []
    placed: list[tuple[int, int | None, int]] = []
    for fed, numbers in by_fed.items():
        branch = len(branches) if len(fed) > len(context) else None
        if branch is not None:
            branches.append(fed[len(context) :])
        placed.extend((number, branch, len(requests[number].continuation)) for number in numbers)
    return Document(context, tuple(branches), tuple(placed))


def batches(
    rows: Sequence[Document], batch_tokens: int, alike: Callable[[int], Hashable] = lambda length: None
) -> list[Batch]:
    """Fill passes with documents of similar length, longest first, up to `batch_tokens`; a longer one has its own.

    Requests never share a pass where `alike`, of their lengths in tokens, differs (see `RotaryLengths.alike`).
    """
    together: dict[Hashable, list[Document]] = {}
    # Sorting by tokens as well makes the layout independent of the order in which requests came.
    for row in sorted(rows, key=lambda row: (-row.tokens, row.context, row.branches)):
        together.setdefault(alike(row.longest), []).append(row)
    filled: list[list[Document]] = []
    for group in together.values():
        used = batch_tokens  # a group begins with a pass of its own
        for row in group:
            if used + row.tokens > batch_tokens:
                filled.append([])
                used = 0
            filled[-1].append(row)
            used += row.tokens
    return [Batch(tuple(each)) for each in filled]


def packed_input(batch: Batch, requests: Sequence[ScoringRequest]) -> PackedInput:
    """Tokens, rows and scored positions of a batch."""
    line: list[int] = []
    predicted_by: list[int] = []
    scored = [(requests[number], count) for document in batch.documents for number, _, count in document.requests]
    for document in batch.documents:
        context = range(len(line), len(line) + len(document.context))
        line.extend(document.context)
        branches = []
        for fed in document.branches:
            branches.append(range(len(line), len(line) + len(fed)))
            line.extend(fed)
        for _, branch, count in document.requests:
            path = [*context, *(branches[branch] if branch is not None else ())]
            predicted_by.extend(path[len(path) - count :])
    keep, source = torch.unique(torch.tensor(predicted_by), return_inverse=True)
    rows = Rows.packed(
        [len(document.context) for document in batch.documents],
        [[len(branch) for branch in document.branches] for document in batch.documents],
    )
    target = torch.tensor([token for request, _ in scored for token in request.continuation])
    return PackedInput(torch.tensor([line]), rows, keep, source, target, [count for _, count in scored])
