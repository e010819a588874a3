"""What an experiment is (a file of `conf/experiment/`, read and checked), and what of it is to be done."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from chai_eval.calibration.settings import AnalysisSettings
from chai_eval.schema import SETTINGS, Group, Text, setting
from chai_eval.settings import Settings
from chai_eval.store.folder import EXPERIMENTS

Shows = Literal["scores", "head_correlation", "error_curves", "membership_changes", "kv_memory", "latency"]
Share = Annotated[float, Field(strict=True, gt=0, lt=1)]

# Whose settings a file of `conf/experiment/` changes: those of `analyse`, or else those of a run (`config`).
ANALYSES = ("head_correlation", "error_curves", "membership_changes")


@dataclass(frozen=True, config=SETTINGS)
class Experiment:
    """What stands under `experiment:` in a file of `conf/experiment/`; the rest of the file are settings."""

    name: Text
    title: Text
    paper: Text
    shows: Shows
    paper_model: Text | None = setting(
        None, "the model whose figures the paper has, as in results/paper; null where it has none"
    )
    runs: Group = setting({}, "what is compared, by the name that it has in tables: settings as they are typed")
    methods: tuple[Text, ...] = setting(
        (), "in place of runs: methods at equal savings", allowed="methods, as [chai,kv_rank]"
    )
    savings: tuple[Share, ...] = setting(
        (), "shares of the K,V cache that these methods save", allowed="numbers between 0 and 1, as [0.07,0.14]"
    )
    against: Text | None = setting(None, "the run that the others are compared with as well, document by document")
    x: Text | None = setting(
        None, "what a figure has to the right: a setting of the method, or saving; null for a line a run"
    )
    notes: tuple[Text, ...] = setting((), "said below the table", allowed="texts")
    quick: str = setting("", "settings of quick=true, as they are typed")


@dataclasses.dataclass(frozen=True)
class Plan:
    """An experiment with the settings that it is done with.

    Attributes
    ----------
    settings : Settings or AnalysisSettings
        Of the whole; those of an analysis have no runs.
    runs : mapping of str to Settings
        What is compared, by name; empty where methods at equal savings are.
    results_dir : Path
        Where results lie, and experiments in a folder beside them.
    figures : bool or None
        Whether figures are drawn; None where matplotlib is installed.
    command : str
        What can be typed to do it again.
    """

    experiment: Experiment
    settings: Settings | AnalysisSettings
    runs: Mapping[str, Settings]
    results_dir: Path
    quick: bool
    figures: bool | None
    command: str

    @property
    def model(self) -> str:
        """The model's name."""
        return self.settings.model.name

    @property
    def title(self) -> str:
        """What stands above its table and figures."""
        return f"{self.experiment.title}{' (quick)' if self.quick else ''}"

    @property
    def folder(self) -> Path:
        """Where its data, table, figures and record lie."""
        return self.results_dir / EXPERIMENTS / self.experiment.name / f"{self.model}{'-quick' if self.quick else ''}"

    @property
    def scoring(self) -> Settings:
        """Settings of an experiment that scores or measures."""
        assert isinstance(self.settings, Settings)
        return self.settings

    @property
    def analysis(self) -> AnalysisSettings:
        """Settings of an experiment that looks at heads."""
        assert isinstance(self.settings, AnalysisSettings)
        return self.settings

    def as_config(self) -> dict[str, Any]:
        """All settings as plain JSON values; methods are those of the runs."""
        found = {"model": self.settings.model.as_config(), **self.settings.as_config()}
        found.pop("method", None)
        runs = {label: each.method.as_config() for label, each in self.runs.items()}
        return {"settings": found, **({"runs": runs} if runs else {})}
