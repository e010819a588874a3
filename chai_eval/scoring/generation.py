"""Which prompts are generated together and where each text ends, so that no text depends on its batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.models.utils_hf import MultiTokenEOSCriteria
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from chai_eval.attention.rope import rotary_lengths

# Settings of a request, under lm-eval's names and their aliases, that mean the same in every batch.
HARMLESS = {"until", "do_sample", "temperature", "top_p", "top_k", "min_p"} | {
    *("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"),
}
# Settings of a model's own that count padding, or need a batch of their own.
COUNT_PADDING = ("repetition_penalty", "no_repeat_ngram_size", "min_length", "num_beams", "prompt_lookup_num_tokens")


def is_sampled(settings: Mapping[str, Any]) -> bool:
    """Whether a request's text is drawn at random."""
    return bool(normalize_gen_kwargs(dict(settings))["do_sample"])


def generation_batches(
    model: PreTrainedModel, requests: Sequence[tuple[str, Mapping[str, Any]]], begin: str | None, size: int
) -> list[list[int]]:
    """Split requests, by number, into batches of `size` at most, of which each text is the one that it would be alone.

    Requests are prompts with their settings, in the order in which they are generated; `begin` is the text of the token
    that sequences begin with: lm-eval looks at the first prompt of a batch to see whether it is there already.
    """
    own = model.generation_config
    # The longest prompt of a batch may change what rotary embeddings give to all.
    apart = bool(rotary_lengths(model)) or any(getattr(own, name, None) not in (None, 0, 1) for name in COUNT_PADDING)
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, (prompt, settings) in enumerate(requests):
        alone = apart or not settings.keys() <= HARMLESS or is_sampled(settings)
        groups[number if alone else ("begun" if begin and prompt.startswith(begin) else "")].append(number)
    return sorted(group[at : at + size] for group in groups.values() for at in range(0, len(group), size))


class _EachByItself(MultiTokenEOSCriteria):
    """lm-eval's stop sequence, but each row ends where it has it, not where all do.

    What follows would not always be cut off again: a stop sequence that is a special token is not in the text.
    """

    def __call__(self, input_ids: Tensor, scores: Any, **rest: Any) -> Tensor:
        super().__call__(input_ids, scores, **rest)
        return torch.tensor(self.done_tracker, device=input_ids.device)


def stops(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[str], context: Tensor) -> StoppingCriteriaList:
    """Where texts end, for prompts [batch, tokens]."""
    rows, length = context.shape
    return StoppingCriteriaList([_EachByItself(each, tokenizer, length, rows) for each in sequences])
