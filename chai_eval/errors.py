"""The two ways a run can end badly, told apart by who can mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SettingError(ValueError):
    """A setting has a value that is not allowed: one line naming the setting, the value, what is allowed.

    The command line prints the line and ends with status 2, having written nothing.
    """


class RunError(RuntimeError):
    """Something went wrong while running (no network, logits that are not finite, a full disk).

    The command line prints the line and ends with status 1.
    """


def wrong(setting: str, given: object, allowed: str) -> SettingError:
    """The error of a wrong value: `setting: given …; allowed: …`, on one line."""
    return SettingError(f"{setting}: {_shown(given)} given; allowed: {allowed}")


def unknown(setting: str, given: str, known: Iterable[str]) -> SettingError:
    """The error of a name that isn't one of `known`, with the closest one."""
    names = sorted(known)
    said = f"{setting}: {_shown(given)} is unknown{closest(given, names)}"
    return SettingError(f"{said}; allowed: {', '.join(names) or 'none'}")


def closest(given: str, names: Iterable[str], count: int = 1) -> str:
    """The names, `count` at most, that may have been meant, as ` (did you mean …?)`; nothing where none is close."""
    close = difflib.get_close_matches(given, list(names), n=count)
    return f" (did you mean {', '.join(close)}?)" if close else ""


def failure_line(error: BaseException) -> str:
    """Say on one line what went wrong: our own errors in their words, others with their type before it."""
    text = " ".join(str(error).split())
    if isinstance(error, SettingError | RunError):
        return text
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return f"batch_tokens: out of memory; a smaller batch_tokens needs less ({text[:200]})"
    return f"{name}: {text[:300]}" if text else name


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
