"""What a method is: a way to compute attention over rows, with its settings, put into a model for a while."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import ForwardPass, Layer, Takeover, UnsupportedModel, full_attention, take_over
from chai_eval.errors import SettingError

# How far logits of our own multi-head attention may lie from the model's, relative to the largest, before we say that
# the model's attention does something else. Rounding alone stays two orders of magnitude below.
AGREEMENT = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class Method(ABC):
    """A method: subclasses are frozen dataclasses whose fields are the settings."""

    name: ClassVar[str]

    @property
    def shared_context(self) -> int:
        """Tokens that requests must have in common at their start to be scored as branches of one row."""
        return 1

    @property
    def mark(self) -> str:
        """What caches filled under this method are marked with: its name and settings."""
        return f"{self.name} {json.dumps(self.settings(), sort_keys=True)}"

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All settings that can change a number, as plain JSON types."""

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model that the method can't be applied to.

        Raises
        ------
        SettingError
            Naming the model or the setting, and what is allowed.
        """
        try:
            _check_takeover(model)
        except UnsupportedModel as error:
            raise SettingError(str(error)) from error

    @contextmanager
    @abstractmethod
    def applied(self, model: PreTrainedModel) -> Iterator[Takeover | None]:
        """Run the model under this method while the context lasts.

        Raises
        ------
        SettingError
            Where the settings do not fit the model.
        """
        yield None


def own_scores(layer: Layer, query: Tensor, key: Tensor, value: Tensor, run: ForwardPass) -> Tensor:
    """Every head by its own scores, as an `Attend`."""
    return full_attention(query, key, value, run.rows, layer.scaling, layer.window)


@torch.no_grad()
def _check_takeover(model: PreTrainedModel) -> None:
    """Run a few tokens with our multi-head attention in the model's place: the logits must be the model's own."""
    tokens = torch.arange(1, 13, device=model.device)[None] % model.config.get_text_config().vocab_size
    stock = model(input_ids=tokens, use_cache=False).logits
    with take_over(model, own_scores):
        ours = model(input_ids=tokens, use_cache=False).logits
    if not torch.isfinite(stock).all():
        return  # said where scores are checked, with the layer in which it begins
    limit = AGREEMENT.get(stock.dtype, 0.1) * stock.abs().max()
    if (ours - stock).abs().max() > limit:
        raise UnsupportedModel(
            f"model: attention of {model.config.model_type} is more than softmax(QK)V (our own gives other logits), so "
            "it can't be taken over"
        )
