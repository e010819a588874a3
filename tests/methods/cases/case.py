from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from chai_eval.methods import Method, build_method
from tests.attention.tiny import MODELS, HeadLoop, in_float64

# Of a method, or what gives them for a model.
Settings = dict[str, Any] | Callable[[PreTrainedModel], dict[str, Any]]


def build(method: str, settings: Settings, model: PreTrainedModel) -> Method:
    """The method with settings for a model."""
    return build_method(method, **(settings(model) if callable(settings) else settings))


class Case(NamedTuple):
    """Settings of a method, and the loop that it must equal; `loop_of` where that depends on the model.

    With `exact` they are compared in float64: where thousands of numbers are rounded to whole ones, float32 would send
    some of them either way.
    """

    method: str
    settings: Settings
    loop: Callable[[], HeadLoop] | None = None
    loop_of: Callable[[PreTrainedModel], HeadLoop] | None = None
    exact: bool = False

    def model(self, name: str) -> PreTrainedModel:
        """A tiny model in the precision of the comparison."""
        return in_float64(MODELS[name]()) if self.exact else MODELS[name]()

    def build(self, model: PreTrainedModel) -> Method:
        return build(self.method, self.settings, model)

    def loop_for(self, model: PreTrainedModel) -> HeadLoop:
        if self.loop_of is not None:
            return self.loop_of(model)
        assert self.loop is not None
        return self.loop()
