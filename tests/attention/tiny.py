"""Tiny random models whose heads attend differently, and CHAI written as loops over requests and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics.pairwise import cosine_distances
from torch.nn.functional import rms_norm
from transformers import (
    AttentionInterface,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface

VOCABULARY = 97
LAYERS = 3
HEADS = 8


def llama(kv_heads: int = HEADS, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


def opt(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=128,
        word_embed_proj_dim=64,
        init_std=0.4,
        dropout=0.0,
    )
    return OPTForCausalLM(config).eval()


def neox(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    return GPTNeoXForCausalLM(config).eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama_gqa": lambda: llama(kv_heads=2),
    "opt": opt,
    "neox": neox,
}


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The same model computed in float64 throughout, in place: transformers' norms and rotary embeddings don't."""

    def normed(module: Any, states: torch.Tensor) -> torch.Tensor:
        return rms_norm(states, module.weight.shape, module.weight, module.variance_epsilon)

    def turned(module: Any, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (position_ids[..., None] * module.inv_freq).repeat(1, 1, 2)
        return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling

    for module in model.double().modules():
        for kind, exact in (("RMSNorm", normed), ("RotaryEmbedding", turned)):
            if type(module).__name__.endswith(kind):
                module.forward = partial(exact, module)
    return model


def requests(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Random requests of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(tokens: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A padded batch and its attention mask."""
    width = max(len(each) for each in tokens)
    ids = torch.ones(len(tokens), width, dtype=torch.int64)
    mask = torch.zeros(len(tokens), width, dtype=torch.int64)
    for row, each in enumerate(tokens):
        where = slice(0, len(each)) if side == "right" else slice(width - len(each), width)
        ids[row, where] = each
        mask[row, where] = 1
    return ids, mask


def masked_logits(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Logits of each request's own tokens, out of a padded batch."""
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    return [logits[row][mask[row].bool()] for row in range(len(ids))]


HeadLoop = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@contextmanager
def looped(model: PreTrainedModel, layer_output: HeadLoop) -> Iterator[None]:
    """Compute attention of single, unpadded requests by `layer_output(layer, probabilities, scores, values)`.

    Probabilities and scores are float64 `[heads, n, n]` of ordinary attention; values `[heads, n, head_dim]`. Where the
    loop has a `states`, attention is that of the keys and values, `[kv_heads, n, head_dim]`, that it makes of them;
    where it has a `meet`, that is given queries and keys of every head first, `[heads, n, head_dim]`.
    """
    change = getattr(layer_output, "states", lambda layer, key, value: (key, value))

    def attention(module, query, key, value, mask, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
        assert query.shape[0] == 1
        heads, n, _ = query.shape[1:]
        scores = np.empty((heads, n, n))
        probabilities = np.zeros((heads, n, n))
        q = query[0].double().numpy()
        k, v = change(module.layer_idx, key[0].double().numpy(), value[0].double().numpy())
        group = heads // len(k)
        values = np.stack([v[head // group] for head in range(heads)])
        getattr(layer_output, "meet", lambda query, key: None)(q, k.repeat(group, axis=0))
        for head in range(heads):
            scores[head] = q[head] @ k[head // group].T * scaling
            for row in range(n):
                seen = np.exp(scores[head, row, : row + 1] - scores[head, row, : row + 1].max())
                probabilities[head, row, : row + 1] = seen / seen.sum()
        out = layer_output(module.layer_idx, probabilities, scores, values)
        return torch.from_numpy(out).to(query.dtype).transpose(0, 1)[None], None

    before = model.config._attn_implementation
    AttentionInterface.register("looped", attention)
    AttentionMaskInterface.register("looped", lambda *args, **kwargs: None)
    model.config._attn_implementation = "looped"
    try:
        yield
    finally:
        model.config._attn_implementation = before
        del AttentionInterface._global_mapping["looped"], AttentionMaskInterface._global_mapping["looped"]


def looped_logits(model: PreTrainedModel, tokens: list[torch.Tensor], layer_output: HeadLoop) -> list[torch.Tensor]:
    """Logits of each request, each run alone."""
    with looped(model, layer_output), torch.no_grad():
        return [model(input_ids=each[None], use_cache=False).logits[0] for each in tokens]


def chai_loop(
    counts: list[int], probe_tokens: int = 5, representative: str = "first", features: str = "triangle"
) -> HeadLoop:
    """CHAI of the design's section 3 with scikit-learn's partition, one head at a time."""

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        heads, n, _ = probabilities.shape
        out = np.stack([probabilities[head] @ values[head] for head in range(heads)])
        if counts[layer] == heads or n <= probe_tokens:
            return out
        if features == "full":
            block = scores[:, :probe_tokens, :probe_tokens]
            block = np.exp(block - block.max(-1, keepdims=True))
            seen = (block / block.sum(-1, keepdims=True)).reshape(heads, -1)
        else:
            rows, columns = np.tril_indices(probe_tokens)
            seen = probabilities[:, rows, columns]
        distance = cosine_distances(seen)
        labels = AgglomerativeClustering(n_clusters=counts[layer], metric="precomputed", linkage="average").fit_predict(
            distance
        )
        for label in set(labels):
            members = np.flatnonzero(labels == label)
            chosen = members[0]
            if representative == "medoid":
                chosen = members[int(np.argmin(distance[np.ix_(members, members)].sum(1).round(12)))]
            for head in members:
                out[head, probe_tokens:] = probabilities[chosen, probe_tokens:] @ values[head]
        return out

    return layer_output
