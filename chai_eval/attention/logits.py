"""Logits of some tokens of a pass, computed for them alone where a model can do that."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


def logits_at(model: PreTrainedModel, places: Tensor, **given: Any) -> Tensor:
    """Logits of some tokens of a pass of shape `[1, tokens]`; others are not computed where the model can leave them.

    `places` `[n]`, int64, are ascending, each once; the logits are `[n, vocabulary]`. `given` is what the model is
    called with.
    """
    kept = keeping(model, places)
    logits: Tensor = model(**given, **kept).logits[0]
    return logits if kept else logits.index_select(0, places)


def keeping(model: PreTrainedModel, wanted: int | Tensor) -> dict[str, int | Tensor]:
    """What to call a model with for the logits of some tokens alone: so many of the last, or which, `[n]`, int64.

    Nothing where it can't leave any.
    """
    known = inspect.signature(model.forward).parameters
    return {"logits_to_keep": wanted} if "logits_to_keep" in known else {}
