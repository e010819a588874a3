"""Every method as docs/design.md (section 4) says it, one request, one head and one query at a time, in float64."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from tests.attention.tiny import HeadLoop, chai_loop, requests


def kept_of(n: int, sparsity: float) -> int:
    """⌈(1 − s) n⌉, exactly."""
    return math.ceil((1 - Fraction(str(sparsity))) * n)


def best(importance: np.ndarray, count: int) -> list[int]:
    """The `count` highest; the lowest index among those that differ from the last of them by a millionth at most."""
    if count == 0:
        return []
    last = sorted(importance)[-count]
    above = [index for index, value in enumerate(importance) if value > last * (1 + 1e-6)]
    tied = [index for index, value in enumerate(importance) if abs(value - last) <= last * 1e-6]
    return above + tied[: count - len(above)]


def every_head(probabilities: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.stack([probabilities[head] @ values[head] for head in range(len(values))])


def served_loop(representatives: list[list[int]]) -> HeadLoop:
    """Each head by the probabilities of a fixed one, from the first token on."""

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.stack([probabilities[by] @ values[head] for head, by in enumerate(representatives[layer])])

    return layer_output


def adaptive_loop(representatives: list[list[int]], probe_tokens: int) -> HeadLoop:
    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = every_head(probabilities, values)
        triangle = np.tril_indices(probe_tokens)
        chosen = sorted(set(representatives[layer]))
        for head in range(len(values)):
            if head in chosen or out.shape[1] <= probe_tokens:
                continue
            seen = probabilities[head][triangle]
            others = [probabilities[one][triangle] for one in chosen]
            apart = [1 - seen @ other / np.linalg.norm(seen) / np.linalg.norm(other) for other in others]
            by = chosen[int(np.argmin(apart))]
            out[head, probe_tokens:] = probabilities[by, probe_tokens:] @ values[head]
        return out

    return layer_output


def v_reuse_loop(counts: list[int]) -> HeadLoop:
    """CHAI's loop tells heads apart by their values; values that name the head show whom it was served by."""
    inner = chai_loop(counts)

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = every_head(probabilities, values)
        # With identity values CHAI's output is the probabilities that it used.
        used = inner(layer, probabilities, scores, np.stack([np.eye(out.shape[1])] * len(values)))
        for head in range(len(values)):
            if not np.array_equal(used[head], probabilities[head]):
                by = next(one for one in range(len(values)) if np.array_equal(used[head, 5:], probabilities[one, 5:]))
                out[head, 5:] = probabilities[by, 5:] @ values[by]
        return out

    return layer_output


def dejavu_loop(sparsity: float) -> HeadLoop:
    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = every_head(probabilities, values)
        heads, n, _ = out.shape
        for token in range(n):
            norms = np.array([np.linalg.norm(out[head, token]) for head in range(heads)])
            for head in set(range(heads)) - set(best(norms, kept_of(heads, sparsity))):
                out[head, token] = 0
        return out

    return layer_output


def head_prune_loop(pruned: list[list[int]]) -> HeadLoop:
    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = every_head(probabilities, values)
        out[pruned[layer]] = 0
        return out

    return layer_output


def spatten_loop(token_sparsity: float, head_sparsity: float, spare_layers: int = 2) -> HeadLoop:
    """The cascade with everything it remembers written out: what each query saw in each layer, and what it dropped."""
    seen: dict[str, np.ndarray] = {}

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        heads, n, _ = probabilities.shape
        if layer == 0:
            seen["received"] = np.zeros((n, n))  # [query, key], over heads and layers so far
            seen["magnitude"] = np.zeros((n, heads))
            seen["keys"] = np.tril(np.ones((n, n), bool))
            seen["heads"] = np.ones((n, heads), bool)
        out = np.zeros(values.shape)
        received, magnitude = np.zeros((n, n)), np.zeros((n, heads))
        for t in range(n):
            if layer >= spare_layers:
                importance = seen["received"][: t + 1].sum(0)
                candidates = [key for key in range(t + 1) if seen["keys"][t, key] and key != t]
                room = kept_of(t + 1, token_sparsity) - 1
                kept = {t} | {candidates[one] for one in best(importance[candidates], room)}
                seen["keys"][t] = [key in kept for key in range(n)]
                importance = seen["magnitude"][: t + 1].sum(0)
                candidates = list(np.flatnonzero(seen["heads"][t]))
                kept = {candidates[one] for one in best(importance[candidates], kept_of(heads, head_sparsity))}
                seen["heads"][t] = [head in kept for head in range(heads)]
            for head in np.flatnonzero(seen["heads"][t]):
                raised = np.where(seen["keys"][t], np.exp(scores[head, t] - scores[head, t, : t + 1].max()), 0)
                over_keys = raised / raised.sum()
                out[head, t] = over_keys @ values[head]
                received[t] += over_keys
                magnitude[t, head] = np.abs(out[head, t]).sum()
        seen["received"] += received
        seen["magnitude"] += magnitude
        return out

    return layer_output


def packed_requests() -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[torch.Tensor]]:
    """Contexts, the branches of each, and every request written out."""
    contexts = requests([6, 5, 30, 12], seed=2)
    branches = [requests(sizes, seed=3 + row) for row, sizes in enumerate([[3, 1, 7], [2], [], [4, 4]])]
    whole = [
        torch.cat([context, one])
        for context, after in zip(contexts, branches, strict=True)
        for one in (after or [context[:0]])
    ]
    return contexts, branches, whole


def unpacked(
    logits: torch.Tensor, contexts: list[torch.Tensor], branches: list[list[torch.Tensor]]
) -> list[torch.Tensor]:
    """Logits of every request written out, from those of the packed line."""
    found, start = [], 0
    for context, after in zip(contexts, branches, strict=True):
        inside = logits[start : start + len(context)]
        start += len(context)
        for one in after or [context[:0]]:
            found.append(torch.cat([inside, logits[start : start + len(one)]]))
            start += len(one)
    return found
