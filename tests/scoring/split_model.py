"""A tiny model under several methods, split over the processes of torchrun or whole in one: what it says, written down.

Given a folder, and the settings of a run that goes first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.nn.functional import embedding, linear
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from chai_eval.attention.passes import cache_in
from chai_eval.attention.rows import Rows
from chai_eval.methods import build_method
from tests.attention.tiny import in_float64, padded, requests
from tests.methods.cases.tensor_parallel import COUNTS, LABELS, SERVING

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "mha": ("mha", {}),
    "chai": ("chai", {"clusters": COUNTS}),
    "chai_two_step": ("chai", {"clusters": COUNTS, "prefill": "two_step"}),
    "v_reuse": ("v_reuse", {"clusters": COUNTS}),
    "chai_static": ("chai_static", {"membership": LABELS}),
    "output_aware": ("output_aware", {"membership": SERVING, "adaptive": True}),
}
DECODED = 3


def write_model(folder: Path) -> None:
    """Random weights of a LLaMA with 8 heads, which read 4 key heads, and room for the builtin tokenizer."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=301,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def load_split(folder: Path, *, tensor_parallel: bool) -> PreTrainedModel:
    from chai_eval.models import load
    from chai_eval.settings import ModelSettings

    settings = ModelSettings(
        name="tiny", path=str(folder), tokenizer="builtin", device="cpu", tensor_parallel=tensor_parallel
    )
    return in_float64(load(settings)[0])


@torch.no_grad()
def said(model: PreTrainedModel, **more: Any) -> dict[str, torch.Tensor]:
    """Logits under every method: of a padded batch, of tokens decoded after it, and of packed rows with branches."""
    tokens, found = requests([3, 17, 40], seed=5), {}
    ids, mask = padded(tokens, "left")
    rows = Rows.packed([12, 9], [[4, 2], []])
    for name, (method, settings) in METHODS.items():
        with build_method(method, **settings, **(more if method != "mha" else {})).applied(model):
            upto = ids.shape[1] - DECODED
            out = model(input_ids=ids[:, :upto], attention_mask=mask[:, :upto], use_cache=True)
            each = [out.logits[mask[:, :upto].bool()]]
            for at in range(upto, ids.shape[1]):
                given = {"input_ids": ids[:, at : at + 1], "attention_mask": mask[:, : at + 1]}
                out = model(**given, **cache_in(out), use_cache=True)
                each.append(out.logits[:, -1])
            each.append(model(input_ids=torch.cat(tokens)[None, :27], rows=rows).logits[0])
        found[name] = torch.cat(each)
    return found


def as_parts(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """Let one process multiply as `size` of them would: a part of each weight at a time, and what they add up added."""

    def parts(weight: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        return weight.tensor_split([-(-weight.shape[dim] // size) * at for at in range(1, size)], dim)

    def by_columns(weight: torch.Tensor) -> Any:
        return lambda states: torch.cat([linear(states, part) for part in parts(weight, 0)], -1)

    def by_rows(weight: torch.Tensor) -> Any:
        def added(states: torch.Tensor) -> torch.Tensor:
            mine = parts(states, states.ndim - 1)
            return sum(linear(some.contiguous(), part) for some, part in zip(mine, parts(weight, 1), strict=True))

        return added

    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.forward = by_rows(module.weight)
        elif isinstance(module, torch.nn.Linear):
            module.forward = by_columns(module.weight)
        elif isinstance(module, torch.nn.Embedding):
            module.forward = lambda ids, weight=module.weight: embedding(ids, weight)
    return model


if __name__ == "__main__":
    from chai_eval.cli import main

    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    if arguments and (status := main(arguments)):
        sys.exit(status)
    # Under a name of its own: a group that is made again finds what the run's group has left with torchrun.
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", store=PrefixStore("again", store), rank=rank, world_size=size)
    found = said(load_split(folder / "model", tensor_parallel=True))
    torch.save(found, folder / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()
