"""How close a method's predictions stay to plain attention's, token by token: finer than the accuracy of any task."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from statsmodels.stats.weightstats import DescrStatsW
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from chai_eval.data.text import cut
from chai_eval.errors import SettingError
from chai_eval.methods import Method, build_method
from chai_eval.scoring.finite import check_finite
from chai_eval.scoring.pack import Document, PackedInput, ScoringRequest, Tokens, batches, packed_input
from chai_eval.scoring.ranks import Ranks

# Logits compared at once, in float32: 64 MiB.
BLOCK_ELEMENTS = 1 << 24
# Logits of a pass that are held, in bytes, of plain attention and of one method each: no pass has more tokens.
LOGITS_BYTES = 1 << 28
MEANS = ("divergence", "agreement", "log_likelihood", "baseline_log_likelihood")

Row = dict[str, float]


@dataclass(frozen=True)
class Mean:
    """A mean over sequences with its 95 % interval (Student's; nan for a single sequence)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fidelity:
    """A method against plain multi-head attention on the same tokens.

    Attributes
    ----------
    divergence : Mean
        KL(MHA ‖ method) of next-token distributions, in nats per token.
    agreement : Mean
        Share of tokens for which both predict the same most likely next token.
    perplexity, baseline_perplexity : float
        Of the method and of plain attention.
    tokens, sequences : int
        How many were compared; every token but each sequence's first is predicted.
    samples : DataFrame
        One row a sequence: `tokens`, `divergence`, `agreement`, `log_likelihood`, `baseline_log_likelihood`, means
        over its tokens.
    """

    divergence: Mean
    agreement: Mean
    perplexity: float
    baseline_perplexity: float
    tokens: int
    sequences: int
    samples: pd.DataFrame


def fidelity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    texts: Iterable[str],
    *,
    tokens: int = 512,
    sequences: int | None = None,
    batch_tokens: int | None = None,
) -> Fidelity:
    """Compare one method with plain attention; see `fidelities`."""
    found = fidelities(
        model, tokenizer, {"": method}, texts, tokens=tokens, sequences=sequences, batch_tokens=batch_tokens
    )
    return found[""]


