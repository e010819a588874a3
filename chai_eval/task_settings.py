"""Settings of tasks that lm-eval has too, under its names: task files of one's own, and how prompts are built."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chai_eval.values import Values, wrong


@dataclass(frozen=True)
class IncludedTasks:
    """Folders with task files of the user's own.

    Attributes
    ----------
    paths
        What lm-eval calls `include_path`.
    code
        Whether Python that these files ask for may run.
    """

    paths: tuple[Path, ...] = ()
    code: bool = False

    def as_config(self) -> dict[str, Any]:
        """As records keep it."""
        return {"include_path": [str(path) for path in self.paths] or None, "include_code": self.code}


@dataclass(frozen=True)
class PromptSettings:
    """How lm-eval builds a task's prompts.

    Attributes
    ----------
    num_fewshot
        Examples before each document; None leaves it to the task. A task that sets 0 itself keeps it.
    apply_chat_template
        Whether prompts go through the tokenizer's chat template, or the name of one of its several.
    system_instruction
        What goes before every prompt.
    fewshot_as_multiturn
        Whether examples are turns of a conversation; None: where a chat template is applied.
    """

    num_fewshot: int | None = None
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None

    @property
    def multiturn(self) -> bool:
        """`fewshot_as_multiturn` with lm-eval's default filled in."""
        return bool(self.apply_chat_template) if self.fewshot_as_multiturn is None else self.fewshot_as_multiturn

    def as_config(self) -> dict[str, Any]:
        """As records keep it."""
        return asdict(self)


NONE_OWN = IncludedTasks()
AS_TASKS_SAY = PromptSettings()


def told(config: Mapping[str, Any]) -> list[str]:
    """How prompts were built where a configuration, or a record's, says it: `num_fewshot 2` and the like."""
    given = {name: config[name] for name, usual in AS_TASKS_SAY.as_config().items() if config.get(name, usual) != usual}
    return [f"{name} {textwrap.shorten(str(value), 60, placeholder='...')}" for name, value in given.items()]


def parse_included(top: Values) -> IncludedTasks:
    """Take the settings of the user's own task files.

    Raises
    ------
    SettingError
    """
    given = top.take("include_path")
    each = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(each, Sequence) or not all(isinstance(path, str) and path for path in each):
        raise wrong("include_path", given, "a folder with task files, several as [a,b], or null")
    paths = tuple(Path(path).expanduser() for path in each)
    for path in paths:
        if not path.is_dir():
            raise wrong("include_path", str(path), "a folder with task files (*.yaml)")
    return IncludedTasks(paths, top.flag("include_code"))


def parse_prompts(top: Values) -> PromptSettings:
    """Take the settings of prompts.

    Raises
    ------
    SettingError
    """
    template = top.take("apply_chat_template")
    if not isinstance(template, bool | str) or template == "":
        raise wrong("apply_chat_template", template, "true, false, or the name of a template")
    multiturn = top.take("fewshot_as_multiturn")
    if not isinstance(multiturn, bool | None) or (multiturn and not template):
        raise wrong("fewshot_as_multiturn", multiturn, "null, false, or true with apply_chat_template=true")
    return PromptSettings(
        num_fewshot=top.integer("num_fewshot", minimum=0, optional=True),
        apply_chat_template=template,
        system_instruction=top.text("system_instruction", optional=True),
        fewshot_as_multiturn=multiturn,
    )
