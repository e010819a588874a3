"""Lay scoring requests out in rows: choices that share a context share its tokens, and nothing is padding.

Pure: token lists in, rows and batches out. The order and the batches depend on the requests and the budget alone, so
that a run that was interrupted meets the very batches, and numbers, of one that was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chai_eval.attention import Rows

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class ScoringRequest:
    """A continuation to be scored after a context, in tokens."""

    context: Tokens
    continuation: Tokens

    def truncated(self, max_length: int) -> ScoringRequest:
        """Drop tokens from the left until all but the last fit into `max_length`, as lm-eval does."""
        excess = len(self.context) + len(self.continuation) - (max_length + 1)
        return self if excess <= 0 else ScoringRequest(self.context[excess:], self.continuation)


@dataclass(frozen=True)
class Document:
    """One row: a context, and the requests that continue it.

    Attributes
    ----------
    context : tuple of int
        Tokens at the start of the row.
    branches : tuple of tuples of int
        Tokens of each branch; a continuation's last token is never fed, only predicted.
    requests : tuple of (request, branch, scored)
        `branch` is a number of `branches`, or None where the context alone predicts the continuation; `scored` is how
        many tokens at the end of context and branch are followed by a token to score.
    """

    context: Tokens
    branches: tuple[Tokens, ...]
    requests: tuple[tuple[int, int | None, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens that the model computes."""
        return len(self.context) + sum(map(len, self.branches))


@dataclass(frozen=True)
class Batch:
    """Documents for one forward pass of shape `[1, tokens]`."""

    documents: tuple[Document, ...]

    @property
    def requests(self) -> list[int]:
        """Numbers of the requests that the pass scores."""
        return [request for document in self.documents for request, _, _ in document.requests]


@dataclass(frozen=True)
class PackedInput:
    """What goes into the model for a batch, and where its scores come out.

    Attributes
    ----------
    tokens : Tensor [1, tokens], int64
    rows : Rows
    keep : Tensor [kept], int64
        Positions whose logits are needed, ascending.
    source : Tensor [scored], int64
        For every scored token, which of the kept logits predicts it.
    target : Tensor [scored], int64
        The tokens to score, request after request in the order of `Batch.requests`.
    counts : list of int
        Scored tokens of each request.
    """

    tokens: Tensor
    rows: Rows
    keep: Tensor
    source: Tensor
    target: Tensor
    counts: list[int]


def documents(requests: Sequence[ScoringRequest], shared_context: int) -> list[Document]:
    """Group requests by context into rows.

    Parameters
    ----------
    requests : sequence of ScoringRequest
        Each with at least one token in context and continuation.
    shared_context : int
        A context shorter than this is not shared: what a method looks at first then differs from choice to choice.

    Returns
    -------
    list of Document
        In the order in which contexts first occur.
    """
    by_context: dict[Tokens, list[int]] = {}
    for number, request in enumerate(requests):
        by_context.setdefault(request.context, []).append(number)
    rows: list[Document] = []
    for context, numbers in by_context.items():
        fed = list(dict.fromkeys(requests[number].continuation[:-1] for number in numbers))
        if len(context) >= shared_context or len(fed) == 1:
            rows.append(_document(context, fed, numbers, requests))
        else:
            for branch in fed:
                same = [number for number in numbers if requests[number].continuation[:-1] == branch]
                rows.append(_document(context, [branch], same, requests))
    return rows


def _document(context: Tokens, fed: list[Tokens], numbers: list[int], requests: Sequence[ScoringRequest]) -> Document:
    branches = tuple(branch for branch in fed if branch)
    placed = []
    for number in numbers:
        continuation = requests[number].continuation
        branch = branches.index(continuation[:-1]) if len(continuation) > 1 else None
        placed.append((number, branch, len(continuation)))
    return Document(context, branches, tuple(placed))


def batches(rows: Sequence[Document], batch_tokens: int) -> list[Batch]:
    """Fill passes with documents of similar length, longest first, up to a budget of tokens.

    Parameters
    ----------
    rows : sequence of Document
    batch_tokens : int
        Most tokens in a pass; a longer document has a pass of its own.
    """
    # Sorting by tokens as well makes the layout independent of the order in which requests came.
    waiting = sorted(rows, key=lambda row: (-row.tokens, row.context, row.branches))
    filled: list[Batch] = []
    current: list[Document] = []
    used = 0
    for row in waiting:
        if current and used + row.tokens > batch_tokens:
            filled.append(Batch(tuple(current)))
            current, used = [], 0
        current.append(row)
        used += row.tokens
    if current:
        filled.append(Batch(tuple(current)))
    return filled


def packed_input(batch: Batch, requests: Sequence[ScoringRequest]) -> PackedInput:
    """Tokens, rows and scored positions of a batch."""
    line: list[int] = []
    predicted_by: list[int] = []
    target: list[int] = []
    counts: list[int] = []
    for document in batch.documents:
        start = len(line)
        line.extend(document.context)
        branch_start = []
        for fed in document.branches:
            branch_start.append(len(line))
            line.extend(fed)
        for number, branch, count in document.requests:
            predicted_by.append(start + len(document.context) - 1)
            if branch is not None:
                predicted_by.extend(range(branch_start[branch], branch_start[branch] + count - 1))
            target.extend(requests[number].continuation)
            counts.append(count)
    keep, source = torch.unique(torch.tensor(predicted_by), return_inverse=True)
    rows = Rows.packed(
        [len(document.context) for document in batch.documents],
        [[len(branch) for branch in document.branches] for document in batch.documents],
    )
    return PackedInput(torch.tensor([line]), rows, keep, source, torch.tensor(target), counts)
