"""Put an attention of our own into a transformers model, and take it out again without a trace.

It goes through `AttentionInterface` and `AttentionMaskInterface`, for the duration of each forward pass: a hook on the
module that owns the layers works out the rows of the pass, points the config at our attention, and back afterwards.
(Not on the base model: OPT's causal model goes round it, to the decoder inside.)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from chai_eval.attention.passes import Attend, Layer, Takeover, packed_pass, padded_pass

# What some models add to attention and we do not compute; each arrives as a keyword of the attention call.
NOT_COMPUTED = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
}


# What models call the attention module of a layer.
ATTENTION_NAMES = {"self_attn", "attn", "attention", "self_attention"}


class UnsupportedModel(ValueError):  # noqa: N818 - says what is wrong, not that it is an error
    """The attention of this model can't be taken over; the message says why."""


@dataclass(frozen=True)
class AttentionShape:
    """Layers, query heads, key/value heads and head dimension of a model, as its config states them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def attention_shape(model: PreTrainedModel) -> AttentionShape:
    """Read the attention's shape from a model's config."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return AttentionShape(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def attention_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The attention modules of a model by layer number.

    Raises
    ------
    UnsupportedModel
        Where the model's attention does not go through transformers' attention interface.
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
        raise UnsupportedModel(
            f"model: {kind} has {len(found)} attention layers for {expected} layers (others mix tokens differently); "
            "allowed: models with softmax attention in every layer"
        )
    return found


def layer_stack(model: PreTrainedModel) -> nn.Module:
    """The module whose forward pass runs the layers: it owns the list that the first attention layer is part of."""
    first = attention_layers(model)[0]
    path = next(name for name, module in model.named_modules() if module is first).split(".")
    return model.get_submodule(".".join(path[: path.index("0") - 1]))


@contextmanager
def take_over(
    model: PreTrainedModel,
    attend: Attend,
    *,
    only_rows: bool = False,
    stores: bool = False,
    made_by: str = "",
    probe_tokens: int = 0,
) -> Iterator[Takeover]:
    """Let `attend` compute the attention of `model` while the context lasts.

    Besides its usual arguments the model takes `rows=` (a `Rows`, with `input_ids` of shape `[1, tokens]`) for
    packed requests; positions are then those of the rows.

    Parameters
    ----------
    model : PreTrainedModel
    attend : Attend
    only_rows : bool
        Leave passes without `rows=` to the model's own attention, and its own cache.
    stores : bool
        `attend` is given keys and values of the pass alone, and stores them itself (see `ForwardPass.whole`);
        otherwise it is given those of the whole rows.
    made_by : str
        What caches are marked with: one that was filled under another mark is refused.
    probe_tokens : int
        Tokens in which clusters are found: a cache can't be cropped into them afterwards.

    Raises
    ------
    UnsupportedModel
        See `attention_layers`; or, in a forward pass, where the attention uses something we do not compute.
    ValueError
        Where another method is applied already; in a forward pass, for a cache that was filled without the method, or
        an attention mask that is not `[batch, tokens]`.
    """
    layers = attention_layers(model)
    stack = layer_stack(model)
    if getattr(stack, "_chai_eval_applied", False):
        raise ValueError("method: another method is applied to this model; allowed: one at a time")
    name = f"chai_eval_{id(model):x}"
    config = model.config
    original = _implementations(config)
    padded = partial(padded_pass, stack, len(layers), made_by, probe_tokens)
    parameters = list(inspect.signature(stack.forward).parameters)
    handle = Takeover()
    current = handle.passes

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        _refuse_extras(config.model_type, kwargs)
        run = current[-1]
        layer = Layer(
            int(module.layer_idx),  # type: ignore[arg-type]
            kwargs["scaling"] if kwargs.get("scaling") is not None else query.shape[-1] ** -0.5,
            kwargs.get("sliding_window"),
            module,
        )
        run.layers_seen.add(layer.index)
        rows = run.rows
        query, key, value = rows.gather(query), rows.gather(key), rows.gather(value)
        if not stores:
            key, value = run.whole(layer.index, key, value)
        return rows.scatter(attend(layer, query, key, value, run)), None

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows = kwargs.pop("rows", None)
        if rows is None and only_rows:
            return args, kwargs
        # By name: what is given by position (a mask, say) must not be missed.
        kwargs.update(zip(parameters, args, strict=False))
        run = packed_pass(rows, kwargs) if rows is not None else padded(kwargs)
        run.use_cache(True)
        current.append(run)
        config._attn_implementation = name
        return (), kwargs

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not current:
            return
        run = current.pop()
        run.use_cache(False)
        _restore(original)
        if output is not None and run.layers_seen != set(layers):
            missed = sorted(set(layers) - run.layers_seen)
            raise UnsupportedModel(
                f"model: layers {missed} of {config.model_type} did not call the attention interface, so their "
                "attention can't be taken over"
            )

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    hooks = [
        stack.register_forward_pre_hook(before, with_kwargs=True),
        stack.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    stack._chai_eval_applied = True  # type: ignore[assignment]
    try:
        yield handle
    finally:
        for hook in hooks:
            hook.remove()
        del stack._chai_eval_applied
        _restore(original)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _refuse_extras(kind: str, kwargs: Mapping[str, Any]) -> None:
    for name, what in NOT_COMPUTED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModel(
                f"model: attention of {kind} uses {what}, which clustered attention does not compute"
            )


def _implementations(config: Any) -> list[tuple[Any, Any]]:
    """Attention implementation of a config and of the configs inside it, to be put back as they were."""
    inner = [getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None]
    return [(each, each._attn_implementation_internal) for each in (config, *inner)]


def _restore(original: list[tuple[Any, Any]]) -> None:
    for each, implementation in original:
        each._attn_implementation_internal = implementation
