"""Attention of one clustered layer against `scaled_dot_product_attention` on all heads, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chai_eval.benchmark.attention_shapes import HEAD_DIM, HEADS, LayerTensors, layer_tensors
from chai_eval.benchmark.common import Row, compared, copies_beyond_caches, in_turn

PEER = f"scaled_dot_product_attention, {HEADS} heads"
# Between two ways to add up the same numbers in a precision.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def row(
    what: str, queries: int, keys: int, clusters: int, dtype: torch.dtype, device: torch.device,
    *, repetitions: int, reach: float | None,
) -> Row:  # fmt: skip
    """Time one shape.

    Raises
    ------
    AssertionError
        Where the result is not that of plain attention with every head's queries and keys its representative's.
    """
    layers = [layer_tensors(clusters, queries, keys, dtype=dtype, device=device, seed=0)]
    for seed in range(1, copies_beyond_caches(layers[0].nbytes)):
        layers.append(layer_tensors(clusters, queries, keys, dtype=dtype, device=device, seed=seed))
    causal = queries == keys
    check(layers[0], causal)
    seconds = in_turn(
        {
            "sdpa": lambda: one_by_one(layers, lambda each: plain(each, causal)),
            "clustered": lambda: one_by_one(layers, LayerTensors.clustered),
        },
        device,
        repetitions=repetitions,
    )
    per_layer = {name: [each / len(layers) for each in times] for name, times in seconds.items()}
    precision = str(dtype).removeprefix("torch.")
    return Row(
        what,
        f"{HEADS} → {clusters}, d_h {HEAD_DIM}, {keys} keys, {precision}, {device}",
        PEER,
        compared(per_layer, "sdpa", "clustered"),
        reach,
        2 * HEADS / (HEADS + clusters),
        {"queries": queries, "keys": keys, "clusters": clusters, "dtype": precision, "seconds": per_layer},
    )


def one_by_one(layers: Sequence[LayerTensors], attend: Callable[[LayerTensors], Tensor]) -> None:
    """Attend layer after layer, and let go of each output as a model does: kept, they would cost fresh memory."""
    for each in layers:
        attend(each)


def plain(layer: LayerTensors, causal: bool) -> Tensor:
    """Every head by its own scores, by PyTorch's own kernel."""
    return scaled_dot_product_attention(layer.query, layer.key, layer.value, is_causal=causal, scale=layer.scaling)


def check(layer: LayerTensors, causal: bool) -> None:
    """Hold the clustered result against plain attention on expanded queries and keys."""
    query, key = layer.expanded()
    with torch.inference_mode():
        expected = scaled_dot_product_attention(query, key, layer.value, is_causal=causal, scale=layer.scaling)
        off = (layer.clustered() - expected).abs().max().item()
    assert off < TOLERANCE[layer.value.dtype], f"clustered attention is {off:.2e} off"
