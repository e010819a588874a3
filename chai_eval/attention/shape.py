"""The attention of a model: where its modules are, how many heads they have."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from chai_eval.attention.masks import UnsupportedModel

# What models call the attention module of a layer.
ATTENTION_NAMES = {"self_attn", "attn", "attention", "self_attention"}
_ATTENTION_NAMED = ", ".join(sorted(ATTENTION_NAMES))


@dataclass(frozen=True)
class AttentionShape:
    """Layers, query heads, key/value heads and head dimension of a model, as its config states them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def attention_shape(model: PreTrainedModel) -> AttentionShape:
    """Read the attention's shape from a model's config; raises UnsupportedModel where it states no heads."""
    kind, config = model.config.model_type, model.config.get_text_config()
    allowed = "allowed: models with softmax attention of the same heads in every layer"
    try:
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    except AttributeError as error:
        raise UnsupportedModel(f"model: config of {kind} states no {error.name or 'heads'}; {allowed}") from error
    except RuntimeError as error:  # a config that states one for each layer refuses to state one for all
        raise UnsupportedModel(f"model: heads of {kind} differ from layer to layer; {allowed}") from error
    if not all(isinstance(each, int) for each in (layers, heads, kv_heads, head_dim)):
        raise UnsupportedModel(f"model: heads of {kind} differ from layer to layer; {allowed}")
    return AttentionShape(layers, heads, kv_heads, head_dim)


def attention_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The attention modules of a model by layer number.

    Raises UnsupportedModel where the model's attention does not go through transformers' attention interface.
    """
    kind = model.config.model_type
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"model: {kind} is an encoder-decoder; allowed: decoder-only causal models")
    if not model._supports_attention_backend:
        raise UnsupportedModel(
            f"model: attention of {kind} does not go through transformers' AttentionInterface, so it can't be taken "
            "over; allowed: models that do, such as llama, opt, gpt_neox, qwen2, mistral, phi, olmo"
        )
    found = {
        module.layer_idx: module
        for name, module in model.base_model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int) and name.rpartition(".")[2] in ATTENTION_NAMES
    }
    expected = attention_shape(model).layers
    if sorted(found) != list(range(expected)):
        why = "others are something else, or run several times" if found else f"none is named {_ATTENTION_NAMED}"
        raise UnsupportedModel(
            f"model: {kind} has {len(found)} attention modules for {expected} layers ({why}); allowed: models with "
            "softmax attention, once, in every layer"
        )
    return found


def layer_stack(model: PreTrainedModel) -> nn.Module:
    """The module whose forward pass runs the layers: it owns the list that the first attention layer is part of."""
    first = attention_layers(model)[0]
    path = next(name for name, module in model.named_modules() if module is first).split(".")
    return model.get_submodule(".".join(path[: path.index("0") - 1]))
