"""What a method is: a way to compute attention, with its settings, put into a model for a while."""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from pydantic import Field
from transformers import PreTrainedModel

from chai_eval.attention import Hooks, Takeover, UnsupportedModel, apply, attention_layers, shard
from chai_eval.attention.agreement import check_agreement
from chai_eval.attention.shape import AttentionShape, attention_shape
from chai_eval.errors import SettingError

Positive = Annotated[int, Field(strict=True, ge=1, json_schema_extra={"allowed": "whole numbers from 1"})]
FromZero = Annotated[int, Field(strict=True, ge=0, json_schema_extra={"allowed": "whole numbers from 0"})]
Share = Annotated[float, Field(strict=True, gt=0, le=1, json_schema_extra={"allowed": "numbers above 0 up to 1"})]
ToTwo = Annotated[float, Field(strict=True, ge=0, le=2, json_schema_extra={"allowed": "numbers from 0 to 2"})]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1, json_schema_extra={"allowed": "numbers from 0 to below 1"})]
# Tokens of a text so long that what becomes of its first and last ones makes no difference.
LONG = 1 << 30


@dataclass(frozen=True)
class LayerFootprint:
    """What a layer computes and caches under a method, in heads.

    Attributes
    ----------
    scores : int
        Query heads with scores of their own.
    outputs : int
        Heads whose probabilities meet values.
    keys, values : int
        Key and value heads that are cached; under grouped-query attention the most there can be.
    probe_tokens : int
        First tokens of a request, which every head attends to on its own.
    key_numbers, value_numbers : int or None
        Numbers of a token that are cached and multiplied, of all heads together; None for `head_dim` of each head.
    first_numbers : int
        Numbers that a request has cached besides, however long it is.
    key_bytes : float or None
        Bytes of a token's keys where they are not numbers of the model's precision.
    read : float
        Share of the cached tokens that a decoded token reads.
    held : callable or None
        From the tokens of a request to how many of them are cached, where it is not all.
    """

    scores: int
    outputs: int
    keys: int
    values: int
    probe_tokens: int = 0
    key_numbers: int | None = None
    value_numbers: int | None = None
    first_numbers: int = 0
    key_bytes: float | None = None
    read: float = 1.0
    held: Callable[[int], int] | None = None

    @classmethod
    def full(cls, shape: AttentionShape) -> LayerFootprint:
        """A layer of plain multi-head attention."""
        return cls(shape.heads, shape.heads, shape.kv_heads, shape.kv_heads)

    @classmethod
    def side_by_side(cls, parts: Sequence[LayerFootprint]) -> LayerFootprint:
        """A layer from blocks of its heads, whose numbers have the model's precision and are of all tokens."""
        added = ("scores", "outputs", "keys", "values", "first_numbers")
        sums = {name: sum(getattr(each, name) for each in parts) for name in added}
        return cls(**sums, probe_tokens=max(each.probe_tokens for each in parts))

    def bytes_per_token(self, head_dim: int, size: int, tokens: int = LONG) -> tuple[float, float]:
        """Bytes cached of keys, and of values, per token of a request of `tokens`; a number has `size` of them."""
        keys, values = (each * size for each in self.numbers(head_dim))
        share = self.share_held(tokens)
        return (keys if self.key_bytes is None else self.key_bytes) * share, values * share

    def share_held(self, tokens: int = LONG) -> float:
        """Of a request's tokens, the share that is cached."""
        return 1.0 if self.held is None else self.held(tokens) / tokens

    def multiplications(self, head_dim: int) -> float:
        """Multiplications of a query of every head with a cached token: with keys, and of probabilities with values."""
        keys, values = self.numbers(head_dim)
        return self.scores * keys / max(self.keys, 1) + self.outputs * values / max(self.values, 1)

    def numbers(self, head_dim: int) -> tuple[float, float]:
        """Numbers of a token that are cached of keys, and of values."""
        return (
            self.keys * head_dim if self.key_numbers is None else self.key_numbers,
            self.values * head_dim if self.value_numbers is None else self.value_numbers,
        )


class Method(ABC):
    """A method: subclasses are frozen pydantic dataclasses whose fields are the settings.

    A subclass says what it changes (`hooks`) and, where it really computes or caches less, what (`footprint`).
    """

    name: ClassVar[str]

    # What it does with a head depends on no head of another device, where heads are split over several.
    by_device: ClassVar[bool] = False

    def for_model(self, model: PreTrainedModel) -> Method:
        """The same with settings that the model decides; its results are named by them."""
        return self

    @property
    def shared_context(self) -> int:
        """Tokens that requests must have in common at their start to be scored as branches of one row."""
        return 1

    @property
    def mark(self) -> str:
        """What caches filled under this method are marked with: its name and settings."""
        return f"{self.name} {json.dumps(self.settings(), sort_keys=True)}"

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that say what the method does; results are named by their code, and all that they import."""
        return (type(self).__module__,)

    def settings(self) -> dict[str, Any]:
        """All settings that can change a number, as plain JSON types."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def hooks(self, model: PreTrainedModel) -> Hooks:
        """What the method changes in the attention of a model.

        Raises
        ------
        SettingError
            Where the settings do not fit the model.
        """
        return Hooks()

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint] | None:
        """What each layer of a model computes and caches; None where a saving is simulated by computing everything."""
        return None

    @classmethod
    def at_savings(
        cls, model: PreTrainedModel, calibrated: str, savings: Sequence[float], context: int
    ) -> Sequence[Method]:
        """The method over its range, for comparison at equal bytes: settings that save about these shares of the cache.

        Parameters
        ----------
        calibrated : str
            A calibration: a model's name, or a folder.
        savings : sequence of float
            Shares of the K,V bytes; those that are out of reach are left out. A method with few settings gives all.
        context : int
            Tokens of the longest text.

        Raises
        ------
        SettingError
            Where the calibration lacks what the method needs.
        """
        return []

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model that the method can't be applied to.

        Raises
        ------
        SettingError
            Naming the model or the setting, and what is allowed.
        """
        try:
            attention_layers(model)
            hooks = self.check_settings(model)
            for layer, window in check_agreement(model).items():
                hooks.check_window(layer, window)
        except UnsupportedModel as error:
            raise SettingError(str(error)) from error

    def check_settings(self, model: PreTrainedModel) -> Hooks:
        """Refuse settings that do not fit a model, from its config and weights alone; return what they change.

        Raises
        ------
        SettingError
        """
        self._check_split(model)
        hooks = self.hooks(model)
        with hooks.installed(model):
            return hooks

    def _check_split(self, model: PreTrainedModel) -> None:
        if not self.by_device and (size := shard(model).size) > 1:
            raise SettingError(
                f"method: {self.name} given for a model that is split over {size} (it looks at all heads together); "
                "allowed: mha, and methods with tensor_parallel"
            )

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[Takeover]:
        """Run the model under this method while the context lasts.

        Raises
        ------
        SettingError
            Where the settings do not fit the model.
        """
        self._check_split(model)
        with apply(model, self.hooks(model), made_by=self.mark) as handle:
            yield handle


def plain_footprint(model: PreTrainedModel) -> list[LayerFootprint]:
    """Every layer of a model under plain multi-head attention."""
    shape = attention_shape(model)
    return [LayerFootprint.full(shape)] * shape.layers
