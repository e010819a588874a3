"""Typed settings of a frontier; a wrong value is one line in the user's words."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from chai_eval.schema import SETTINGS, TEXTS, Count, Flag, Folder, Recorded, Text, Whole, group, setting
from chai_eval.settings import ModelSettings, parse_model

Share = Annotated[float, Field(strict=True, gt=0, lt=1)]


@dataclass(frozen=True, config=SETTINGS)
class FrontierSettings(Recorded):
    """Everything that a frontier is told."""

    left_out = ("model", "debug", "out", "figures")

    model: Annotated[ModelSettings, group(parse_model)]
    calibrated: Text = setting(
        "", "what methods take their settings from: a model's name, or a folder", composed="${model.name}"
    )
    text: Text = setting(
        "auto",
        f"{TEXTS}; other text than that of the calibration",
    )
    tokens: Annotated[int, Field(strict=True, ge=8)] = setting(256, "tokens of each sequence")
    sequences: Count = setting(48, "sequences")
    seed: Whole = setting(1234, "order of the text")
    saving: tuple[Share, ...] = setting(
        (0.07, 0.14, 0.2, 0.3, 0.4, 0.5), "shares of the K,V cache to save", allowed="numbers between 0 and 1"
    )
    methods: tuple[str, ...] | None = setting(None, "which methods; null for all that can save a share of the cache")
    figures: Flag | None = setting(
        None, "draw the figure as well as writing the data: true, false; null where matplotlib is installed"
    )
    out: Folder | None = setting(None, "folder to write to; null for results/frontier/<model>-<text>-<tokens>")
    debug: Flag = setting(False, "true shows the traceback of an unexpected error")
