"""Several methods at once, where what they change in attention does not exclude each other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedModel

from chai_eval.attention import Composed, Hooks
from chai_eval.errors import SettingError
from chai_eval.methods.base import LayerFootprint, Method

# Of a footprint what is the most that any method asks for; of all else it is the least.
MOST = ("probe_tokens", "first_numbers")


@dataclass(frozen=True)
class ComposedMethod(Method):
    """Methods put in beside each other: their hooks run in the order in which they are given.

    One of them at most may let heads share scores, and one that has attention of its own stands beside none that does.
    """

    methods: tuple[Method, ...]

    @property
    def name(self) -> str:  # type: ignore[override]
        """The names of all, as `chai+dejavu`."""
        return "+".join(each.name for each in self.methods)

    @property
    def by_device(self) -> bool:  # type: ignore[override]
        """Where that holds of all."""
        return all(each.by_device for each in self.methods)

    def for_model(self, model: PreTrainedModel) -> Method:
        return ComposedMethod(tuple(each.for_model(model) for each in self.methods))

    @property
    def shared_context(self) -> int:
        return max(each.shared_context for each in self.methods)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*super().modules, *(name for each in self.methods for name in each.modules)]))

    def settings(self) -> dict[str, Any]:
        first, *others = self.methods
        return {**first.settings(), "with": [{"name": each.name, **each.settings()} for each in others]}

    def hooks(self, model: PreTrainedModel) -> Hooks:
        parts = [each.hooks(model) for each in self.methods]
        sharing = [each.name for each, part in zip(self.methods, parts, strict=True) if part.plans]
        own = [each.name for each, part in zip(self.methods, parts, strict=True) if part.changes("attention")]
        reads = [each.name for each, part in zip(self.methods, parts, strict=True) if part.changes("reads")]
        for several, why in ((sharing, "both let heads share scores"), (own, "both have attention of their own")):
            if len(several) > 1:
                raise _excluded(several, why)
        if sharing and own:
            raise _excluded(
                [*sharing, *own], f"{own[0]} has attention of its own, {sharing[0]} lets heads share scores"
            )
        if reads and own:
            why = f"{own[0]} has attention of its own, which reads other keys than {reads[0]} knows"
            raise _excluded([*reads, *own], why)
        guarded = [
            each.name
            for each, part in zip(self.methods, parts, strict=True)
            if any(plan.guard for plan in part.plans.values())
        ]
        if reads and guarded:
            why = f"{guarded[0]} with recluster_every takes branches apart, which {reads[0]} does not know"
            raise _excluded([*reads, *guarded], why)
        choosing = [each.name for each, part in zip(self.methods, parts, strict=True) if part.changes("keys")]
        dropping = [each.name for each, part in zip(self.methods, parts, strict=True) if part.drops_tokens]
        if choosing and dropping:
            raise _excluded([*choosing, *dropping], f"{dropping[0]} drops tokens that {choosing[0]} chooses among")
        return Composed(parts)

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint] | None:
        """The least of what each computes and caches; None where one simulates its saving."""
        found = [each.footprint(model) for each in self.methods]
        known = [each for each in found if each is not None]
        return list(map(_least, *known)) if len(known) == len(found) else None


def _least(*layers: LayerFootprint) -> LayerFootprint:
    def given(name: str) -> list[Any]:
        return [value for each in layers if (value := getattr(each, name)) is not None]

    numbers = [field.name for field in fields(LayerFootprint) if field.name != "held"]
    least: dict[str, Any] = {name: min(given(name), default=None) for name in numbers}
    return LayerFootprint(**least | {name: max(given(name)) for name in MOST}, held=next(iter(given("held")), None))


def _excluded(names: list[str], why: str) -> SettingError:
    return SettingError(f"method.with: {' and '.join(names)} given ({why}); allowed: one of them")
