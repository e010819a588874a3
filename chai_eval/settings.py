"""Typed settings, made once from the composed configuration; a wrong value is one line in the user's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chai_eval.task_settings import AS_TASKS_SAY, NONE_OWN, IncludedTasks, PromptSettings, parse_included, parse_prompts
from chai_eval.values import Values, wrong

if TYPE_CHECKING:
    from chai_eval.measure.settings import MeasureSettings

DTYPES = ("auto", "float32", "float16", "bfloat16")
SOURCES = ("auto", "local", "hub")
WEIGHTS = ("pretrained", "random")
SCORINGS = ("packed", "decode")
# What NumPy, which lm-eval seeds too, takes.
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how it is loaded.

    Attributes
    ----------
    name
        What the model is called in results.
    path
        `asset:<name>` for an embedded model, a name on the hub, or a local directory; None for a model that is
        made from `config` alone.
    revision
        Commit, tag or branch on the hub.
    weights
        `random` builds the model from its configuration without any weights.
    dtype, device
        `auto`: float32 on a CPU, bfloat16 on a GPU; the GPU where there is one.
    layers
        Keep the first layers only; None keeps all.
    device_map
        Passed to transformers for a model that is too large for one device.
    untie
        Repeat K and V projections per query head: the exact MHA twin of a GQA model.
    architecture
        The model's configuration (model_type and what differs from its defaults), for random weights where no other
        lies at `path`.
    config
        Changes to the configuration, wherever it comes from.
    tokenizer
        A local directory, a name on the hub, or `builtin`; None takes the model's own.
    clusters
        Cluster counts that methods use unless told otherwise: a preset, a list, a run-length list, or None.
    default_limit
        Documents per task unless `limit` is set.
    paper
        The model's name in `results/paper/tables.csv`.
    """

    name: str
    path: str | None = None
    revision: str | None = None
    weights: str = "pretrained"
    dtype: str = "auto"
    device: str = "auto"
    layers: int | None = None
    device_map: str | None = None
    trust_remote_code: bool = False
    untie: bool = False
    architecture: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    clusters: Any = None
    default_limit: int | None = None
    paper: str | None = None

    @property
    def whole_config(self) -> dict[str, Any]:
        """The architecture with the changes to it: what a model is built from where no config lies at `path`."""
        return {**self.architecture, **self.config}

    def plain(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "architecture": dict(self.architecture), "config": dict(self.config)}


