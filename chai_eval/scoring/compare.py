"""What a method and plain attention predict on the same tokens, compared pass by pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.logits import logits_at
from chai_eval.attention.rope import rotary_lengths
from chai_eval.methods.base import Method
from chai_eval.methods.mha import MHA
from chai_eval.scoring.finite import check_finite
from chai_eval.scoring.pack import Batch, Document, PackedInput, ScoringRequest, Tokens, batches, packed_input
from chai_eval.scoring.positions import bin_means
from chai_eval.scoring.runner import Runner

# Logits compared at once, in float32: 64 MiB.
BLOCK_ELEMENTS = 1 << 24
# Logits of a pass, in bytes: no pass has more tokens, but for a sequence that is longer.
LOGITS_BYTES = 1 << 28
# Logits under plain attention, in bytes, that wait on the CPU while a method, put in once, runs over their passes.
HELD_BYTES = 1 << 30
MEANS = ("divergence", "agreement", "log_likelihood", "baseline_log_likelihood")
INFINITE = "infinite_tokens"

Row = dict[str, float]


def most_tokens(model: PreTrainedModel, size: int) -> int:
    """Tokens whose logits take so many bytes; one at least."""
    return max(size // (model.get_output_embeddings().weight.shape[0] * model.dtype.itemsize), 1)


@torch.no_grad()
def compare(
    runner: Runner,
    methods: Mapping[str, Method],
    sequences: Sequence[Tokens],
    edges: Sequence[int] = (),
    after: Callable[[int], object] = lambda done: None,
) -> dict[str, list[Row]]:
    """Compare methods with plain attention on sequences of tokens, in packed rows as scoring lays them out.

    Plain attention runs over as many passes as `HELD_BYTES` have room for the logits of, which wait on the CPU in the
    model's precision; then each method, put in once, runs over the same passes. A pass has `LOGITS_BYTES` of logits at
    most in any case. A sequence (of any length from 2) that is longer than all that fits has one pass under each as
    well: its logits are held whole, whatever room they take.

    It gives, the same in all processes, by method for each sequence `tokens` (predicted ones), the means over them that
    `Fidelity.samples` has, `infinite_tokens`: for how many of them the divergence is infinite, and what `bin_means`
    finds between `edges` of positions, if any. `after` is told after each round of passes under a method how many
    sequences all processes have compared in it.
    """
    model = runner.model
    asked = [ScoringRequest(each[:1], each[1:]) for each in sequences]
    rows = [Document(each.fed, (), ((number, None, len(each.fed)),)) for number, each in enumerate(asked)]
    plan = batches(rows, min(runner.budget(), most_tokens(model, LOGITS_BYTES)), rotary_lengths(model).alike)
    found: dict[str, dict[int, Row]] = {name: {} for name in methods}
    for held in _held_together(plan, most_tokens(model, HELD_BYTES), runner.workers.size):
        for name, compared in _compare_passes(runner, methods, held, asked, edges, after).items():
            found[name].update(compared)
    return {name: [each[number] for number in range(len(sequences))] for name, each in found.items()}


def _held_together(plan: Sequence[Batch], most: int, size: int) -> list[list[Batch]]:
    """Split passes that processes take in turn: each process has at most so many tokens of a part, or a single pass."""
    parts: list[list[Batch]] = [[]]
    for batch in plan:
        held = parts[-1][len(parts[-1]) % size :: size]  # by the process whose turn it is
        if held and sum(each.tokens for each in held) + batch.tokens > most:
            parts.append([])
        parts[-1].append(batch)
    return parts


def _compare_passes(
    runner: Runner,
    methods: Mapping[str, Method],
    plan: Sequence[Batch],
    asked: Sequence[ScoringRequest],
    edges: Sequence[int],
    after: Callable[[int], object],
) -> dict[str, dict[int, Row]]:
    """By method and number of the sequence, from passes whose logits under plain attention are held together."""
    model, workers = runner.model, runner.workers
    mine = range(workers.rank, len(plan), workers.size)
    packed = {number: packed_input(plan[number], asked) for number in mine}
    with MHA().applied(model):
        expected = {number: _logits(model, each).cpu() for number, each in packed.items()}

    def one_pass(number: int) -> Iterable[tuple[int, Row]]:
        each = packed[number]
        values = _compare(expected[number], _logits(model, each), each.target)
        found = [_means(of_one, edges) for of_one in values.split(each.counts, dim=1)]
        return zip(plan[number].requests, found, strict=True)

    found: dict[str, dict[int, Row]] = {name: {} for name in methods}
    for name, method in methods.items():
        with method.applied(model):
            for compared in workers.rounds(range(len(plan)), one_pass):
                found[name].update(compared)
                after(len(compared))
    return found


def _logits(model: PreTrainedModel, packed: PackedInput) -> Tensor:
    """Logits `[tokens, vocabulary]` of a packed pass: every token fed predicts the one after it."""
    given = {"input_ids": packed.tokens.to(model.device), "rows": packed.rows.to(model.device)}
    logits = logits_at(model, packed.keep.to(model.device), **given)
    check_finite(model, given, logits.amax(-1))
    return logits


def _compare(expected: Tensor, given: Tensor, target: Tensor) -> Tensor:
    """Compare logits `[tokens, vocabulary]` that predict `target` `[tokens]`, where those `given` lie.

    It gives `[4, tokens]`, float64: divergence, whether both have the same most likely token, log-likelihood under the
    method and under plain attention.
    """
    block = max(BLOCK_ELEMENTS // expected.shape[-1], 1)
    parts = []
    for logits, ours, following in zip(expected.split(block), given.split(block), target.split(block), strict=True):
        true, ours = (each.to(given.device).float().log_softmax(-1) for each in (logits, ours))
        at = following.to(given.device)[:, None]
        values = [
            kl_divergence(true, ours),
            (true.argmax(-1) == ours.argmax(-1)).float(),
            ours.gather(1, at)[:, 0],
            true.gather(1, at)[:, 0],
        ]
        parts.append(torch.stack(values).cpu().double())
    return torch.cat(parts, dim=1)


def _means(values: Tensor, edges: Sequence[int]) -> Row:
    means, divergence = dict(zip(MEANS, values.mean(1).tolist(), strict=True)), values[MEANS.index("divergence")]
    infinite = int(divergence.isinf().sum())
    return {"tokens": values.shape[1], **means, INFINITE: infinite, **bin_means(divergence, edges)}


def kl_divergence(expected: Tensor, given: Tensor) -> Tensor:
    """KL(expected ‖ given) of distributions by their logarithms: Σ p (log p − log q), where 0 log 0 is 0.

    Logarithms may be −inf, as of the tokens that only pad a vocabulary: where p is nought the term is, and where q
    alone is nought the divergence is infinite.

    Of log-probabilities `[..., vocabulary]` in the precision to compute in, it gives `[...]` in nats, never below zero.
    """
    terms = expected.exp() * (expected - given)
    # By the logarithms: a probability too small for the precision is none that is ruled out.
    terms = terms.masked_fill(given == -math.inf, math.inf).masked_fill(expected == -math.inf, 0)
    return terms.sum(-1).clamp(min=0)  # below zero by rounding only
