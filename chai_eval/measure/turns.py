"""Turns: in which order contenders run within a repetition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(contenders: Sequence[T], repetition: int) -> list[T]:
    """Contenders in the order of a repetition: A B C, then C A B, then B C A.

    Drift (a processor that heats up, a neighbour that wakes) so hits all alike, and each follows every other one's
    place equally often.
    """
    shift = repetition % len(contenders) if contenders else 0
    return [*contenders[len(contenders) - shift :], *contenders[: len(contenders) - shift]]
