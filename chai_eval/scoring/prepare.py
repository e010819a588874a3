"""Build the requests of a task, and hash what they were built from."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from lm_eval.api.task import Task
from transformers import PreTrainedTokenizerBase, set_seed

from chai_eval.errors import RunError
from chai_eval.scoring.chat import chat_template
from chai_eval.scoring.examples import set_examples
from chai_eval.scoring.hashes import content_hash
from chai_eval.scoring.own_tasks import sandboxed_templates
from chai_eval.task_settings import AS_TASKS_SAY, PromptSettings


@dataclass(frozen=True)
class PreparedTask:
    """A task with its requests built, and the hashes of what they were built from.

    Attributes
    ----------
    prompts_hash : str
        Of every prompt, continuation and document, in order.
    config_hash : str
        Of the task as lm-eval resolved it: templates, splits, metrics, filters.
    prompts : PromptSettings
        How they were built.
    chat_template : str or None
        The template that they went through.
    """

    task: Task
    task_name: str
    limit: int | None
    seed: int
    n_documents: int
    n_requests: int
    prompts_hash: str
    config_hash: str
    prompts: PromptSettings = AS_TASKS_SAY
    chat_template: str | None = None


def prepare(
    task: Task,
    *,
    limit: int | None,
    seed: int,
    prompts: PromptSettings = AS_TASKS_SAY,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreparedTask:
    """Build a task's requests.

    Parameters
    ----------
    task : Task
        Left as it is: what is prepared are requests of a copy.
    limit : int or None
        First documents to use; None for all.
    seed : int
        Of the few-shot examples, where the task has any.
    tokenizer : PreTrainedTokenizerBase or None
        Whose chat template is applied; needed for nothing else.

    Raises
    ------
    SettingError
        For a chat template that isn't there, or more examples than there are.
    """
    task = _apart(task)
    set_examples(task, prompts.num_fewshot, seed)
    chat = chat_template(tokenizer, prompts)
    set_seed(seed)  # as lm-eval does before it builds them again: a task may draw from the global generators
    with sandboxed_templates():
        task.build_all_requests(
            limit=limit,
            system_instruction=prompts.system_instruction,
            apply_chat_template=chat is not None,
            fewshot_as_multiturn=prompts.multiturn,
            chat_template=None if chat is None else chat.apply_chat_template,
        )
    instances = task.instances
    if not instances:
        raise RunError(f"task: {task.config.task} has no documents")
    # The documents too: what is right is in them, and in no prompt.
    built = [
        [instance.doc_id, instance.idx, instance.request_type, instance.args, instance.doc] for instance in instances
    ]
    return PreparedTask(
        task,
        str(task.config.task),
        limit,
        seed,
        len({instance.doc_id for instance in instances}),
        len(instances),
        content_hash(built),
        content_hash(task.dump_config()),
        prompts,
        None if chat is None else chat.text,
    )


def _apart(task: Task) -> Task:
    """A task with the same documents, whose requests, settings and examples are its own."""
    own = copy.copy(task)
    own._config = copy.copy(task.config)
    if hasattr(task, "sampler"):
        own.sampler = copy.copy(task.sampler)
    return own
