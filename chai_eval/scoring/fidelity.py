"""How close a method's predictions stay to plain attention's, token by token, on a text or the documents of a task."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from lm_eval.api.instance import Instance
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from chai_eval.data.text import Document, cut
from chai_eval.errors import SettingError
from chai_eval.methods.base import Method
from chai_eval.models.embeddings import embedded
from chai_eval.scoring.compare import HELD_BYTES, INFINITE, LOGITS_BYTES, Row, compare, most_tokens
from chai_eval.scoring.pack import Tokens
from chai_eval.scoring.positions import NAMED, position_edges, without_bins
from chai_eval.scoring.prepare import PreparedTask
from chai_eval.scoring.runner import Runner
from chai_eval.scoring.tokens import request_tokens
from chai_eval.student import student_interval


@dataclass(frozen=True)
class Mean:
    """A mean over sequences with its 95 % interval: Student's; nan where all values are the same, or one infinite."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fidelity:
    """A method against plain multi-head attention on the same tokens.

    Attributes
    ----------
    divergence : Mean
        KL(MHA ‖ method) of next-token distributions, in nats per token; infinite where it is at any token.
    agreement : Mean
        Share of tokens for which both predict the same most likely next token.
    perplexity, baseline_perplexity : float
        Of the method and of plain attention.
    tokens, sequences : int
        How many were compared; every token but each sequence's first is predicted.
    infinite_tokens : int
        For how many of them the divergence is infinite: the method rules out a token that plain attention does not.
    samples : DataFrame
        One row a sequence: `tokens`, `divergence`, `agreement`, `log_likelihood`, `baseline_log_likelihood`, means
        over its tokens, and `infinite_tokens`.
    positions : DataFrame
        See `by_position`; empty but for a text.
    """

    divergence: Mean
    agreement: Mean
    perplexity: float
    baseline_perplexity: float
    tokens: int
    sequences: int
    infinite_tokens: int
    samples: pd.DataFrame
    positions: pd.DataFrame = field(default_factory=pd.DataFrame)


def fidelities(
    runner: Runner,
    methods: Mapping[str, Method],
    texts: Iterable[Document],
    *,
    tokens: int = 512,
    sequences: int | None = None,
) -> dict[str, Fidelity]:
    """Compare methods with plain attention on the same tokens, which it reads once for all of them.

    Texts are cut into sequences of `tokens` tokens, BOS included, that follow each other; `sequences` of them are
    compared, None for all there are. Unless the runner says how many tokens a pass has, they are as many as have
    `LOGITS_BYTES` of logits.

    SettingError where there is no text, or a method does not fit the model; RunError for logits that are not finite.
    """
    model = runner.model
    for method in methods.values():
        method.check(model)
    runner = replace(runner, batch_tokens=runner.batch_tokens or most_tokens(model, LOGITS_BYTES))
    rows: dict[str, list[Row]] = {name: [] for name in methods}
    stream = read_sequences(model, runner.tokenizer, texts, tokens, sequences)
    held, edges = max(most_tokens(model, HELD_BYTES) // tokens, 1), position_edges(tokens)
    total = None if sequences is None else sequences * len(methods)
    with tqdm(total=total, desc="fidelity", disable=None) as bar:
        while chunk := list(itertools.islice(stream, held)):
            for name, found in compare(runner, methods, chunk, edges, bar.update).items():
                rows[name] += found
    return {name: _by_position_too(pd.DataFrame(each), edges) for name, each in rows.items()}


def _by_position_too(samples: pd.DataFrame, edges: Sequence[int]) -> Fidelity:
    return replace(summary(without_bins(samples)), positions=by_position(samples, edges))


def read_sequences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[Document],
    tokens: int,
    count: int | None,
) -> Iterator[Tokens]:
    """The first `count` (None: all) sequences of `tokens` tokens, BOS included, of texts; SettingError for none."""
    # A sequence that is too short to predict anything tells nothing.
    read = (each for each in cut(texts, tokenizer, tokens) if len(each) > 1)
    found = False
    for each in embedded(model, tokenizer, read, count):
        found = True
        yield tuple(each.tolist())
    if not found:
        raise SettingError("text: no text of two tokens or more given; allowed: text to predict")


