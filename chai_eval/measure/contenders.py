"""Contenders: the model under its own attention, and under methods, each put in for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from chai_eval.attention import Hooks, Takeover, apply
from chai_eval.measure_settings import MeasureSettings
from chai_eval.methods import Method
from chai_eval.methods.base import LayerFootprint, plain_footprint

# What ratios are taken to, in this order of preference.
BASELINE = "mha (sdpa)"
RIVAL_NAMES = {"sdpa": BASELINE, "eager": "mha (eager)", "flash": "mha (flash)", "rows": "mha (rows)"}
IMPLEMENTATIONS = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2"}


@dataclass(frozen=True)
class Contender:
    """Something that is measured: a model's own attention, or a method.

    Attributes
    ----------
    name : str
        Unique among those that are measured together.
    rival : str or None
        `sdpa`, `eager`, `flash` or `rows`; None for a method.
    method : Method or None
    """

    name: str
    rival: str | None = None
    method: Method | None = None

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[Takeover | None]:
        """Run the model as this contender while the context lasts."""
        with _implementation(model, IMPLEMENTATIONS.get(self.rival or "sdpa", "sdpa")):
            if self.rival == "rows":
                # No layer has a plan, so each keeps every head: plain attention on the cache that methods have.
                with apply(model, Hooks()) as handle:
                    yield handle
            elif self.method is not None:
                with self.method.applied(model) as handle:
                    yield handle
            else:
                yield None

    def hooks(self, model: PreTrainedModel) -> Hooks:
        """What the method changes in the model's attention; nothing for the model's own."""
        return Hooks() if self.method is None else self.method.hooks(model)

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint] | None:
        """What each layer computes and caches; None for a method that simulates a saving by computing everything."""
        return plain_footprint(model) if self.method is None else self.method.footprint(model)

    def as_config(self) -> dict[str, Any]:
        """Plain JSON values, as records keep them."""
        settings = {} if self.method is None else self.method.settings()
        return {"name": self.name, "attention": self.rival, "method": getattr(self.method, "name", "mha"), **settings}


def contenders(
    model: PreTrainedModel, methods: Sequence[Contender], settings: MeasureSettings
) -> tuple[list[Contender], list[str]]:
    """The rivals that this machine and model have, then the methods; and what is said of those it hasn't.

    The plain method `mha` is the model's own attention, so it has no turn of its own.
    """
    found, notes = [], []
    for rival in settings.rivals if settings.rivals is not None else RIVAL_NAMES:
        why = _missing(model, rival)
        if why is None:
            found.append(Contender(RIVAL_NAMES[rival], rival))
        else:
            notes.append(f"{RIVAL_NAMES[rival]}: not measured, {why}")
    return [*found, *(each for each in methods if getattr(each.method, "name", None) != "mha")], notes


def contender(method: Method, name: str | None = None) -> Contender:
    """A method as a contender, under its own name or another."""
    return Contender(name or method.name, None, method)


def distinct_names(methods: Sequence[Contender]) -> list[Contender]:
    """Contenders with a number behind names that occur twice."""
    names = [each.name for each in methods]
    return [
        replace(each, name=f"{each.name} {names[: index + 1].count(each.name)}") if names.count(each.name) > 1 else each
        for index, each in enumerate(methods)
    ]


def _missing(model: PreTrainedModel, rival: str) -> str | None:
    """Why a rival can't be measured, or None where it can."""
    if rival == "flash":
        if model.device.type != "cuda":
            return "flash attention needs a CUDA device"
        if find_spec("flash_attn") is None:
            return "flash_attn isn't installed"
        if model.dtype not in (torch.float16, torch.bfloat16):
            return f"flash attention has no {str(model.dtype).removeprefix('torch.')}"
    if rival in IMPLEMENTATIONS:
        try:
            with _implementation(model, IMPLEMENTATIONS[rival]):
                pass
        except (ValueError, ImportError) as error:
            return str(error).splitlines()[0]
    return None


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    if before == name:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
