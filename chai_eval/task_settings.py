"""Settings of tasks that lm-eval has too, under its names: task files of one's own, and how prompts are built."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from chai_eval.errors import wrong
from chai_eval.schema import SETTINGS, Flag, Recorded, Text, Whole, setting

MULTITURN = "null, false, or true with apply_chat_template=true"


def _folders(given: Any) -> Any:
    each = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(each, list | tuple) or not all(isinstance(path, str | Path) and str(path) for path in each):
        raise ValueError
    paths = tuple(Path(path).expanduser() for path in each)
    for path in paths:
        if not path.is_dir():
            raise wrong("include_path", str(path), "a folder with task files (*.yaml)")
    return paths


@dataclass(frozen=True, config=SETTINGS)
class IncludedTasks:
    """Folders with task files of the user's own, and whether Python that these ask for may run."""

    paths: Annotated[tuple[Path, ...], BeforeValidator(_folders)] = setting(
        (),
        "a folder with lm-eval task files (*.yaml) of your own, or several as [a,b]; a name there goes before "
        "lm-eval's and the paper's",
        typed="include_path",
        composed=None,
        allowed="a folder with task files, several as [a,b], or null",
    )
    code: Flag = setting(
        False,
        "true runs the Python that task files in include_path ask for (!function, metrics of the library evaluate)",
        typed="include_code",
    )

    def as_config(self) -> dict[str, Any]:
        """As records keep it."""
        return {"include_path": [str(path) for path in self.paths] or None, "include_code": self.code}


@dataclass(frozen=True, config=SETTINGS)
class PromptSettings(Recorded):
    """How lm-eval builds a task's prompts. A task that sets `num_fewshot: 0` itself keeps it."""

    num_fewshot: Whole | None = setting(
        None, "examples before each document, as lm-eval draws them; null leaves it to the task"
    )
    apply_chat_template: Flag | Annotated[str, Field(strict=True, min_length=1)] = setting(
        False,
        "true renders prompts through the tokenizer's chat template; or the name of one of its several",
        allowed="true, false, or the name of a template",
    )
    system_instruction: Text | None = setting(
        None, "text before every prompt; the system's turn where a chat template is applied"
    )
    fewshot_as_multiturn: Flag | None = setting(
        None,
        "true: examples as turns of a conversation; false: within one turn; null: true with a chat template",
        allowed=MULTITURN,
    )

    def __post_init__(self) -> None:
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise wrong("fewshot_as_multiturn", True, MULTITURN)

    @property
    def multiturn(self) -> bool:
        """`fewshot_as_multiturn` with lm-eval's default filled in."""
        return bool(self.apply_chat_template) if self.fewshot_as_multiturn is None else self.fewshot_as_multiturn


NONE_OWN = IncludedTasks()
AS_TASKS_SAY = PromptSettings()


def told(config: Mapping[str, Any]) -> list[str]:
    """How prompts were built where a configuration, or a record's, says it: `num_fewshot 2` and the like."""
    given = {name: config[name] for name, usual in AS_TASKS_SAY.as_config().items() if config.get(name, usual) != usual}
    return [f"{name} {textwrap.shorten(str(value), 60, placeholder='...')}" for name, value in given.items()]
