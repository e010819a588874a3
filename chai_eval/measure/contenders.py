"""Contenders: the model under its own attention, and under methods, each put in for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from chai_eval.attention import Hooks, Takeover, apply
from chai_eval.measure_settings import MeasureSettings
from chai_eval.methods import Method
from chai_eval.methods.mha import MHA

# The model's own attention by transformers' names; `rows` is plain attention on the cache that methods have.
IMPLEMENTATIONS = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2", "rows": "sdpa"}
# What ratios are taken to, in this order of preference.
RIVAL_NAMES = {rival: f"mha ({rival})" for rival in IMPLEMENTATIONS}
BASELINE = RIVAL_NAMES["sdpa"]


@dataclass(frozen=True)
class Contender:
    """Something that is measured, under a name that no other has: a method, or a rival of methods.

    A rival is the model's own attention as `sdpa`, `eager` or `flash`, or `rows`; its method clusters nothing.
    """

    name: str
    rival: str | None = None
    method: Method = field(default_factory=MHA)

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[Takeover | None]:
        """Run the model as this contender while the context lasts."""
        with _implementation(model, IMPLEMENTATIONS[self.rival or "sdpa"]):
            applied: AbstractContextManager[Takeover | None] = nullcontext()
            if self.rival is None:
                applied = self.method.applied(model)
            elif self.rival == "rows":
                applied = apply(model, Hooks())
            with applied as handle:
                yield handle

    def as_config(self) -> dict[str, Any]:
        """Plain JSON values, as records keep them."""
        return {"name": self.name, "attention": self.rival, "method": self.method.name, **self.method.settings()}


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
    return [*found, *(each for each in methods if each.rival or each.method.name != "mha")], notes


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
    try:
        with _implementation(model, IMPLEMENTATIONS[rival]):
            return None
    except (ValueError, ImportError) as error:
        return str(error).splitlines()[0]


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
