"""Typed settings, made once from the composed configuration; a wrong value is one line in the user's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from chai_eval.measure_settings import MeasureSettings, parse_measure
from chai_eval.schema import SETTINGS, Count, Flag, Folder, Group, Recorded, Text, Whole, as_text, group, read, setting
from chai_eval.task_settings import AS_TASKS_SAY, NONE_OWN, IncludedTasks, PromptSettings

# What NumPy, which lm-eval seeds too, takes.
LARGEST_SEED = 2**32 - 1

DType = Literal["auto", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, config=SETTINGS)
class ModelSettings(Recorded):
    """Which model, and how it is loaded. `name` is what it is called in results."""

    name: Annotated[
        str,
        BeforeValidator(as_text),
        Field(
            pattern=r"^[A-Za-z0-9][\w.+-]*$",
            json_schema_extra={"allowed": "letters, digits and . _ + -, as it names a folder"},
        ),
    ]
    path: Text | None = setting(None, "a local directory with safetensors, a name on the hub, or asset:<name>")
    revision: Text | None = setting(None, "commit, tag or branch on the hub")
    weights: Literal["pretrained", "random"] = setting(
        "pretrained", "pretrained, or random: built from the config, for latency and memory work without weights"
    )
    dtype: DType = setting("auto", "auto (float32 on a CPU, bfloat16 on a GPU), float32, float16, bfloat16")
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|(cuda|xpu)(:\d+)?)$")] = setting(
        "auto", "auto (the GPU where there is one), cpu, cuda, cuda:1", allowed="auto, cpu, cuda, cuda:N, mps, xpu"
    )
    layers: Count | None = setting(None, "keep only the first so many layers")
    device_map: Text | None = setting(None, "auto spreads the model over several devices")
    tensor_parallel: Flag = setting(
        False, "true splits heads and neurons over the processes of torchrun, for a model that one device can't hold"
    )
    trust_remote_code: Flag = setting(False, "true runs model code that comes with the weights")
    untie: Flag = setting(False, "true repeats K and V projections per query head: the exact MHA twin of a GQA model")
    architecture: Group = setting(
        {},
        "the config by model_type and what differs from its defaults, for random weights where none lies at the path",
    )
    config: Group = setting({}, "changes to the config, wherever it comes from")
    tokenizer: Text | None = setting(
        None, "a local directory, a name on the hub, builtin (one token per byte); null: the model's own"
    )
    clusters: Any = setting(
        None, "clusters kept per layer: a list, runs as [[9,17],[3,13]], or a preset; null: calibration is needed"
    )
    default_limit: Count | None = setting(None, "documents per task where no limit is given")
    paper: Text | None = setting(None, "the model's name in the paper's tables")

    @property
    def whole_config(self) -> dict[str, Any]:
        """The architecture with the changes to it: what a model is built from where no config lies at `path`."""
        return {**self.architecture, **self.config}


@dataclass(frozen=True, config=SETTINGS)
class MethodSettings:
    """Which method, and its own settings, which the method itself checks."""

    name: Text
    options: Group = Field(default_factory=dict)

    def as_config(self) -> dict[str, Any]:
        """As records keep it."""
        return {"name": self.name, **self.options}


def _task_choice(given: Any) -> Any:
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError
    stripped = tuple(name.strip() for name in names)
    if not stripped:
        raise ValueError
    return stripped[0] if isinstance(given, str) and len(stripped) == 1 else stripped


@dataclass(frozen=True, config=SETTINGS)
class TaskSettings(Recorded):
    """Which tasks, where their documents come from, and how many of them (None: all)."""

    choice: Annotated[str | tuple[str, ...], BeforeValidator(_task_choice)] = setting(
        "paper",
        "what to score: paper (its five tasks), text, any lm-eval task, or several as [piqa,winogrande]",
        typed="task",
        allowed="paper, the name of a task, or several as [piqa,winogrande]",
    )
    text: Text | None = setting(
        None,
        "running text for task=text: a UTF-8 file, plain (cut into passages at blank lines, each scored on its own) or "
        "JSON lines (documents kept whole); or stdlib, kmmlu, passages, c4, auto (c4 where the hub answers)",
    )
    source: Literal["auto", "local", "hub"] = setting(
        "auto", "where documents come from: local files, the hub, or auto (local where there are any)"
    )
    data_dir: Folder | None = setting(None, "folder with task files of your own, in place of the downloaded ones")
    included: IncludedTasks = NONE_OWN
    prompts: PromptSettings = AS_TASKS_SAY
    limit: Count | None = setting(
        None,
        "documents per task; null for all; 100 for the embedded models unless set",
        composed="${model.default_limit}",
    )


def parse_model(values: Mapping[str, Any]) -> ModelSettings:
    """Make the settings of a model from one file of `conf/model`, with the user's changes; raises SettingError."""
    return read(ModelSettings, values, "model.")


def _method(values: Mapping[str, Any]) -> MethodSettings:
    options = {name: value for name, value in values.items() if name != "name"}
    return read(MethodSettings, {"name": values.get("name"), "options": options}, "method.")


@dataclass(frozen=True, config=SETTINGS)
class Settings(Recorded):
    """Everything that a run is told."""

    left_out = ("debug",)

    model: Annotated[ModelSettings, group(parse_model)]
    method: Annotated[MethodSettings, group(_method)]
    task: TaskSettings = TaskSettings()
    fidelity: Whole | None = setting(
        25,
        "documents of each task on which next-token distributions are compared with MHA's; null for all, 0 for none",
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=LARGEST_SEED)] = setting(
        1234, "seed of what a task draws, such as few-shot examples"
    )
    scoring: Literal["packed", "decode"] = setting(
        "packed",
        "how choices are scored: packed (in packed rows, fast), or decode (the context at once, then token by token "
        "through the cache, as they would be served)",
    )
    batch_tokens: Count | None = setting(
        None, "tokens per batch; null chooses by the memory there is; changes no score"
    )
    results_dir: Folder = setting(Path("results"), "folder that results go to, and are found in again")
    measure: Annotated[MeasureSettings | None, group(parse_measure)] = None
    debug: Flag = setting(False, "true shows the traceback of an unexpected error")

    def baseline(self) -> Settings:
        """The same run under plain multi-head attention."""
        return replace(self, method=MethodSettings("mha"))
