"""What a user asks for on the command line, before it is read as settings."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chai_eval.scoring.ranks import Ranks

if TYPE_CHECKING:
    from chai_eval.session import Session


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes
    ----------
    arguments
        Settings and options as they were typed, without the command and without `-m`, which is `multirun`.
    debug
        Whether the traceback of an unexpected error is wanted.
    session
        Models that are loaded already.
    ranks
        Processes that do this together.
    """

    command: str
    arguments: list[str]
    multirun: bool
    debug: bool
    session: Session | None
    ranks: Ranks

    @property
    def line(self) -> str:
        """What can be typed again."""
        return shlex.join(["python", "-m", "chai_eval", self.command, *self.arguments])
