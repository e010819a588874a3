"""Put an attention of our own into a transformers model, and take it out again without a trace.

It goes through `AttentionInterface` and `AttentionMaskInterface`, for the duration of each forward pass: a hook on the
module that owns the layers works out the rows of the pass, points the config at our attention, and back afterwards.
(Not on the base model: OPT's causal model goes round it, to the decoder inside.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from chai_eval.attention.masks import LayerMask, UnsupportedModel, layer_mask, window_given
from chai_eval.attention.passes import Attend, AttentionCall, ForwardPass, Takeover, packed_pass, padded_pass
from chai_eval.attention.rope import rotary_lengths
from chai_eval.attention.shape import attention_layers, layer_stack

# What some models add to attention and we do not compute; each arrives as a keyword of the attention call.
NOT_COMPUTED = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
}


@contextmanager
def take_over(
    model: PreTrainedModel,
    attend: Attend,
    *,
    only_rows: bool = False,
    made_by: str = "",
    probe_tokens: int = 0,
    own_positions: bool = False,
) -> Iterator[Takeover]:
    """Let `attend` compute the attention of `model` while the context lasts.

    Besides its usual arguments the model takes `rows=` (a `Rows`, with `input_ids` of shape `[1, tokens]`) for
    packed requests; positions are then those of the rows.

    Parameters
    ----------
    attend : Attend
        Is given keys and values of the pass alone; where there is a cache, it stores them (see `layer.stored`).
    only_rows : bool
        Leave passes without `rows=` to the model's own attention, and its own cache.
    made_by : str
        What caches are marked with: one that was filled under another mark is refused.
    probe_tokens : int
        Tokens in which clusters are found: a cache can't be cropped into them afterwards.
    own_positions : bool
        Where a padded batch comes without `position_ids`, tokens have those of their own request: what is left of it
        does not count.

    Raises UnsupportedModel as `attention_layers` does, and in a forward pass where the attention uses something we do
    not compute; ValueError where another method is applied already, and in a forward pass for a cache that was filled
    without the method, or an attention mask that is not `[batch, tokens]`.
    """
    layers, stack = attention_layers(model), layer_stack(model)
    if taken_over(model) is not None:
        raise ValueError("method: another method is applied to this model; allowed: one at a time")
    name = f"chai_eval_{id(model):x}"
    padded = partial(padded_pass, stack, len(layers), made_by, probe_tokens, own_positions)
    injection = _Injection(name, model, layers, attend, padded, only_rows)
    AttentionInterface.register(name, injection.attention)
    AttentionMaskInterface.register(name, injection.mask)
    hooks = [
        stack.register_forward_pre_hook(injection.before, with_kwargs=True),
        stack.register_forward_hook(injection.after, with_kwargs=True, always_call=True),
    ]
    stack._chai_eval_applied = injection.handle  # type: ignore[assignment]
    try:
        yield injection.handle
    finally:
        for hook in hooks:
            hook.remove()
        del stack._chai_eval_applied
        injection.rotary.forget()
        _restore(injection.original)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def taken_over(model: PreTrainedModel) -> Takeover | None:
    """The hold that a method has on a model at the moment."""
    return getattr(layer_stack(model), "_chai_eval_applied", None)


class _Injection:
    """What transformers calls, by the name that it knows, while a model's attention is taken over.

    `padded` makes the pass of an ordinary batch from what the model is called with.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        layers: Mapping[int, nn.Module],
        attend: Attend,
        padded: Callable[[dict[str, Any]], ForwardPass],
        only_rows: bool,
    ) -> None:
        self.name, self.config, self.layers, self.attend = name, model.config, layers, attend
        self.padded, self.only_rows = padded, only_rows
        self.original = _implementations(model.config)
        self.parameters = list(inspect.signature(layer_stack(model).forward).parameters)
        self.rotary = rotary_lengths(model)
        self.handle = Takeover()

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """The attention of one layer, as `AttentionInterface` asks for it."""
        kind, forward = self.config.model_type, self.handle.current
        assert forward is not None
        _refuse_extras(kind, kwargs)
        _check_call(kind, self.layers, module, query, forward)
        scaling = kwargs["scaling"] if kwargs.get("scaling") is not None else query.shape[-1] ** -0.5
        view = forward.view(scaling, window_given(kind, attention_mask))
        call = AttentionCall(int(module.layer_idx), module, view, forward)  # type: ignore[arg-type]
        forward.layers_seen.add(call.index)
        self.handle.saw(call, query, key, value)
        rows = forward.rows
        return rows.scatter(self.attend(call, rows.gather(query), rows.gather(key), rows.gather(value))), None

    def mask(self, *args: Any, mask_function: Any, **kwargs: Any) -> LayerMask:
        """What layers are given as a mask, as `AttentionMaskInterface` asks for it."""
        assert self.handle.current is not None
        return layer_mask(self.config.model_type, mask_function, packed=self.handle.current.packed)

    def before(
        self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Work out the rows of a pass, and point the config at our attention."""
        rows = kwargs.pop("rows", None)
        if rows is None and self.only_rows:
            return args, kwargs
        # By name: what is given by position (a mask, say) must not be missed.
        kwargs.update(zip(self.parameters, args, strict=False))
        forward = packed_pass(rows, kwargs) if rows is not None else self.padded(kwargs)
        if forward.rows.past is None:
            self.rotary.forget()
        forward.use_cache(True)
        self.handle.current = forward
        self.config._attn_implementation = self.name
        return (), kwargs

    def after(self, stack: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Point the config back, and see that no layer went another way."""
        forward, self.handle.current = self.handle.current, None
        if forward is None:
            return
        forward.use_cache(False)
        _restore(self.original)
        if output is not None and forward.layers_seen != set(self.layers):
            missed = sorted(set(self.layers) - forward.layers_seen)
            raise UnsupportedModel(
                f"model: layers {missed} of {self.config.model_type} did not call the attention interface, so their "
                "attention can't be taken over; allowed: models that do in every layer"
            )


def _check_call(
    kind: str, layers: Mapping[int, nn.Module], module: nn.Module, query: Tensor, forward: ForwardPass
) -> None:
    """Refuse calls of the attention that are not one for each layer, over all tokens of the pass."""
    index = getattr(module, "layer_idx", None)
    if layers.get(index) is not module:  # type: ignore[arg-type]
        raise UnsupportedModel(
            f"model: {kind} attends in a {type(module).__name__} that is none of its {len(layers)} layers' attention; "
            "allowed: models with one attention in each layer"
        )
    if index in forward.layers_seen:
        raise UnsupportedModel(
            f"model: layer {index} of {kind} attends twice in a pass; allowed: models that attend once in each layer"
        )
    given, expected = (query.shape[0], query.shape[2]), (forward.rows.batch, forward.rows.tokens)
    if given != expected:
        raise UnsupportedModel(
            f"model: layer {index} of {kind} attends from {given[1]} tokens of {given[0]} requests in a pass of "
            f"{expected[1]} of {expected[0]}; allowed: models whose layers all see the whole pass"
        )


def _refuse_extras(kind: str, kwargs: Mapping[str, Any]) -> None:
    for name, what in NOT_COMPUTED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModel(
                f"model: attention of {kind} uses {what}, which clustered attention does not compute; allowed: models "
                "of softmax attention alone"
            )


def _implementations(config: Any) -> list[tuple[Any, Any]]:
    """Attention implementation of a config and of the configs inside it, to be put back as they were."""
    inner = [getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None]
    return [(each, each._attn_implementation_internal) for each in (config, *inner)]


def _restore(original: list[tuple[Any, Any]]) -> None:
    for each, implementation in original:
        each._attn_implementation_internal = implementation
