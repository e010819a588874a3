"""The two ways a run can end badly, told apart by who can mend it."""

from __future__ import annotations


class SettingError(ValueError):
    """A setting has a value that is not allowed: one line naming the setting, the value, what is allowed.

    The command line prints the line and ends with status 2, having written nothing.
    """


class RunError(RuntimeError):
    """Something went wrong while running (no network, logits that are not finite, a full disk).

    The command line prints the line and ends with status 1.
    """


def failure_line(error: BaseException) -> str:
    """Say on one line what went wrong: our own errors in their words, others with their type before it."""
    text = " ".join(str(error).split())
    if isinstance(error, SettingError | RunError):
        return text
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return f"batch_tokens: out of memory; a smaller batch_tokens needs less ({text[:200]})"
    return f"{name}: {text[:300]}" if text else name
