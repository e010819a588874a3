"""Checks of settings that several methods share: each failure is one line in the user's words."""

from __future__ import annotations

from collections.abc import Sequence

from chai_eval.errors import SettingError


def positive(setting: str, value: object) -> None:
    """Refuse anything but a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingError(f"{setting}: {value!r} given; allowed: whole numbers from 1")


def from_zero(setting: str, value: object) -> None:
    """Refuse anything but a whole number of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SettingError(f"{setting}: {value!r} given; allowed: whole numbers from 0")


def flag(setting: str, value: object) -> None:
    """Refuse anything but true and false."""
    if not isinstance(value, bool):
        raise SettingError(f"{setting}: {value!r} given; allowed: true, false")


def fraction(setting: str, value: object) -> None:
    """Refuse anything but a number from 0 up to, not including, 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise SettingError(f"{setting}: {value!r} given; allowed: numbers from 0 to below 1")


def share(setting: str, value: object) -> None:
    """Refuse anything but a number above 0 up to 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise SettingError(f"{setting}: {value!r} given; allowed: numbers above 0 up to 1")


def one_of(setting: str, value: object, allowed: Sequence[object]) -> None:
    """Refuse anything but one of a few."""
    if value not in allowed:
        raise SettingError(f"{setting}: {value!r} given; allowed: {', '.join(map(str, allowed))}")
