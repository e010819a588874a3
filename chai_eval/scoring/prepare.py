"""Build the requests of a task, and hash what they were built from."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass

from lm_eval.api.task import Task
from transformers import PreTrainedTokenizerBase, set_seed

from chai_eval.errors import RunError, SettingError
from chai_eval.scoring.chat import chat_template
from chai_eval.scoring.hashes import content_hash
from chai_eval.scoring.own_tasks import sandboxed_templates
from chai_eval.task_settings import AS_TASKS_SAY, PromptSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedTask:
    """A task with its requests built, their chat template, and the hashes of what they were built from.

    `prompts_hash` is of every prompt, continuation and document, in order; `config_hash` of the task as lm-eval
    resolved it: templates, splits, metrics, filters.
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
    """Build the requests of a task's first `limit` documents (None: of all); the task itself is left as it is.

    `seed` is of the few-shot examples, where it has any; of the tokenizer only the chat template is needed.
    SettingError for a template that isn't there, or more examples than there are.
    """
    task = _apart(task)
    _set_examples(task, prompts.num_fewshot, seed)
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
    built = [[each.doc_id, each.idx, each.request_type, each.args, each.doc] for each in instances]
    return PreparedTask(
        task,
        str(task.config.task),
        limit,
        seed,
        len({each.doc_id for each in instances}),
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


def _set_examples(task: Task, num_fewshot: int | None, seed: int) -> None:
    """Set how many few-shot examples prompts have, by lm-eval's rule, and the seed that draws them."""
    name, own = task.config.task, task.get_config("num_fewshot")
    if num_fewshot is not None and own == 0:
        if num_fewshot > 0:
            log.warning("%s: num_fewshot stays 0, as its task file says so and lm-eval leaves it", name)
    elif num_fewshot is not None or own is None:
        task.set_config("num_fewshot", num_fewshot or 0)
    task.set_fewshot_seed(seed)
    if task.get_config("num_fewshot") and hasattr(task, "sampler"):
        _check_examples(task)


def _check_examples(task: Task) -> None:
    name, count, split = task.config.task, task.get_config("num_fewshot"), task.fewshot_cfg.split
    # lm-eval then draws one more, and leaves out the document at hand.
    apart = split == task.config.test_split
    available = len(task.sampler.df) - apart
    if count > available:
        raise SettingError(
            f"num_fewshot: {count} given, and {name} has {available} documents to draw examples from; "
            f"allowed: 0 to {max(available, 0)}"
        )
    scored = task.config.test_split or task.config.validation_split
    others = task.has_training_docs() or (task.has_validation_docs() and task.has_test_docs())
    from_scored = split == scored or (split is None and not others)
    if from_scored and task.fewshot_cfg.samples is None:
        but = ", but for the one at hand" if apart else ", the one at hand among them (lm-eval's own rule)"
        log.warning("%s: examples are drawn from the documents that are scored%s; it has no others", name, but)
