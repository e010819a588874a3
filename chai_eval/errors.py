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
