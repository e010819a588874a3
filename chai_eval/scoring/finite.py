"""Logits that are not finite: in which layer they first appear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_layers
from chai_eval.errors import RunError


def check_finite(model: PreTrainedModel, given: Mapping[str, Any], highest: Tensor) -> None:
    """Raise RunError where scores are not finite, naming the first layer whose output is not.

    `highest` is the highest log-probability of each position: finite only where no logit is NaN or +inf. The forward
    pass that gave it is run once more, as it was `given`, to find the layer.
    """
    if not torch.isfinite(highest).all():
        dtype = str(model.dtype).removeprefix("torch.")
        raise RunError(
            f"logits: not finite, first in {_first_not_finite(model, given)} (dtype {dtype}); "
            "try model.dtype=float32, or check the weights"
        )


def _first_not_finite(model: PreTrainedModel, given: Mapping[str, Any]) -> str:
    seen: list[str] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            if isinstance(states, Tensor) and not torch.isfinite(states).all():
                seen.append(name)

        return look

    handles = [model.get_input_embeddings().register_forward_hook(watch("the embeddings"))]
    for index, attention in attention_layers(model).items():
        path = next(name for name, module in model.named_modules() if module is attention)
        handles.append(attention.register_forward_hook(watch(f"the attention of layer {index}")))
        handles.append(model.get_submodule(path.rpartition(".")[0]).register_forward_hook(watch(f"layer {index}")))
    try:
        model(**given)
    finally:
        for handle in handles:
            handle.remove()
    return seen[0] if seen else "the final norm or the vocabulary projection"
