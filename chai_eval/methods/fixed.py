"""Memberships that are known before the request: read from settings, checked, and attended by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

import torch
from pydantic import SkipValidation
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import FixedPlan, Membership, Plan
from chai_eval.attention.membership import membership_from_labels
from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import Calibration, Preset, calibration
from chai_eval.errors import SettingError, shown
from chai_eval.methods.blocks import shared_out
from chai_eval.methods.clustering import Clustering
from chai_eval.schema import SETTINGS

SETTING = "method.membership"

# For each layer one whole number per head.
PerHead = Sequence[Sequence[int]]


def membership_by_representative(representative: Tensor) -> Membership:
    """The clusters of heads that are served by the same head.

    Parameters
    ----------
    representative : Tensor [rows, heads], int64
        The head that serves each head; one that serves others serves itself. As many different ones in every row.
    """
    same = representative[:, :, None] == representative[:, None, :]
    lowest = same.to(torch.uint8).argmax(-1)  # the first head that is served by the same one
    clusters = int(torch.unique(representative[0]).numel())
    found = membership_from_labels(lowest, clusters)
    return Membership(found.cluster, representative.gather(1, found.representative))


@dataclass(frozen=True, config=SETTINGS)
class FixedMembership(Clustering):
    """A method whose memberships come from calibration or from the user.

    Parameters
    ----------
    membership : str, or per layer a list with an entry for each head
        A calibration (a model's name, or a folder), or what `entries` says.
    preset : "conservative", "balanced" or "aggressive"
        Which of the calibration's memberships.
    """

    membership: SkipValidation[str | PerHead | None] = None
    preset: Preset = "balanced"

    tensor: ClassVar[str]  # of the calibration, before the preset's name
    entries: ClassVar[str]

    def __post_init__(self) -> None:
        if self._calibration is None:
            check_per_head(SETTING, self.membership, self.entries)
            self._representatives()

    @abstractmethod
    def _serving(self, layer: int, entries: list[int]) -> list[int]:
        """For each head of a layer the head that serves it, from what was given."""

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        preset = found.pop("preset")
        if self._calibration is None:
            return {**found, "membership": self._representatives()}
        return {**found, "membership": {"sha256": self._calibration.sha256, "preset": preset}}

    def block_plans(self, model: PreTrainedModel, heads: Sequence[int]) -> list[list[Plan | None]]:
        known, representatives = self._calibration, self._representatives()
        if known is not None:
            known.check(model)
        check_fits(SETTING, representatives, model)
        if known is None or len(heads) == 1:
            of_layers = [_cut(layer, serving, heads) for layer, serving in enumerate(representatives)]
        else:
            of_layers = self._within(known, representatives, tuple(heads))
        return [[self._block_plan(serving, model.device) for serving in of_layer] for of_layer in of_layers]

    def _within(self, known: Calibration, serving: PerHead, heads: tuple[int, ...]) -> list[list[list[int]]]:
        """By layer and block the head that serves each head of the block, with its share of the clusters there are."""
        if heads not in self._found_within:
            counts = [shared_out(len(set(each)), heads, layer) for layer, each in enumerate(serving)]
            of_blocks = [
                self._calibrated(known, slice(stop - own, stop), [each[block] for each in counts])
                for block, (own, stop) in enumerate(zip(heads, accumulate(heads), strict=True))
            ]
            self._found_within[heads] = [list(each) for each in zip(*of_blocks, strict=True)]
        return self._found_within[heads]

    @cached_property
    def _found_within(self) -> dict[tuple[int, ...], list[list[list[int]]]]:
        return {}  # by the heads of the blocks: finding them takes seconds

    def _block_plan(self, serving: Sequence[int], device: torch.device) -> Plan | None:
        membership = membership_by_representative(torch.tensor([serving], device=device))
        return self._plan(membership) if membership.clusters < len(serving) else None

    def _plan(self, membership: Membership) -> Plan:
        return FixedPlan.of(membership)

    @abstractmethod
    def _calibrated(self, known: Calibration, block: slice, counts: Sequence[int]) -> list[list[int]]:
        """For each layer the head that serves each head of a block, from 0 there, by a calibration of the whole.

        `counts` are the clusters of each layer in the block.
        """

    @cached_property
    def _calibration(self) -> Calibration | None:
        return calibration(self.membership, SETTING) if isinstance(self.membership, str) else None

    def _representatives(self) -> list[list[int]]:
        given: Any = self.membership
        if self._calibration is not None:
            given = self._calibration.membership(self.tensor, self.preset)
        return [self._serving(layer, list(entries)) for layer, entries in enumerate(given)]


def _cut(layer: int, serving: Sequence[int], heads: Sequence[int]) -> list[list[int]]:
    """The head that serves each head, of each block of so many heads, from 0 there; SettingError for one of another."""
    found = []
    for own, stop in zip(heads, accumulate(heads), strict=True):
        start = stop - own
        for head in range(start, stop):
            if not start <= serving[head] < stop:
                raise SettingError(
                    f"{SETTING}: head {serving[head]} given for head {head} of layer {layer} with tensor_parallel="
                    f"{len(heads)}; allowed: heads {start} to {stop - 1}, of the same device"
                )
        found.append([by - start for by in serving[start:stop]])
    return found


def check_per_head(setting: str, spec: object, what: str) -> None:
    """Refuse anything but a list of lists of whole numbers from 0.

    Raises
    ------
    SettingError
    """
    if isinstance(spec, Sequence) and not isinstance(spec, str) and spec and all(map(_whole_numbers, spec)):
        return
    raise SettingError(f"{setting}: {shown(spec, 80)} given; allowed: a calibration, or per layer a list of {what}")


def check_fits(setting: str, spec: PerHead, model: PreTrainedModel) -> None:
    """Refuse lists that do not have one entry for each head of each layer of a model.

    Raises
    ------
    SettingError
    """
    shape = attention_shape(model)
    if len(spec) != shape.layers:
        raise SettingError(
            f"{setting}: {len(spec)} layers given for a model of {shape.layers} layers; allowed: one list per layer"
        )
    for layer, entries in enumerate(spec):
        if len(entries) != shape.heads:
            raise SettingError(
                f"{setting}: {len(entries)} entries given for layer {layer}; allowed: {shape.heads}, one per head"
            )


def _whole_numbers(entries: object) -> bool:
    return (
        isinstance(entries, Sequence)
        and not isinstance(entries, str)
        and all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in entries)
    )
