"""CHAI with a membership that calibration fixed once for all requests (the paper's CHAI-static)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from chai_eval.methods.checks import one_of
from chai_eval.methods.fixed import FixedMembership


@dataclass(frozen=True)
class CHAIStatic(FixedMembership):
    """Heads that attended alike over calibration text share one representative's probabilities, in every request.

    Approximates: every head's probabilities, from the first token on, are those of its cluster's representative; its
    values stay its own. Saves what `chai` saves, and the probe as well.

    Parameters
    ----------
    membership : str, or per layer a list with a cluster label for each head
        A calibration (a model's name, or a folder), or labels: heads with equal labels form a cluster.
    preset : "conservative", "balanced" or "aggressive"
        Which of the calibration's memberships.
    representative : "first"
        The lowest head of the cluster.
    """

    representative: str = "first"

    name: ClassVar[str] = "chai_static"
    tensor: ClassVar[str] = "static_membership"
    entries: ClassVar[str] = "cluster labels"

    def __post_init__(self) -> None:
        one_of("method.representative", self.representative, ("first",))
        super().__post_init__()

    def _serving(self, layer: int, entries: list[int]) -> list[int]:
        return [entries.index(label) for label in entries]