@dataclass(frozen=True)
class MethodSettings:
    """Which method, and its own settings, which the method itself checks."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskSettings:
    """Which tasks, where their documents come from, and how many of them (None: all).

    Attributes
    ----------
    text
        What the task `text` scores: `passages`, `c4` or the path of a file, of which plain text is cut into passages.
    included
        Task files of the user's own.
    prompts
        How prompts are built.
    """

    choice: str | tuple[str, ...] = "paper"
    source: str = "auto"
    data_dir: Path | None = None
    limit: int | None = None
    text: str | None = None
    included: IncludedTasks = NONE_OWN
    prompts: PromptSettings = AS_TASKS_SAY


@dataclass(frozen=True)
class Settings:
    """Everything that a run is told.

    Attributes
    ----------
    seed
        Seed of whatever a task draws (few-shot examples).
    scoring
        `packed`: requests in packed rows; `decode`: contexts at once, continuations token by token through the cache.
    batch_tokens
        Tokens in one batch; None leaves it to the memory there is. Changes no score.
    fidelity
        Documents of each task on which next-token distributions are compared with MHA's; None for all, 0 for none.
    measure
        Latency and memory to measure after scoring; None for nothing.
    """

    model: ModelSettings
    method: MethodSettings
    task: TaskSettings = TaskSettings()
    seed: int = 1234
    scoring: str = "packed"
    batch_tokens: int | None = None
    fidelity: int | None = 25
    results_dir: Path = Path("results")
    measure: MeasureSettings | None = None
    debug: bool = False

    def baseline(self) -> Settings:
        """The same run under plain multi-head attention."""
        return replace(self, method=MethodSettings("mha"))

    def as_config(self) -> dict[str, Any]:
        """The resolved configuration as plain JSON values, as records keep it."""
        return {
            "model": self.model.plain(),
            "method": {"name": self.method.name, **self.method.options},
            "task": self.task.choice if isinstance(self.task.choice, str) else list(self.task.choice),
            "source": self.task.source,
            "data_dir": None if self.task.data_dir is None else str(self.task.data_dir),
            "limit": self.task.limit,
            "text": self.task.text,
            **self.task.included.as_config(),
            **self.task.prompts.as_config(),
            "seed": self.seed,
            "scoring": self.scoring,
            "batch_tokens": self.batch_tokens,
            "fidelity": self.fidelity,
            "measure": None if self.measure is None else self.measure.as_config(),
            "results_dir": str(self.results_dir),
        }


def parse_settings(config: Mapping[str, Any]) -> Settings:
    """Make settings from the composed configuration as plain containers.

    Raises
    ------
    SettingError
        For the first setting that is unknown, missing or has a wrong value.
    """
    from chai_eval.measure.settings import parse_measure

    top = Values("", config)
    data_dir = top.text("data_dir", optional=True)
    settings = Settings(
        model=parse_model(top.mapping("model")),
        method=_parse_method(top.mapping("method")),
        task=TaskSettings(
            choice=_task_choice(top.take("task")),
            source=top.one_of("source", SOURCES),
            data_dir=None if data_dir is None else Path(data_dir).expanduser(),
            limit=top.integer("limit", minimum=1, optional=True),
            text=top.text("text", optional=True),
            included=parse_included(top),
            prompts=parse_prompts(top),
        ),
        seed=top.integer("seed", minimum=0, maximum=LARGEST_SEED) or 0,
        scoring=top.one_of("scoring", SCORINGS),
        batch_tokens=top.integer("batch_tokens", minimum=1, optional=True),
        fidelity=top.integer("fidelity", minimum=0, optional=True),
        results_dir=Path(top.text("results_dir") or ".").expanduser(),
        measure=parse_measure(top.mapping("measure", default={})),
        debug=top.flag("debug"),
    )
    top.finish()
    return settings


def parse_model(values: Mapping[str, Any]) -> ModelSettings:
    """Make the settings of a model from one file of `conf/model`, with the user's changes.

    Raises
    ------
    SettingError
    """
    model = Values("model.", values)
    name = model.text("name") or ""
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise wrong("model.name", name, "letters, digits and . _ + -, as it names a folder")
    device = model.text("device", default="auto") or ""
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", device):
        raise wrong("model.device", device, "auto, cpu, cuda, cuda:N, mps, xpu")
    settings = ModelSettings(
        name=name,
        path=model.text("path", optional=True, default=None),
        revision=model.text("revision", optional=True, default=None),
        weights=model.one_of("weights", WEIGHTS, default="pretrained"),
        dtype=model.one_of("dtype", DTYPES, default="auto"),
        device=device,
        layers=model.integer("layers", minimum=1, optional=True, default=None),
        device_map=model.text("device_map", optional=True, default=None),
        trust_remote_code=model.flag("trust_remote_code", default=False),
        untie=model.flag("untie", default=False),
        architecture=model.mapping("architecture", default={}),
        config=model.mapping("config", default={}),
        tokenizer=model.text("tokenizer", optional=True, default=None),
        clusters=model.take("clusters", default=None),
        default_limit=model.integer("default_limit", minimum=1, optional=True, default=None),
        paper=model.text("paper", optional=True, default=None),
    )
    model.finish()
    return settings


def _parse_method(values: Mapping[str, Any]) -> MethodSettings:
    options = dict(values)
    name = Values("method.", options).text("name")
    del options["name"]
    return MethodSettings(name or "", options)


def _task_choice(given: Any) -> str | tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    if (
        not isinstance(names, Sequence)
        or not names
        or not all(isinstance(name, str) and name.strip() for name in names)
    ):
        raise wrong("task", given, "paper, the name of a task, or several as [piqa,winogrande]")
    stripped = tuple(name.strip() for name in names)
    return stripped[0] if isinstance(given, str) and len(stripped) == 1 else stripped
