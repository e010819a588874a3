"""Logits of some tokens of a pass, computed for them alone where a model can do that."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


def logits_at(model: PreTrainedModel, places: Tensor, **given: Any) -> Tensor:
    """Logits of some tokens of a pass of shape `[1, tokens]`; others are not computed where the model can leave them.

    Parameters
    ----------
    places : Tensor [n], int64
        Ascending, each once.
    **given
        What the model is called with.

    Returns
    -------
    Tensor [n, vocabulary]
    """
    kept = keeping(model, places)
    logits: Tensor = model(**given, **kept).logits[0]
    return logits if kept else logits.index_select(0, places)


def keeping(model: PreTrainedModel, wanted: int | Tensor) -> dict[str, int | Tensor]:
    """What to call a model with for the logits of its last tokens, or of some, alone; nothing where it can't leave any.

    Parameters
    ----------
    wanted : int or Tensor [n], int64
        How many of the last, or which.
    """
    known = inspect.signature(model.forward).parameters
    return {"logits_to_keep": wanted} if "logits_to_keep" in known else {}
