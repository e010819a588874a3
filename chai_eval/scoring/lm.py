"""The bridge to lm-eval: its `HFLM`, with requests scored in packed rows, under a method, into a journal."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor

from chai_eval.attention.logits import logits_at
from chai_eval.attention.rope import rotary_lengths
from chai_eval.errors import RunError
from chai_eval.methods.base import Method
from chai_eval.models.embeddings import pad_embedded
from chai_eval.scoring.finite import check_finite
from chai_eval.scoring.generation import generation_batches, is_sampled, stops
from chai_eval.scoring.hashes import content_hash
from chai_eval.scoring.pack import ScoringRequest, batches, documents, packed_input
from chai_eval.scoring.runner import Runner
from chai_eval.store.journal import Journal

log = logging.getLogger(__name__)

# Requests generated together; fixed, so that an interrupted run meets the same batches again.
GENERATION_BATCH = 8


class PackedLM(HFLM):
    """lm-eval's view of a model under a method.

    Log-likelihoods are those of `HFLM` for each request alone; what differs is how the work is laid out: a context is
    computed once for all its continuations, several documents fill a pass, nothing is padding, and logits are computed
    only where a token is scored.

    Parameters
    ----------
    runner : Runner
        Its model with the method already applied. Each of its processes does a batch of every round, after which all
        know all its scores; lm-eval is not told, so that what it makes of the scores is what it makes of them in one.
    journal : Journal or None
        Requests found there are not scored again, and those scored are added.
    chat_template : str or None
        Through which lm-eval renders prompts where it is told to.
    seed : int
        Of texts that are drawn at random.
    """

    def __init__(
        self,
        runner: Runner,
        method: Method,
        *,
        journal: Journal | None = None,
        description: str = "",
        chat_template: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            pretrained=runner.model,
            tokenizer=runner.tokenizer,
            backend="causal",
            batch_size=sys.maxsize,  # what HFLM hands on at once is laid out here, all windows of all texts in one plan
            chat_template_args=None if chat_template is None else {"chat_template": chat_template},
        )
        pad_embedded(runner.model, self.tokenizer)
        self.runner, self.method, self.description, self.seed = runner, method, description, seed
        self.batch_tokens = runner.budget()
        self.journal = Journal() if journal is None else journal
        self._rotary = rotary_lengths(runner.model)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)  # its bars; ours is the runner's

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        asked = [
            ScoringRequest(tuple(context), tuple(continuation)).truncated(self.max_length)
            for _, context, continuation in requests
        ]
        self._warn_of_cut(sum(len(context) + len(ending) > self.max_length + 1 for _, context, ending in requests))
        keys = [_key([request.context, request.continuation]) for request in asked]
        work = [(batch.requests, partial(self._score, batch, asked)) for batch in self._plan(asked)]
        return [(float(loglikelihood), bool(greedy)) for loglikelihood, greedy in self._answers(keys, work)]

    def _answers(self, keys: Sequence[str], work: Sequence[tuple[list[int], Callable[[], list[Any]]]]) -> list[Any]:
        """Answers to requests from the journal, after the work that it lacks: each on some requests, by number."""
        waiting = [each for each in work if any(keys[number] not in self.journal for number in each[0])]
        left = sum(len(numbers) for numbers, _ in waiting)
        with self.runner.bar(self.description, len(keys), len(keys) - left) as bar:
            for found in self.runner.workers.rounds(waiting, lambda each: zip(each[0], each[1](), strict=True)):
                self.journal.append_many((keys[number], answer) for number, answer in found)
                bar.update(len(found))
        return [self.journal[key] for key in keys]

    def _plan(self, asked: Sequence[ScoringRequest]) -> Sequence[Any]:
        """Batches, with the numbers of their `requests`: by the requests and the budget alone."""
        rows = documents(asked, self.method.shared_context, self.batch_tokens, self._rotary.alike)
        return batches(rows, self.batch_tokens, self._rotary.alike)

    @torch.inference_mode()
    def _score(self, batch: Any, asked: Sequence[ScoringRequest]) -> list[Any]:
        """Score one pass: for each of its requests the log-likelihood and whether it is what greedy decoding gives."""
        packed = packed_input(batch, asked)
        device = self.device
        given = {"input_ids": packed.tokens.to(device), "rows": packed.rows.to(device)}
        logits = logits_at(self.model, packed.keep.to(device), **given)  # [kept, vocabulary]
        # As lm-eval does it, so that its rounding is ours too: over a few hundred tokens it comes to a thousandth.
        log_probabilities = logits.log_softmax(-1, dtype=torch.float32)
        highest, best_token = log_probabilities.max(-1)
        check_finite(self.model, given, highest)
        source, target = packed.source.to(device), packed.target.to(device)
        token_scores = log_probabilities[source, target]
        is_best = best_token[source] == target
        by_request = (each.cpu().split(packed.counts) for each in (token_scores.double(), is_best))
        return [[float(chosen.sum()), bool(best.all())] for chosen, best in zip(*by_request, strict=True)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        keys = _text_keys(requests)
        order = sorted(range(len(requests)), key=lambda number: (-len(requests[number].args[0]), keys[number]))
        self._warn_of_cut(sum(map(self._is_cut, requests)))
        generate = super().generate_until

        def written(chunk: list[int]) -> list[str]:
            self._rotary.forget()
            # What is drawn is the same where a run goes on after some of it.
            torch.manual_seed(int(_key([self.seed, keys[chunk[0]]])[:15], 16))
            return generate([requests[number] for number in chunk], disable_tqdm=True)

        asked, begin = [requests[number].args[:2] for number in order], self.tokenizer.bos_token
        plan = generation_batches(self.model, asked, begin, GENERATION_BATCH)
        chunks = [[order[at] for at in chunk] for chunk in plan]
        return self._answers(keys, [(chunk, partial(written, chunk)) for chunk in chunks])

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """As `HFLM` does it, but for where texts end."""
        settings = {"temperature": 0.0, **generation_kwargs}
        if settings["temperature"] == 0.0 and not settings["do_sample"]:
            del settings["temperature"]
        # A model's own settings may ask for a static cache, which changes no text and which methods can't take over.
        generated: Tensor = self.model.generate(
            input_ids=context,
            max_length=max_length,
            stopping_criteria=stops(self.tokenizer, stop, context),
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            cache_implementation="dynamic",
            **settings,
        )
        return generated

    def _is_cut(self, request: Instance) -> bool:
        """Whether a prompt and what may be generated after it are longer than the model's positions."""
        prompt, settings = request.args[:2]
        wanted = normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
        if wanted >= self.max_length:
            raise RunError(
                f"task: {request.task_name} generates up to {wanted} tokens (max_gen_toks), and the model has "
                f"{self.max_length} positions, prompt included"
            )
        return len(self.tok_encode(prompt)) > self.max_length - wanted

    def _warn_of_cut(self, count: int) -> None:
        if count:
            log.warning(
                "%s: %d requests are longer than the %d positions of the model; the start of their text is cut off",
                self.description,
                count,
                self.max_length,
            )


def _text_keys(requests: Sequence[Instance]) -> list[str]:
    """Keys of texts to generate; each of several to be drawn from the same prompt has its own."""
    seen: Counter[str] = Counter()
    keys = []
    for request in requests:
        key = _key(["generate", *request.args])
        seen[key] += 1
        again = seen[key] > 1 and is_sampled(request.args[1])
        keys.append(_key([key, seen[key]]) if again else key)
    return keys


def _key(content: Any) -> str:
    return content_hash(content)[:32]
