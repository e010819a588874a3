"""A tokenizer's chat template, applied as lm-eval applies it."""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import TemplateError
from lm_eval.models.huggingface import HFLM

from chai_eval.errors import SettingError, wrong
from chai_eval.task_settings import PromptSettings


class ChatTemplate:
    """What of lm-eval's view of a model renders conversations by a template, without the model."""

    apply_chat_template = HFLM.apply_chat_template

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.chat_template_args = {"chat_template": text}


def chat_template(tokenizer: Any, prompts: PromptSettings) -> ChatTemplate | None:
    """The template that prompts go through, None where they go through none.

    SettingError where the tokenizer has no template, none of that name, or none that takes the system's turn asked for.
    """
    asked = prompts.apply_chat_template
    if asked is False:
        return None
    found = tokenizer.chat_template
    if not found:
        raise wrong("apply_chat_template", asked, "false, as the tokenizer of this model has no chat template")
    # lm-eval would take any other name for `true`.
    templates = found if isinstance(found, dict) else {"default": found}
    name = "default" if asked is True else asked
    if name not in templates:
        whole = ["true"] if "default" in templates else []
        raise wrong("apply_chat_template", asked, ", ".join(["false", *whole, *sorted(templates)]))
    template = ChatTemplate(tokenizer, templates[name])
    if prompts.system_instruction is not None:
        # lm-eval leaves it out where the template takes none.
        turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        try:
            tokenizer.apply_chat_template(turns, tokenize=False, **template.chat_template_args)
        except TemplateError as error:
            raise SettingError(
                f"system_instruction: given, and the chat template takes no turn of the system ({error}); allowed: null"
            ) from error
    return template
