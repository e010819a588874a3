"""The output projection of each attention layer, reduced to what the lengths of heads' outputs need."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from chai_eval.attention import UnsupportedModel, attention_layers
from chai_eval.attention.shape import attention_shape

# What models call the projection from the heads' outputs side by side to the layer's output.
OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo", "proj")


def output_factors(model: PreTrainedModel) -> list[Tensor]:
    """Each layer's output projection, cut into heads and reduced to what lengths need: `[heads, head_dim, head_dim]`.

    With W_i the slice of head i, ‖W_i x‖ = ‖R_i x‖ where R_i is the triangular factor of W_i (float32): head_dim
    numbers instead of as many as the model is wide. Raises UnsupportedModel where no such projection is found.
    """
    shape = attention_shape(model)
    return [
        torch.linalg.qr(_output_weight(model, module, shape.heads * shape.head_dim)
                        .float().unflatten(1, (shape.heads, shape.head_dim)).transpose(0, 1), mode="r").R
        for _, module in sorted(attention_layers(model).items())
    ]  # fmt: skip


def _output_weight(model: PreTrainedModel, attention: nn.Module, width: int) -> Tensor:
    """Weight `[hidden, heads * head_dim]` of the output projection."""
    for name in OUTPUT_NAMES:
        projection = getattr(attention, name, None)
        weight = getattr(projection, "weight", None)
        if weight is None:
            continue
        # GPT-2's Conv1D keeps its weight the other way round.
        weight = weight if isinstance(projection, nn.Linear) else weight.T
        if weight.shape[1] == width:
            return weight.detach()
    raise UnsupportedModel(
        f"model: the attention of {model.config.model_type} has no output projection that is known by its name; "
        f"allowed: models that call it one of {', '.join(OUTPUT_NAMES)}"
    )
