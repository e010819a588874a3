"""The pass over calibration text: batch by batch, kept in sums, resumable."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from chai_eval.calibration.observe import Watcher, observe
from chai_eval.calibration.output_projection import output_factors
from chai_eval.calibration.predictor import HeadOutputs, Predictors
from chai_eval.calibration.progress import SavedProgress, progress
from chai_eval.calibration.settings import CalibrationSettings
from chai_eval.calibration.sums import BatchStatistics, ErrorCurves, HeadStatistics
from chai_eval.data.text import batches
from chai_eval.errors import RunError

# Tokens of each sample that predictors learn from.
PREDICTOR_TOKENS = 64


@dataclass
class Collected:
    """What the pass found, the tokens that it read, and their sha256."""

    sums: HeadStatistics
    predictors: Predictors | None
    tokens: int = 0
    sha256: str = ""

    def state(self) -> dict[str, Any]:
        """What an interrupted pass goes on from."""
        predictors = {"predictors": self.predictors.state()} if self.predictors else {}
        return {"sums": self.sums.sums, "sha256": self.sha256, **predictors}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self.sums, self.sha256 = HeadStatistics(state["sums"]), state["sha256"]
        if self.predictors:
            self.predictors.resume(state["predictors"])


def error_curves(settings: CalibrationSettings) -> ErrorCurves | None:
    """The error curves that the rule chooses counts by; None where it needs none."""
    return None if settings.rule == "budget" else ErrorCurves(settings.features, settings.algorithm, settings.starts)


@torch.no_grad()
def collect(model: PreTrainedModel, samples: Iterable[Tensor], settings: CalibrationSettings, file: Path) -> Collected:
    """Run the model over samples and sum up what each layer shows.

    RunError where the samples are not those of an interrupted pass, or the disk fails.

    Parameters
    ----------
    samples : iterable of Tensor [tokens], int64
        In an order that is the same at each call; the first `settings.samples` are read.
    file : Path
        File with the progress of an interrupted pass, which this one goes on from, but for its sha256 in the name;
        removed by the caller when what comes after it is done as well.
    """
    shape = attention_shape(model)
    hidden = model.config.get_text_config().hidden_size
    found = Collected(HeadStatistics(), None)
    if settings.predictor:
        found.predictors = Predictors(shape.layers, shape.heads, hidden, settings.seed, model.device)
    saved = SavedProgress(file)
    if (state := saved.load()) is not None:
        found.resume(state)
    done, done_sha256 = found.sums.samples, found.sha256
    factors = output_factors(model)
    digest, read = hashlib.sha256(), 0
    size = max(settings.batch_tokens // settings.tokens, 1)
    together = batches(itertools.islice(samples, settings.samples), size)
    for tokens in progress(together, settings.samples, "attention", "samples", size=len):
        digest.update(tokens.numpy().astype("<i8").tobytes())
        found.tokens += tokens.numel()
        read += len(tokens)
        found.sha256 = digest.hexdigest()
        if read == done and found.sha256 != done_sha256:
            raise RunError(f"text: not the one that {file.parent} was begun with; remove that folder to begin anew")
        if read > done:
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + read)
            _read_batch(model, tokens, factors, found, settings, generator)
            saved.offer(found.state)
    saved.save(found.state())
    return found


def _read_batch(
    model: PreTrainedModel,
    tokens: Tensor,
    factors: list[Tensor],
    found: Collected,
    settings: CalibrationSettings,
    generator: torch.Generator,
) -> None:
    length = tokens.shape[1]
    outputs = HeadOutputs(torch.randperm(length, generator=generator)[:PREDICTOR_TOKENS].sort().values)
    queries = _spread(length, min(settings.query_rows, length), generator)
    statistics = BatchStatistics(factors, queries, settings.probe_tokens, error_curves(settings))
    watchers: list[Watcher] = [statistics, outputs] if found.predictors else [statistics]
    observe(model, [tokens], watchers)
    found.sums.add(statistics, attention_shape(model).kv_heads, generator)
    if found.predictors:
        found.predictors.train(outputs)


def _spread(length: int, count: int, generator: torch.Generator) -> Tensor:
    """One column drawn from each of `count` equal parts."""
    edges = torch.linspace(0, length, count + 1, dtype=torch.float64)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return (edges[:-1] + drawn * (edges[1:] - edges[:-1])).long().clamp_(max=length - 1)
