"""What moving heads between clusters wins for CHAI further on in a text, what it costs, and what it could win at most.

    python -m chai_eval benchmark recluster --text FILE --tokens 512 --sequences 8

CHAI as it is stands beside CHAI whose heads change over to other representatives (`method.recluster_every`). Two bounds
keep every head's keys and find all clusters anew at the same tokens, from whole rows of attention: those of the tokens
before, which a method could do that saves no byte, and in hindsight those of the tokens that the clusters are used for.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks, Source, membership_of, probe_features
from chai_eval.attention.kernels.prefill import probability_blocks
from chai_eval.attention.probe import repeat_heads
from chai_eval.attention.shape import attention_shape
from chai_eval.benchmark import paired
from chai_eval.benchmark.records import file_name, positive, text_parser, write
from chai_eval.data.text import open_text
from chai_eval.markdown import table
from chai_eval.measure.clock import in_turn
from chai_eval.measure.memory import cache_size
from chai_eval.methods import build_method
from chai_eval.methods.base import Method
from chai_eval.methods.chai import CHAI
from chai_eval.methods.clusters import cluster_counts
from chai_eval.models import load, model_settings
from chai_eval.schema import SETTINGS
from chai_eval.scoring.fidelity import Fidelity, fidelities, read_sequences
from chai_eval.scoring.runner import Runner

# Tokens whose attention the first bound looks at.
WINDOW = 16
# What is timed: tokens of a prompt, and those decoded after it.
PROMPT, DECODED, REPETITIONS = 256, 64, 3


def main(given: Sequence[str] | None = None) -> dict[str, Fidelity]:
    """Compare all, print the table, write the record."""
    options = text_parser("recluster", __doc__)
    options.add_argument("--tokens", type=positive, default=512, help="tokens of a sequence")
    options.add_argument("--every", type=positive, default=64, help="tokens after which heads may change over")
    options.add_argument("--thresholds", type=json.loads, default=[0.0], help="distances, such as [0,0.1]")
    options.add_argument("--static", help="a calibration, whose clusters stand beside them: those of `chai_static`")
    options.add_argument("--no-bounds", action="store_true", help="leave out what could be won at most")
    arguments = options.parse_args(given)
    settings = model_settings(arguments.model)
    model, tokenizer = load(settings)
    same: dict[str, Any] = {"clusters": settings.clusters}
    methods: dict[str, Method] = {"chai": CHAI(**same)}
    for each in arguments.thresholds:
        name = f"every {arguments.every} tokens, threshold {each:g}"
        methods[name] = CHAI(recluster_every=arguments.every, drift_threshold=float(each), **same)
    if arguments.static:
        methods["chai_static"] = build_method("chai_static", membership=arguments.static)
    if not arguments.no_bounds:
        methods["found anew, all keys kept"] = FoundAnew(every=arguments.every, window=WINDOW, **same)
        methods["found anew in hindsight"] = FoundAnew(every=arguments.every, **same)
    text = open_text(arguments.text, arguments.seed)
    lengths = {"tokens": arguments.tokens, "sequences": arguments.sequences}
    found = fidelities(Runner(model, tokenizer), methods, text.documents, **lengths)
    print(table([paired.line(name, each, found["chai"], "more than chai") for name, each in found.items()]))
    record = {
        "rows": [],  # of the table of promises: none
        "model": settings.name,
        "text": text.name,
        "seed": arguments.seed,
        **lengths,
        "methods": {
            name: paired.record(methods[name], each, found["chai"], "more_than_chai") for name, each in found.items()
        },
        "costs": costs(model, tokenizer, dict(itertools.islice(methods.items(), 2)), arguments.text),
    }
    print(
        table(
            [
                {"method": name, **{key: str(value) for key, value in each.items()}}
                for name, each in record["costs"].items()
            ]
        )
    )
    name = f"{settings.name}-{arguments.tokens}-{file_name(text.name)}"
    write("recluster", arguments.out / f"{name}.json", record)
    return found


@dataclass(frozen=True, config=SETTINGS)
class FoundAnew(CHAI):
    """CHAI whose clusters are found anew every `every` tokens, from whole rows of all heads' attention: a bound.

    Those of the `window` tokens before; with 0 of the tokens themselves that the clusters are used for.
    """

    every: int = 64
    window: int = 0

    def hooks(self, model: PreTrainedModel) -> Hooks:
        return _FoundAnew(self, cluster_counts(self.clusters, model), attention_shape(model).heads)


class _FoundAnew(Hooks):
    def __init__(self, settings: FoundAnew, counts: Sequence[int], heads: int) -> None:
        super().__init__()
        self.settings, self.counts, self.all_heads = settings, counts, heads

    def attention(self, call: AttentionCall, source: Source) -> Tensor | None:
        count, settings = self.counts[call.index], self.settings
        probe, length = settings.probe_tokens, call.rows.length
        if count == self.all_heads or length <= probe:
            return None
        blocks = probability_blocks(source.query(), source.key(), call.view)
        own = torch.cat([each for _, each in blocks], dim=2)  # [rows, heads, length, keys]
        value, out = repeat_heads(source.value(), self.all_heads), []
        ends = [0, probe, *range(settings.every, length, settings.every), length]
        for start, stop in itertools.pairwise(ends):
            of_part = own[:, :, start:stop]
            if start >= probe:
                seen = probe_features(own[:, :, :probe, :probe])
                if settings.window == 0 or start > probe:
                    deciding = slice(start - settings.window, start) if settings.window else slice(start, stop)
                    seen = own[:, :, deciding].flatten(-2)
                found = membership_of(seen, count, settings.representative)
                by = found.representative.gather(1, found.cluster)
                of_part = of_part[torch.arange(len(by), device=by.device)[:, None], by]
            out.append(of_part.to(value.dtype) @ value)
        return torch.cat(out, dim=2)


@torch.inference_mode()
def costs(model: PreTrainedModel, tokenizer: Any, methods: dict[str, Method], text: str) -> dict[str, dict[str, Any]]:
    """Processor time of a prompt and of a decoded token (medians, in milliseconds), and bytes of the cache at the end.

    Time of the process, not of the clock: other work on the machine takes turns with it.
    """
    (tokens,) = read_sequences(model, tokenizer, open_text(text, None).documents, PROMPT + DECODED, 1)
    ids = torch.tensor([tokens], device=model.device)

    def once(method: Method) -> tuple[float, float, Any]:
        with method.applied(model):
            begin = time.process_time()
            cache = model(input_ids=ids[:, :PROMPT], use_cache=True, logits_to_keep=1).cache
            after_prompt = time.process_time()
            for at in range(PROMPT, ids.shape[1]):
                model(input_ids=ids[:, at : at + 1], cache=cache, use_cache=True)
            decoded = (time.process_time() - after_prompt) / max(ids.shape[1] - PROMPT, 1)
        size = cache_size(cache, model, ids.shape[1], method.footprint(model))
        return after_prompt - begin, decoded, size

    turns = list(in_turn({name: partial(once, each) for name, each in methods.items()}, REPETITIONS, warmup=1))
    found = {}
    for name in methods:
        prompts, decoded, sizes = zip(*(turn.found for turn in turns if turn.contender == name), strict=True)
        found[name] = {
            "prompt (ms)": round(1e3 * median(prompts), 1),
            "decoded token (ms)": round(1e3 * median(decoded), 2),
            "bytes by formula": sizes[0].formula_bytes,
            "bytes allocated": sizes[0].allocated_bytes,
            "of MHA's (%)": round(100 * sizes[0].formula_bytes / sizes[0].full_bytes, 2),
        }
    return found