def fidelities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Mapping[str, Method],
    texts: Iterable[str],
    *,
    tokens: int = 512,
    sequences: int | None = None,
    batch_tokens: int | None = None,
) -> dict[str, Fidelity]:
    """Compare methods with plain attention on the same tokens, which it reads once for all of them.

    Parameters
    ----------
    methods : mapping of any name to Method
    texts : iterable of str
        Documents, cut into sequences that follow each other.
    tokens : int
        Length of a sequence, BOS included.
    sequences : int or None
        How many to compare; None for all there are.
    batch_tokens : int or None
        Most tokens in one pass; None as many as have `LOGITS_BYTES` of logits, which is the most in any case.

    Raises
    ------
    SettingError
        Where there is no text, or a method does not fit the model.
    RunError
        For logits that are not finite.
    """
    for method in methods.values():
        method.check(model)
    budget = min(batch_tokens or most_logits(model), most_logits(model))
    rows: dict[str, list[Row]] = {name: [] for name in methods}
    # A sequence that is too short to predict anything tells nothing.
    read = (tuple(each.tolist()) for each in cut(texts, tokenizer, tokens) if len(each) > 1)
    stream = itertools.islice(read, sequences)
    chunks = iter(lambda: list(itertools.islice(stream, max(budget // tokens, 1))), [])
    for chunk in tqdm(chunks, desc="fidelity", disable=None):
        for name, found in compare(model, methods, chunk, budget).items():
            rows[name] += found
    if not all(rows.values()):
        raise SettingError("text: no text of two tokens or more given; allowed: text to predict")
    return {name: summary(pd.DataFrame(each)) for name, each in rows.items()}


def most_logits(model: PreTrainedModel) -> int:
    """Tokens whose logits take `LOGITS_BYTES`."""
    return max(LOGITS_BYTES // (model.get_output_embeddings().weight.shape[0] * model.dtype.itemsize), 1)


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    methods: Mapping[str, Method],
    sequences: Sequence[Tokens],
    batch_tokens: int,
    *,
    ranks: Ranks | None = None,
    after: Callable[[int], object] = lambda done: None,
) -> dict[str, list[Row]]:
    """Compare methods with plain attention on sequences of tokens, in packed rows as scoring lays them out.

    Parameters
    ----------
    methods : mapping of any name to Method
    sequences : sequence of tuples of int
        Of any lengths from 2.
    batch_tokens : int
        Most tokens in a pass, but for a longer sequence, which has passes of its own: one for every `most_logits`.
    ranks : Ranks or None
        Processes that share the passes; the same is returned in all of them.
    after : callable
        Told after each pass how many sequences it had.

    Returns
    -------
    dict of list of dict
        By method, for each sequence `tokens` (predicted ones), and the means over them that `Fidelity.samples` has.
    """
    ranks = ranks or Ranks()
    asked = [ScoringRequest(each[:1], each[1:]) for each in sequences]
    rows = [Document(each.fed, (), ((number, None, len(each.fed)),)) for number, each in enumerate(asked)]
    mine: dict[str, dict[int, Row]] = {name: {} for name in methods}
    for batch in batches(rows, min(batch_tokens, most_logits(model)))[ranks.rank :: ranks.size]:
        packed = packed_input(batch, asked)
        for name, values in _token_values(model, methods, packed).items():
            means = [_means(each) for each in values.split(packed.counts, dim=1)]
            mine[name].update(zip(batch.requests, means, strict=True))
        after(len(batch.requests))
    gathered = ranks.gather(mine)
    found = {name: {number: row for each in gathered for number, row in each[name].items()} for name in methods}
    return {name: [found[name][number] for number in range(len(sequences))] for name in methods}


def _token_values(model: PreTrainedModel, methods: Mapping[str, Method], packed: PackedInput) -> dict[str, Tensor]:
    """What `_compare` gives for each token that a pass predicts, `[4, tokens]`, by method."""
    given = {"input_ids": packed.tokens.to(model.device), "rows": packed.rows.to(model.device)}
    plain = build_method("mha")
    parts: dict[str, list[Tensor]] = {name: [] for name in methods}
    # Every token fed predicts the one after it, so the logits kept stand in the order of their targets.
    for keep, target in zip(*(each.split(most_logits(model)) for each in (packed.keep, packed.target)), strict=True):
        expected = _logits(model, plain, given, keep)
        for name, method in methods.items():
            parts[name].append(_compare(expected, _logits(model, method, given, keep), target))
    return {name: torch.cat(each, dim=1) for name, each in parts.items()}


def _logits(model: PreTrainedModel, method: Method, given: Mapping[str, Any], keep: Tensor) -> Tensor:
    """Logits `[kept, vocabulary]` of a packed pass under a method."""
    with method.applied(model):
        logits: Tensor = model(**given, logits_to_keep=keep.to(model.device)).logits[0]
        check_finite(model, given, logits.amax(-1))
    return logits


def _compare(expected: Tensor, given: Tensor, target: Tensor) -> Tensor:
    """Compare logits `[tokens, vocabulary]` that predict `target` `[tokens]`.

    Returns
    -------
    Tensor [4, tokens], float64
        Divergence, whether both have the same most likely token, log-likelihood under the method and under plain
        attention.
    """
    block = max(BLOCK_ELEMENTS // expected.shape[-1], 1)
    parts = []
    for logits, ours, following in zip(expected.split(block), given.split(block), target.split(block), strict=True):
        true, ours = (each.float().log_softmax(-1) for each in (logits, ours))
        at = following.to(true.device)[:, None]
        values = [
            # Below zero by rounding only.
            (true.exp() * (true - ours)).sum(-1).clamp(min=0),
            (true.argmax(-1) == ours.argmax(-1)).float(),
            ours.gather(1, at)[:, 0],
            true.gather(1, at)[:, 0],
        ]
        parts.append(torch.stack(values).cpu().double())
    return torch.cat(parts, dim=1)


def _means(values: Tensor) -> Row:
    return {"tokens": values.shape[1], **dict(zip(MEANS, values.mean(1).tolist(), strict=True))}


def summary(samples: pd.DataFrame) -> Fidelity:
    """Means over sequences, from one row for each as `Fidelity.samples` has them."""
    weights = samples["tokens"]
    likelihoods = [np.average(samples[name], weights=weights) for name in ("log_likelihood", "baseline_log_likelihood")]
    perplexity, baseline = (math.exp(-each) for each in likelihoods)
    return Fidelity(
        divergence=_mean(samples["divergence"].to_numpy(), 0, math.inf),
        agreement=_mean(samples["agreement"].to_numpy(), 0, 1),
        perplexity=perplexity,
        baseline_perplexity=baseline,
        tokens=int(weights.sum()),
        sequences=len(samples),
        samples=samples,
    )


def _mean(values: Sequence[float] | np.ndarray, low: float, high: float) -> Mean:
    found = DescrStatsW(np.asarray(values, dtype=float))
    if len(values) < 2:
        return Mean(float(found.mean), math.nan, math.nan)
    lower, upper = found.tconfint_mean()
    return Mean(float(found.mean), max(float(lower), low), min(float(upper), high))
