"""Values taken out of a composed configuration one by one, each checked; a wrong one is one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chai_eval.errors import SettingError

_REQUIRED = object()


class Values:
    """The values of one group, taken out one by one; `finish` refuses what nobody asked for."""

    def __init__(self, prefix: str, values: Mapping[str, Any]) -> None:
        self.prefix, self.values, self.known = prefix, values, list[str]()

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """A value as it is; the others check it as well, and raise SettingError where it is wrong."""
        self.known.append(name)
        value = self.values.get(name, default)
        if value is _REQUIRED:
            raise SettingError(f"{self.prefix}{name}: missing; allowed: a value")
        return value

    def text(self, name: str, *, optional: bool = False, default: Any = _REQUIRED) -> str | None:
        value = self.take(name, default)
        # A revision or a folder may look like a number.
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if (value is None and not optional) or not isinstance(value, str | None) or value == "":
            raise wrong(self.prefix + name, value, "a text" + (" or null" if optional else ""))
        return value

    def one_of(self, name: str, allowed: Sequence[str], default: Any = _REQUIRED) -> str:
        value = self.take(name, default)
        if value not in allowed:
            raise wrong(self.prefix + name, value, ", ".join(allowed))
        return str(value)

    def integer(
        self,
        name: str,
        *,
        minimum: int,
        maximum: int | None = None,
        optional: bool = False,
        default: Any = _REQUIRED,
    ) -> int | None:
        value = self.take(name, default)
        if value is None and optional:
            return None
        too_large = isinstance(value, int) and maximum is not None and value > maximum
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum or too_large:
            reach = "up" if maximum is None else f"to {maximum}"
            allowed = f"a whole number from {minimum} {reach}" + (", or null" if optional else "")
            raise wrong(self.prefix + name, value, allowed)
        return value

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise wrong(self.prefix + name, value, "true, false")
        return value

    def mapping(self, name: str, default: Any = _REQUIRED) -> Mapping[str, Any]:
        value = self.take(name, default)
        if value is None and default is not _REQUIRED:
            return {}
        if not isinstance(value, Mapping):
            raise wrong(self.prefix + name, value, "a group of settings")
        return value

    def finish(self) -> None:
        for name in self.values:
            if name not in self.known:
                raise unknown(self.prefix + str(name), str(name), self.known)


def wrong(setting: str, given: Any, allowed: str) -> SettingError:
    """The error of a wrong value: `setting: given …; allowed: …`, on one line."""
    return SettingError(f"{setting}: {_shown(given)} given; allowed: {allowed}")


def unknown(setting: str, given: str, known: Iterable[str]) -> SettingError:
    """The error of a name that isn't one of `known`, with the closest one."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return SettingError(f"{setting}: {_shown(given)} is unknown{hint}; allowed: {', '.join(names) or 'none'}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
