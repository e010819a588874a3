"""A hash of what a model computes: every weight, exactly, the same on any device."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from chai_eval.attention.shards import own_part, whole
from chai_eval.errors import RunError

# Small enough to stay in a CPU's cache, a multiple of 8. It is part of what the hash means.
_CHUNK_BYTES = 1 << 22
# Odd, so that multiplying by it loses no bit of an int64.
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
# Of a config, what says where a model came from or how it is run, and changes no logit.
_NOT_NUMERIC = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "problem_type", "id2label", "label2id", "chunk_size_feed_forward",
}  # fmt: skip


def fingerprint(model: PreTrainedModel) -> str:
    """Sha256 (hex) over the model's config and its parameters' names, shapes, dtypes and bits.

    Each chunk of a parameter goes in as two sums over its 64-bit words, plain and weighted by position, modulo 2^64:
    integer addition gives the same sum in any order, so on any device. Tied weights count once. Of a model that is
    split over processes, which must all ask, each weight is put together for it. RunError where a weight isn't in
    memory (offloaded to disk).
    """
    given = {key: value for key, value in model.config.to_dict().items() if key[0] != "_" and key not in _NOT_NUMERIC}
    digest = hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        for checksum in _checksums(name, parameter):
            digest.update(checksum.to_bytes(8, "little", signed=True))
    return digest.hexdigest()


def _checksums(name: str, parameter: nn.Parameter) -> list[int]:
    if parameter.is_meta:
        raise RunError(f"model.device_map: weight {name} is offloaded, so the result can't be named; use more memory")
    flat = whole(parameter.detach()).reshape(-1)
    chunk = _CHUNK_BYTES // flat.element_size()
    weights = _position_weights(flat.device)
    sums = []
    for start in range(0, flat.numel(), chunk):
        words = _words(flat[start : start + chunk])
        sums += [words.sum(), words.mul_(weights[: words.numel()]).sum()]
    return torch.stack(sums).tolist() if sums else []


def _words(chunk: torch.Tensor) -> torch.Tensor:
    # A copy is aligned to 8 bytes, which a view into a file may not be.
    raw = chunk.clone().view(torch.uint8)
    padding = -raw.numel() % 8
    return (nn.functional.pad(raw, (0, padding)) if padding else raw).view(torch.int64)


@lru_cache(maxsize=1)
def _position_weights(device: torch.device) -> torch.Tensor:
    words = _CHUNK_BYTES // 8
    return torch.arange(words, device=device, dtype=torch.int64).mul_(_MIX).bitwise_or_(1)


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """What tells a model from others a calibration may have been made for, in any precision and on any device.

    `signs` hashes the signs of the first weights of every parameter: rounding to another precision keeps a sign, any
    training turns some. It is left out where weights are not in memory, or not in that of one process.
    """
    shape, config = attention_shape(model), model.config.get_text_config()
    found = {
        "model_type": config.model_type,
        "layers": shape.layers,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "hidden_size": config.hidden_size,
    }
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_meta or own_part(parameter) is not parameter:
            return found
        digest.update(name.encode())
        digest.update((parameter.detach().flatten()[:1024] < 0).cpu().numpy().tobytes())
    return {**found, "signs": digest.hexdigest()[:16]}
