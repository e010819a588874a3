"""A model, and how work goes through it: in passes of how many tokens, shared with which processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from chai_eval.attention import shard
from chai_eval.scoring.ranks import Ranks


@dataclass(frozen=True)
class Runner:
    """A model, its tokenizer, and how requests go through them.

    `batch_tokens` are the most in a forward pass, those in the cache included; None chooses by the device. `ranks`
    share the work, and must all have been given the same; with `progress` the first of them shows how far it is.
    """

    model: PreTrainedModel
    tokenizer: Any = None
    batch_tokens: int | None = None
    ranks: Ranks = field(default_factory=Ranks)
    progress: bool = True

    @property
    def workers(self) -> Ranks:
        """Who takes turns at the work: all processes, or this one alone where each has a part of the model for all."""
        return self.ranks if shard(self.model).size == 1 else Ranks()

    def budget(self) -> int:
        """Most tokens in a pass: as all processes have the same plan of passes, that of the smallest device."""
        return min(self.ranks.gather(self.batch_tokens or default_batch_tokens(self.model)))

    def bar(self, description: str, total: int, done: int = 0) -> tqdm[Any]:
        """A bar that is shown while work is done."""
        hidden = not (self.progress and self.ranks.first)
        return tqdm(total=total, initial=done, desc=description, disable=hidden, leave=False)


def default_batch_tokens(model: PreTrainedModel) -> int:
    """Tokens in a forward pass where nobody says: what keeps the cores busy, or a part of the GPU's whole memory.

    From the total, not the free memory: the batches of a run that goes on are those it began with.
    """
    if model.device.type != "cuda":
        return 1024
    config = model.config.get_text_config()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    spare = max(torch.cuda.get_device_properties(model.device).total_memory - weights, 0) // 4
    # The widest things a token needs at once: its logits in float32 (twice), its layer's activations.
    per_token = 8 * config.vocab_size + 64 * config.hidden_size
    return int(min(max(spare // per_token, 1024), 65536))
