"""CHAI with the values shared as well: the paper's ablation of what a cluster may share (section 4.5, Table 4)."""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from chai_eval.methods.chai import CHAI
from chai_eval.schema import SETTINGS


@dataclass(frozen=True, config=SETTINGS)
class VReuse(CHAI):
    """As `chai`, but a member takes its representative's values too: its whole head output.

    Approximates: from token `probe_tokens` on, a head's output is that of its cluster's representative. Saves, beyond
    `chai`, the values of all other members and their cache. Settings are those of `chai`.
    """

    name: ClassVar[str] = "v_reuse"
    share_value: ClassVar[bool] = True
