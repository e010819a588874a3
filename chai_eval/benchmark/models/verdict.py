"""What becomes of one model type: right, refused and why, couldn't be built, or wrong."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from chai_eval.benchmark.models.build import POSITIONS, small_model, windows
from chai_eval.benchmark.models.compare import ALONE, METHODS, MODES, Mode, Reference, difference, largest, reference
from chai_eval.errors import SettingError

# Largest difference of log-probabilities that is rounding. Single precision leaves a hundredth of it.
TOLERANCE = 1e-4

RIGHT, REFUSED, UNBUILT, WRONG, FAILED = "right", "refused", "couldn't be built", "WRONG", "FAILED"
BAD = (WRONG, FAILED)


@dataclass(frozen=True)
class Outcome:
    """What became of one method on one model type: `RIGHT`, `REFUSED`, `WRONG` or `FAILED`, and the reason.

    `differences` are the largest from the stock model, by mode that ran; `notes` say what the stock model itself
    can't do, or does otherwise than alone.
    """

    verdict: str
    differences: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def why(self) -> str:
        """Why it is no better than it is."""
        off = [f"{mode} off by {each:.2g}" for mode, each in self.differences.items() if each > TOLERANCE]
        return "; ".join([self.reason] * bool(self.reason) + off)


@dataclass(frozen=True)
class Verdict:
    """What became of one model type, by method; or the reason why it, or the stock model, could not be built or asked.

    `bounds` are fields of its config by which a query looks less far back than texts are long, all the way through
    the model.
    """

    kind: str
    model: str = ""
    bounds: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    reason: str = ""
    unbuilt: bool = False

    @property
    def verdict(self) -> str:
        """The worst of any method."""
        if self.unbuilt:
            return UNBUILT
        found = {each.verdict for each in self.outcomes.values()}
        return next((each for each in (FAILED, WRONG, RIGHT, REFUSED) if each in found), FAILED)

    @property
    def differences(self) -> list[tuple[str, str, float]]:
        """(method, mode, largest difference from the stock model) of all that ran."""
        return [(name, mode, off) for name, one in self.outcomes.items() for mode, off in one.differences.items()]

    @property
    def why(self) -> str:
        """Why it is no better: reasons of methods with this verdict, those of several once, and what is off."""
        if self.reason:
            return self.reason
        methods: dict[str, list[str]] = {}
        for name, each in self.outcomes.items():
            if each.verdict == self.verdict and (reason := each.why):
                methods.setdefault(reason, []).append(name)
        if len(methods) == 1 and len(self.outcomes) == len(next(iter(methods.values()))):
            return next(iter(methods))
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in methods.items())

    @property
    def summary(self) -> str:
        """In one line."""
        return f"{self.verdict} {self.why}" if self.verdict != RIGHT else RIGHT


def judge(kind: str) -> Verdict:
    """Build a model of a type, ask it as it is, and under every method."""
    try:
        model = small_model(kind)
        asked = reference(model)
    except Exception as error:
        return Verdict(kind, reason=line(error), unbuilt=True)
    outcomes = {name: outcome(name, model, asked) for name in METHODS}
    return Verdict(kind, type(model).__name__, _bounds(kind, model, asked), outcomes)


def outcome(name: str, model: PreTrainedModel, asked: Reference) -> Outcome:
    """What becomes of a method."""
    try:
        method = METHODS[name](model)
        method.check(model)
    except SettingError as error:
        return Outcome(REFUSED, reason=str(error))
    except Exception as error:
        return Outcome(FAILED, reason=f"check: {where(error)}")
    differences: dict[str, float] = {}
    reasons: list[str] = []
    notes: list[str] = []
    for mode in MODES:
        expected = mode.expected(asked)
        try:
            with torch.no_grad(), method.applied(model):
                found = mode.run(model, asked)
        except Exception as error:
            _, cannot = _stock(mode, model, asked)
            if cannot:
                notes.append(f"{mode.name}: the stock model can't ({cannot})")
            else:
                reasons.append(f"{mode.name}: {where(error)}")
            continue
        off = largest(mode, found, expected)
        if off > TOLERANCE:
            stock, _ = _stock(mode, model, asked)
            own = largest(mode, stock, expected) if stock else 0.0
            if own > TOLERANCE:
                # What it says then is the model's own affair (some can't be told where padded texts begin).
                notes.append(f"{mode.name}: the stock model is off by {own:.1g} too")
                off = max(map(difference, found, stock))
        differences[mode.name] = off
    wrong = max(differences.values(), default=0.0) > TOLERANCE
    return Outcome(FAILED if reasons else WRONG if wrong else RIGHT, differences, "; ".join(reasons), notes)


def _stock(mode: Mode, model: PreTrainedModel, asked: Reference) -> tuple[list[torch.Tensor], str]:
    """What the stock model itself says in a mode, and why it can't be run so; neither where only methods run so."""
    try:
        with torch.no_grad():
            return (mode.run(model, asked), "") if mode.stock else ([], "")
    except Exception as error:
        return [], line(error)


def _bounds(kind: str, model: PreTrainedModel, asked: Reference) -> list[str]:
    """Windows that change what the stock model says of these texts: with wide ones the same model says otherwise."""
    names = windows(model.config)
    if not names:
        return []
    with torch.no_grad():
        wide = ALONE.run(small_model(kind, window=POSITIONS), asked)
    return names if largest(ALONE, wide, asked.by_token) > TOLERANCE else []


def line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def where(error: Exception) -> str:
    """An error in one line, with the place in the code."""
    last = traceback.extract_tb(error.__traceback__)[:-4:-1]
    places = " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in last)
    return f"{line(error)} ({places})"
