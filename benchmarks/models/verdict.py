"""What becomes of one model type: right, refused and why, couldn't be built, or wrong."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.models.build import POSITIONS, small_model, windows
from benchmarks.models.compare import METHODS, MODES, Mode, Reference, difference, largest, reference
from chai_eval.errors import SettingError

# Largest difference of log-probabilities that is rounding. Single precision leaves a hundredth of it.
TOLERANCE = 1e-4

RIGHT, REFUSED, UNBUILT, WRONG, FAILED = "right", "refused", "couldn't be built", "WRONG", "FAILED"
BAD = (WRONG, FAILED)


@dataclass(frozen=True)
class Outcome:
    """What became of one method on one model type.

    Attributes
    ----------
    verdict : str
        `RIGHT`, `REFUSED`, `WRONG` or `FAILED`.
    differences : dict of mode to float
        Largest difference from the stock model, of modes that ran.
    reason : str
        Why it was refused, or what failed.
    notes : list of str
        What the stock model itself can't do, or does otherwise than alone.
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
    """What became of one model type.

    Attributes
    ----------
    kind : str
    model : str
        Its class.
    bounds : list of str
        Fields of its config by which a query looks less far back than texts are long, all the way through the model.
    outcomes : dict of method to Outcome
    reason : str
        Why it couldn't be built, or what failed.
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
    reasons, notes = [], []
    for mode in MODES:
        try:
            with torch.no_grad(), method.applied(model):
                found = mode.run(model, asked)
        except Exception as error:
            if mode.stock and (stock := _stock_fails(mode, model, asked)):
                notes.append(f"{mode.name}: the stock model can't ({stock})")
            else:
                reasons.append(f"{mode.name}: {where(error)}")
            continue
        off = largest(mode, found, mode.expected(asked))
        if off > TOLERANCE and mode.stock and (own := _stock(mode, model, asked)) is not None:
            theirs = largest(mode, own, mode.expected(asked))
            from_theirs = max(map(difference, found, own))
            if theirs > TOLERANCE and from_theirs <= TOLERANCE:
                notes.append(f"{mode.name}: as the stock model, which is {theirs:.1g} from what it says alone")
                off = from_theirs
            elif theirs > TOLERANCE:
                notes.append(f"{mode.name}: the stock model is {theirs:.1g} from what it says alone")
        differences[mode.name] = off
    wrong = max(differences.values(), default=0.0) > TOLERANCE
    return Outcome(FAILED if reasons else WRONG if wrong else RIGHT, differences, "; ".join(reasons), notes)


def _stock(mode: Mode, model: PreTrainedModel, asked: Reference) -> list[torch.Tensor] | None:
    """What the stock model gives in a mode; None where it can't."""
    try:
        with torch.no_grad():
            return mode.run(model, asked)
    except Exception:
        return None


def _stock_fails(mode: Mode, model: PreTrainedModel, asked: Reference) -> str:
    try:
        with torch.no_grad():
            mode.run(model, asked)
    except Exception as error:
        return line(error)
    return ""


def _bounds(kind: str, model: PreTrainedModel, asked: Reference) -> list[str]:
    """Windows that change what the stock model says of these texts: the same model with wide ones says something else."""
    names = windows(model.config)
    if not names:
        return []
    wide = reference(small_model(kind, window=POSITIONS))
    return names if max(map(difference, wide.by_token, asked.by_token)) > TOLERANCE else []


def line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def where(error: Exception) -> str:
    """An error in one line, with the place in the code."""
    last = traceback.extract_tb(error.__traceback__)[-3:]
    return f"{line(error)} ({' < '.join(f'{Path(each.filename).name}:{each.lineno} {each.name}' for each in last[::-1])})"
