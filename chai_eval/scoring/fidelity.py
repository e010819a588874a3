"""How close a method's predictions stay to plain attention's, token by token: finer than the accuracy of any task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from statsmodels.stats.weightstats import DescrStatsW
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from chai_eval.data.text import batches, cut
from chai_eval.errors import SettingError
from chai_eval.methods import Method, build_method

# Logits compared at once, in float32: 64 MiB.
BLOCK_ELEMENTS = 1 << 24
# Logits of a batch that are held, in bytes; they decide how many tokens a batch has unless that is set.
LOGITS_BYTES = 1 << 28


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


@torch.no_grad()
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
        Tokens in one pass; None as many as `LOGITS_BYTES` of logits.

    Raises
    ------
    SettingError
        Where there is no text, or a method does not fit the model.
    """
    for method in methods.values():
        method.check(model)
    plain = build_method("mha")
    if batch_tokens is None:
        batch_tokens = LOGITS_BYTES // (model.get_output_embeddings().weight.shape[0] * model.dtype.itemsize)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    # A sequence that is too short to predict anything tells nothing.
    stream = (each for each in cut(texts, tokenizer, tokens) if len(each) > 1)
    for ids in tqdm(_batches(stream, sequences, max(batch_tokens // tokens, 1)), desc="fidelity", disable=None):
        on_device = ids.to(model.device)
        with plain.applied(model):
            expected = model(input_ids=on_device, use_cache=False).logits
        for name, method in methods.items():
            with method.applied(model):
                given = model(input_ids=on_device, use_cache=False).logits
            rows[name] += [_compare(*each) for each in zip(expected, given, on_device, strict=True)]
            del given
    if not all(rows.values()):
        raise SettingError("text: no text of two tokens or more given; allowed: text to predict")
    return {name: _summary(pd.DataFrame(each)) for name, each in rows.items()}


def _batches(stream: Iterator[Tensor], sequences: int | None, size: int) -> Iterator[Tensor]:
    left = sequences
    for ids in batches(stream, size):
        taken = ids if left is None else ids[:left]
        yield taken
        if left is not None:
            left -= len(taken)
            if left <= 0:
                return


def _compare(expected: Tensor, given: Tensor, ids: Tensor) -> dict[str, float]:
    """Means over the predictions of one sequence: logits `[tokens, vocabulary]` twice, ids `[tokens]`."""
    predictions = len(ids) - 1
    sums = np.zeros(4)
    block = max(BLOCK_ELEMENTS // expected.shape[-1], 1)
    for start in range(0, predictions, block):
        end = min(start + block, predictions)
        true, ours = (each[start:end].float().log_softmax(-1) for each in (expected, given))
        target = ids[start + 1 : end + 1, None]
        sums += [
            (true.exp() * (true - ours)).sum(-1).double().sum().item(),
            (true.argmax(-1) == ours.argmax(-1)).sum().item(),
            ours.gather(1, target).double().sum().item(),
            true.gather(1, target).double().sum().item(),
        ]
    names = ("divergence", "agreement", "log_likelihood", "baseline_log_likelihood")
    return {"tokens": predictions, **dict(zip(names, (sums / predictions).tolist(), strict=True))}


def _summary(samples: pd.DataFrame) -> Fidelity:
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
