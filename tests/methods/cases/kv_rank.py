"""`kv_rank` with random moments: every head's keys and values projected by what an eigendecomposition of AB says."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import MOMENTS, write_calibration
from chai_eval.methods.moments import KINDS, RIDGE, pack, unpack
from chai_eval.models.fingerprint import identity
from tests.attention.tiny import LAYERS, HeadLoop
from tests.methods.cases.case import Case

CONTEXT, HEAD_DIM, STEP = 40, 8, 4


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def random_moments(kv_heads: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Factors and scales of moments whose eigenvalues differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(kv_heads)
    found = {}
    for kind in KINDS:
        vectors = torch.randn(LAYERS, kv_heads, HEAD_DIM, 12, generator=generator, dtype=torch.float64)
        vectors = vectors * torch.logspace(0, -2, HEAD_DIM, dtype=torch.float64)[:, None]
        found[kind] = pack(vectors @ vectors.transpose(-1, -2))
    return found


def moments_of(model: PreTrainedModel) -> str:
    """A calibration of the model."""
    kv_heads = attention_shape(model).kv_heads
    where = Path(folder().name) / f"{model.config.model_type}-{kv_heads}"
    if not where.exists():
        packed = random_moments(kv_heads)
        tensors = {kind: factors for kind, (factors, _) in packed.items()}
        tensors["scale"] = torch.stack([scale for _, scale in packed.values()])
        write_calibration(where, {"model": {"name": "tiny", **identity(model)}}, tensors, MOMENTS)
    return str(where)


def rotation(model: PreTrainedModel, position: int) -> np.ndarray:
    """What the model's rotary embedding does to a key at a position, as a matrix, by the angles of its config."""
    rotated = {"llama": HEAD_DIM, "gpt_neox": HEAD_DIM // 4, "opt": 0}[model.config.model_type]
    matrix, half = np.eye(HEAD_DIM), rotated // 2
    for plane in range(half):
        angle = position * 10000.0 ** (-2 * plane / rotated)
        first, second = plane, plane + half
        matrix[first, first] = matrix[second, second] = np.cos(angle)
        matrix[first, second], matrix[second, first] = -np.sin(angle), np.sin(angle)
    return matrix


def over_positions(model: PreTrainedModel, moment: np.ndarray) -> np.ndarray:
    turned = [rotation(model, position) for position in range(CONTEXT)]
    return np.mean([turn @ moment @ turn.T for turn in turned], axis=0)


def directions(asking: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Costs, descending, and the eigenvectors x of BA with xᵀAx = 1: keeping some of them makes k into Σ x xᵀA k.

    A's eigenvalues are raised by RIDGE of the largest.
    """
    asking = asking + RIDGE * np.linalg.eigvalsh(asking)[-1] * np.eye(HEAD_DIM)
    costs, vectors = np.linalg.eig(asked @ asking)
    order = np.argsort(-costs.real)
    vectors = vectors.real[:, order]
    vectors /= np.sqrt(np.einsum("ij,ik,kj->j", vectors, asking, vectors))
    return costs.real[order] / 2, vectors, asking


def kv_rank_loop(saving: float, reduce: str, model: PreTrainedModel) -> HeadLoop:
    """Keys and values projected head by head, of ranks found by taking the most costly steps one by one."""
    kv_heads = attention_shape(model).kv_heads
    known = {kind: unpack(*packed).numpy() for kind, packed in random_moments(kv_heads).items()}
    found: dict[tuple[str, int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for layer in range(LAYERS):
        for head in range(kv_heads):
            query, pull, gradient, output = (known[kind][layer, head] for kind in KINDS)
            query, pull = over_positions(model, query), over_positions(model, pull)
            found["keys", layer, head] = directions(query, pull)
            found["values", layer, head] = directions(gradient, output)
    reduced = {each for each in found if reduce in ("both", each[0])}
    ranks = {each: 0 if each in reduced else HEAD_DIM for each in found}
    left = round((1 - saving) * len(found) * HEAD_DIM) - sum(ranks.values())
    steps = [(found[each][0][at : at + STEP].sum(), each) for each in reduced for at in range(0, HEAD_DIM, STEP)]
    for _, each in sorted(steps, reverse=True)[: left // STEP]:
        ranks[each] += STEP

    def projected(which: str, layer: int, states: np.ndarray) -> np.ndarray:
        out = np.empty_like(states)
        for head in range(len(states)):
            _, vectors, asking = found[which, layer, head]
            taken = vectors[:, : ranks[which, layer, head]]
            out[head] = states[head] @ (taken @ taken.T @ asking).T
        return out

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.stack([probabilities[head] @ values[head] for head in range(len(values))])

    def states(layer: int, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first = key[:, :1]
        return np.concatenate((first, projected("keys", layer, key)[:, 1:]), 1), projected("values", layer, value)

    layer_output.states = states  # type: ignore[attr-defined]
    return layer_output


def case(saving: float, reduce: str = "both") -> Case:
    def settings(model: PreTrainedModel) -> dict[str, Any]:
        return {"moments": moments_of(model), "saving": saving, "reduce": reduce, "context": CONTEXT}

    return Case("kv_rank", settings, loop_of=lambda model: kv_rank_loop(saving, reduce, model))


CASES = {
    "kv_rank": case(0.3),
    "kv_rank_keys": case(0.25, "keys"),
    "kv_rank_values": case(0.4, "values"),
    "kv_rank_most": case(0.8),
}
NOTHING = {"kv_rank": lambda model: {"moments": moments_of(model), "saving": 0, "context": CONTEXT}}
