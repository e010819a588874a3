"""What goes into each attention layer, shown to whoever asks while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_layers


@contextmanager
def attention_inputs(model: PreTrainedModel, see: Callable[[int, Tensor], object]) -> Iterator[None]:
    """Call `see(layer, hidden [batch, tokens, hidden])` before each attention layer runs, while the context lasts."""

    def before(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(layer, args[0] if args else kwargs["hidden_states"])

    handles = [
        module.register_forward_pre_hook(partial(before, layer), with_kwargs=True)
        for layer, module in attention_layers(model).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
