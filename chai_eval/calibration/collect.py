"""The pass over calibration text: batch by batch, kept in sums, resumable."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import take_over
from chai_eval.attention.inject import attention_shape
from chai_eval.calibration.layers import output_factors, watching_inputs
from chai_eval.calibration.observe import Observer
from chai_eval.calibration.predictor import Predictors, fed
from chai_eval.calibration.progress import progress
from chai_eval.calibration.settings import CalibrationSettings
from chai_eval.calibration.sums import Sums
from chai_eval.checksum import sha256_of
from chai_eval.data.text import batches
from chai_eval.errors import RunError, failure_line
from chai_eval.files import write_whole

# Tokens of each sample that predictors learn from.
PREDICTOR_TOKENS = 64
# Progress is kept as often as this, or more rarely where keeping it would take more than a twentieth of the time.
SECONDS_BETWEEN_SAVES = 60.0
SAVES_PER_COST = 20.0

log = logging.getLogger("chai_eval")


@dataclass
class Collected:
    """What the pass found.

    Attributes
    ----------
    sums : Sums
    predictors : Predictors or None
    tokens : int
        Tokens read.
    sha256 : str
        Of those tokens.
    """

    sums: Sums
    predictors: Predictors | None
    tokens: int = 0
    sha256: str = ""


@torch.no_grad()
def collect(model: PreTrainedModel, samples: Iterable[Tensor], settings: CalibrationSettings, kept: Path) -> Collected:
    """Run the model over samples and keep what each layer shows.

    Parameters
    ----------
    samples : iterable of Tensor [tokens], int64
        In an order that is the same at each call; the first `settings.samples` are read.
    kept : Path
        File with the progress of an interrupted pass, which this one goes on from, but for its sha256 in the name;
        removed by the caller when what comes after it is done as well.

    Raises
    ------
    RunError
        Where the samples are not those of the interrupted pass, or the disk fails.
    """
    shape = attention_shape(model)
    hidden = model.config.get_text_config().hidden_size
    found = Collected(Sums.empty(shape), None)
    if settings.predictor:
        found.predictors = Predictors(shape.layers, shape.heads, hidden, settings.seed, model.device)
    _resume(found, kept)
    done, done_sha256 = int(found.sums.samples), found.sha256
    factors = output_factors(model)
    digest, seen, saves = hashlib.sha256(), 0, _Saves(kept)
    size = max(settings.batch_tokens // settings.tokens, 1)
    with progress(settings.samples, "attention", "samples") as advance:
        for tokens in batches(itertools.islice(samples, settings.samples), size):
            digest.update(tokens.numpy().astype("<i8").tobytes())
            found.tokens += tokens.numel()
            seen += len(tokens)
            advance(len(tokens))
            found.sha256 = digest.hexdigest()
            if seen == done and found.sha256 != done_sha256:
                raise RunError(f"text: not the one that {kept.parent} was begun with; remove that folder to begin anew")
            if seen <= done:
                continue
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + seen)
            _read_batch(model, tokens.to(model.device), factors, found, settings, generator)
            saves.offer(found)
    saves.now(found)
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
    picked = torch.randperm(length, generator=generator)[: PREDICTOR_TOKENS if found.predictors else 0].sort().values
    queries = _spread(length, min(settings.query_rows, length), generator)
    observer = Observer(factors, queries, settings.probe_tokens, picked)
    inputs: dict[int, Tensor] = {}
    with take_over(model, observer), watching_inputs(model, lambda at, states: inputs.update({at: states[:, picked]})):
        model.base_model(input_ids=tokens)
    shape = attention_shape(model)
    found.sums.add(observer.observed(), shape, settings.features, settings.algorithm, settings.starts, generator)
    if found.predictors:
        norms = torch.stack([observer.head_norms[layer] for layer in range(shape.layers)])
        found.predictors.train(fed([inputs[at] for at in range(shape.layers)]).flatten(1, 2), norms.flatten(1, 2))


def _spread(length: int, count: int, generator: torch.Generator) -> Tensor:
    """One column drawn from each of `count` equal parts."""
    edges = torch.linspace(0, length, count + 1, dtype=torch.float64)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return (edges[:-1] + drawn * (edges[1:] - edges[:-1])).long().clamp_(max=length - 1)


class _Saves:
    """Keeps progress every so often, in a file whose name has the sha256 of what is in it."""

    def __init__(self, path: Path) -> None:
        self.path, self.last, self.cost = path, time.monotonic(), 0.0

    def offer(self, found: Collected) -> None:
        if time.monotonic() - self.last > max(SECONDS_BETWEEN_SAVES, SAVES_PER_COST * self.cost):
            self.now(found)

    def now(self, found: Collected) -> None:
        start = time.monotonic()
        state: dict[str, Any] = {"sums": found.sums.tensors(), "sha256": found.sha256}
        if found.predictors:
            state["predictors"] = found.predictors.state()
        try:
            write_whole(self.path, lambda path: torch.save(state, path))
            whole = self.path.with_stem(f"{self.path.stem}-{sha256_of(self.path)}")
            self.path.replace(whole)
            for older in _kept(self.path):
                if older != whole:
                    older.unlink()
        except (OSError, RuntimeError) as error:  # torch has errors of its own for a full disk
            raise RunError(f"out: {self.path.parent} can't be written ({failure_line(error)})") from error
        self.last = time.monotonic()
        self.cost = self.last - start


def _resume(found: Collected, path: Path) -> None:
    for file in _kept(path):
        if sha256_of(file) != file.stem.rpartition("-")[2]:
            log.warning("%s: not what was written, its checksum is another; what it held is read again", file)
            continue
        state = torch.load(file, weights_only=True, map_location="cpu")
        found.sums, found.sha256 = Sums(**state["sums"]), state["sha256"]
        if found.predictors:
            found.predictors.resume(state["predictors"])
        return


def _kept(path: Path) -> list[Path]:
    """Files with progress, the latest first; a kill may leave two."""
    files = path.parent.glob(f"{path.stem}-*{path.suffix}")
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def heads_of(model: PreTrainedModel, samples: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """What predictors are fed, and the true norms: `[layers, tokens, hidden]` and `[layers, tokens, heads]`, by sample.

    Of text that they have not learnt from, this tells how well they predict.
    """
    shape = attention_shape(model)
    factors = output_factors(model)
    for sample in samples:
        inputs: dict[int, Tensor] = {}
        every = torch.arange(len(sample))
        observer = Observer(factors, every[-1:], 1, every)
        with (
            torch.no_grad(),
            take_over(model, observer),
            watching_inputs(model, lambda at, states, into=inputs: into.update({at: states})),  # type: ignore[misc]
        ):
            model.base_model(input_ids=sample[None].to(model.device))
        norms = torch.stack([observer.head_norms[layer] for layer in range(shape.layers)])
        yield fed([inputs[at] for at in range(shape.layers)]).flatten(1, 2), norms.flatten(1, 2)