def task_fidelity(runner: Runner, method: Method, prepared: PreparedTask, documents: int) -> Fidelity | None:
    """Compare a method with plain attention on the first documents of a task, each by its first request.

    The same in all processes; `samples` begins with a column `doc_id`. None where no document has two tokens or more:
    nothing is predicted. RunError for logits that are not finite.
    """
    first = first_requests(prepared)[:documents]
    read = request_tokens(runner.model, runner.tokenizer, first)
    tokens = {request.doc_id: each for request, each in zip(first, read, strict=True) if len(each) > 1}
    if not tokens:
        return None
    with runner.bar(f"{prepared.task_name} under {method.name}, against mha", len(tokens)) as bar:
        found = compare(runner, {method.name: method}, list(tokens.values()), after=bar.update)
    samples = pd.DataFrame(found[method.name])
    samples.insert(0, "doc_id", list(tokens))
    return summary(samples)


def first_requests(prepared: PreparedTask) -> list[Instance]:
    """The first request of every document, in the order of documents."""
    ordered = sorted(prepared.task.instances, key=lambda each: (each.doc_id, each.idx))
    return [next(requests) for _, requests in itertools.groupby(ordered, key=lambda each: each.doc_id)]


def summary(samples: pd.DataFrame) -> Fidelity:
    """Means over sequences, from one row for each as `Fidelity.samples` has them."""
    weights = samples["tokens"]
    likelihoods = [np.average(samples[name], weights=weights) for name in ("log_likelihood", "baseline_log_likelihood")]
    with np.errstate(over="ignore"):  # infinite then
        perplexity, baseline = (float(np.exp(-each)) for each in likelihoods)
    return Fidelity(
        divergence=student_mean(samples["divergence"].to_numpy(dtype=float), 0, math.inf),
        agreement=student_mean(samples["agreement"].to_numpy(dtype=float), 0, 1),
        perplexity=perplexity,
        baseline_perplexity=baseline,
        tokens=int(weights.sum()),
        sequences=len(samples),
        infinite_tokens=int(np.sum(samples.get(INFINITE, 0))),
        samples=samples,
    )


def by_position(samples: pd.DataFrame, edges: Sequence[int]) -> pd.DataFrame:
    """Means over sequences in bins of positions, from one row for each as `compare` gives them with these edges.

    Returns
    -------
    DataFrame
        One row a bin: `start` and `end`, by the number (from 0) of the token that predicts the next one, `end` not in
        it; `kl` in nats with its 95 % interval over sequences, `low` to `high` (Student's; nan where there is none);
        `tokens`.
    """
    rows = []
    for start, end in itertools.pairwise(edges):
        reached = samples[samples["tokens"] > start]
        if reached.empty:
            break
        mean = student_mean(reached[f"{NAMED}{start}"].to_numpy(dtype=float), 0, math.inf)
        tokens = int((reached["tokens"].clip(upper=end) - start).sum())
        rows.append(
            {"start": start, "end": end, "kl": mean.value, "low": mean.low, "high": mean.high, "tokens": tokens}
        )
    return pd.DataFrame(rows)


def plain(found: Fidelity) -> dict[str, Any]:
    """A comparison as plain JSON values, which have neither nan nor infinity.

    Null for a bound where there is no interval, for a perplexity that is infinite, and for a divergence that is, which
    `infinite_tokens` beside it then says of how many tokens.
    """

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    means = {"divergence": found.divergence, "agreement": found.agreement}
    return {
        **{name: {key: number(value) for key, value in asdict(mean).items()} for name, mean in means.items()},
        "perplexity": number(found.perplexity),
        "baseline_perplexity": number(found.baseline_perplexity),
        **({INFINITE: found.infinite_tokens} if found.infinite_tokens else {}),
    }


def student_mean(values: NDArray[np.float64], low: float, high: float) -> Mean:
    """The mean of values from `low` to `high`, which its interval keeps to as well."""
    lower, upper = student_interval(values)
    # nan stays nan: it stands first.
    return Mean(float(values.mean()), max(lower, low), min(upper, high))
