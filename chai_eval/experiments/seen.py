"""What experiments that look at heads have in common: a model, samples of text, means over samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.analyse import sample_batches
from chai_eval.attention.shape import AttentionShape, attention_shape
from chai_eval.data.text import open_text
from chai_eval.experiments.plan import Plan
from chai_eval.methods import build_method
from chai_eval.session import LoadedModel, Session
from chai_eval.student import student_interval


@dataclass(frozen=True)
class Sample:
    """A model and the samples of text that it reads, in batches `[samples, tokens]`, int64."""

    loaded: LoadedModel
    batches: Sequence[Tensor]
    text: str

    @property
    def model(self) -> PreTrainedModel:
        """The model itself."""
        model: PreTrainedModel = self.loaded.model
        return model

    @property
    def shape(self) -> AttentionShape:
        """Its layers and heads."""
        return attention_shape(self.model)

    @property
    def count(self) -> int:
        """How many samples there are."""
        return sum(map(len, self.batches))

    @property
    def sentence(self) -> str:
        """What was read, for tables."""
        return f"{self.count} requests of {self.batches[0].shape[1]} tokens ({self.text})"

    def described(self, plan: Plan) -> dict[str, Any]:
        """The model, and what was read, for the record."""
        loaded = self.loaded
        return {
            "name": plan.model, "fingerprint": loaded.fingerprint, "dtype": loaded.dtype, "device": loaded.device,
            "text": self.text, "samples": self.count,
        }  # fmt: skip


def read_sample(plan: Plan, session: Session) -> Sample:
    """Load the model and read the text; raises as `analyse` does."""
    text = open_text(plan.analysis.text, plan.analysis.seed)
    loaded = session.model(plan.analysis.model)
    build_method("mha").check(loaded.model)
    return Sample(loaded, sample_batches(plan.analysis, text, loaded.model, loaded.tokenizer), text.name)


def mean_interval(values: ArrayLike) -> tuple[float, float, float]:
    """Mean over samples with its 95 % interval (Student's), nan passed over; no interval where nothing varies."""
    given = np.asarray(values, dtype=float)
    given = given[~np.isnan(given)]
    if not given.size:
        return math.nan, math.nan, math.nan
    return float(given.mean()), *student_interval(given)


def interval_text(found: Iterable[float], digits: int = 2, times: float = 1.0) -> str:
    """A mean with its interval (mean, low, high), for tables."""
    mean, low, high = map(float, found)
    if math.isnan(mean):
        return "–"
    said = f"{times * mean:.{digits}f}"
    return said if math.isnan(low) else f"{said} ({times * low:.{digits}f} to {times * high:.{digits}f})"
