"""What a method is: a way to compute attention over rows, with its settings, put into a model for a while."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from transformers import PreTrainedModel

from chai_eval.attention import Takeover, UnsupportedModel, attention_layers
from chai_eval.attention.agreement import check_agreement
from chai_eval.attention.masks import Window
from chai_eval.errors import SettingError


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
            attention_layers(model)
            self.check_settings(model)
            self.check_windows(model, check_agreement(model))
        except UnsupportedModel as error:
            raise SettingError(str(error)) from error

    def check_settings(self, model: PreTrainedModel) -> None:  # noqa: B027 - of some methods all fit every model
        """Refuse settings that do not fit a model, from its config and weights alone.

        Raises
        ------
        SettingError
        """

    def check_windows(self, model: PreTrainedModel, windows: Mapping[int, Window | None]) -> None:  # noqa: B027
        """Refuse settings that do not fit how far back each layer of a model looks.

        Raises
        ------
        SettingError, UnsupportedModel
        """

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
