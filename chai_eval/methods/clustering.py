"""What all methods that cluster heads share: a plan for each layer, put into the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

from chai_eval.attention import Plan, Takeover, clustered
from chai_eval.attention.masks import Window
from chai_eval.attention.narrow import Prefill
from chai_eval.methods.base import Method
from chai_eval.methods.checks import one_of


@dataclass(frozen=True)
class Clustering(Method):
    """A method in which representatives stand in for their clusters.

    Parameters
    ----------
    prefill : "auto", "two_step" or "one_pass"
        Whether the tokens after the probe are projected for representatives only. Scores are the same up to rounding.
    """

    prefill: Prefill = "auto"

    share_value: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("method.prefill", self.prefill, ("auto", "two_step", "one_pass"))

    @abstractmethod
    def plans(self, model: PreTrainedModel) -> dict[int, Plan]:
        """The plan of each layer that is clustered, by layer number.

        Raises
        ------
        SettingError
            Where the settings do not fit the model.
        """

    def settings(self) -> dict[str, Any]:
        return {"prefill": self.prefill}

    def check_settings(self, model: PreTrainedModel) -> None:
        self.plans(model)

    def check_windows(self, model: PreTrainedModel, windows: Mapping[int, Window | None]) -> None:
        for layer, plan in self.plans(model).items():
            plan.check_window(windows[layer])

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[Takeover]:
        with clustered(model, self.plans(model), self.prefill, made_by=self.mark) as handle:
            yield handle
