"""Keep the MLP's top neurons per token, through hooks that leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from chai_eval.attention import attention_layers
from chai_eval.errors import SettingError
from chai_eval.methods.keep import highest, kept_count

# What models call the projection that neurons enter.
DOWN_NAMES = {"down_proj", "fc2", "dense_4h_to_h"}


@contextmanager
def top_neurons(model: PreTrainedModel, sparsity: float) -> Iterator[None]:
    """Keep the ⌈(1 − s) N⌉ neurons of each MLP with the highest absolute value, per token, while the context lasts.

    Parameters
    ----------
    sparsity : float
        0 does nothing.

    Raises
    ------
    SettingError
        Where a layer does not have exactly one MLP of a known kind (it may have experts).
    """
    handles = []
    try:
        if sparsity > 0:
            for projection in _down_projections(model):
                handles.append(projection.register_forward_pre_hook(partial(_keep_top, sparsity)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_top(sparsity: float, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    neurons: Tensor = args[0]  # [..., N]
    kept = highest(neurons.abs(), kept_count(neurons.shape[-1], sparsity))
    return neurons.masked_fill(~kept, 0), *args[1:]


def _down_projections(model: PreTrainedModel) -> list[nn.Module]:
    paths = {id(module): name for name, module in model.named_modules()}
    found = []
    for index, attention in attention_layers(model).items():
        block = model.get_submodule(paths[id(attention)].rpartition(".")[0])
        inside = [module for name, module in block.named_modules() if name.rpartition(".")[2] in DOWN_NAMES]
        if len(inside) != 1:
            raise SettingError(
                f"method.mlp_sparsity: layer {index} of {model.config.model_type} has {len(inside)} MLPs of a known "
                f"kind; allowed: 0, or a model with one in each layer ({', '.join(sorted(DOWN_NAMES))})"
            )
        found += inside
    return found
