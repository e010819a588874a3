"""Memory against bytes counted by hand, and latency against the samples that it is of."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from chai_eval.methods import build_method
from chai_eval.models import load_model
from chai_eval.store.record import read_record, read_samples
from tests.experiments.conftest import Do
from tests.experiments.test_membership import CLUSTERS

HEADS, HEAD_DIM, FLOAT = 8, 8, 4


@torch.no_grad()
def test_memory_is_that_of_a_cache_filled_by_hand(do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process of its own for each peak takes seconds; bytes of the cache are counted in this one.
    monkeypatch.setattr("chai_eval.measure.grid.fresh_memory", lambda *_: None)
    folder = do("kv_memory", "measure.lengths=[24,40]", "measure.new_tokens=2")
    frame = pd.read_csv(folder / "data.csv").set_index(["contender", "tokens"])
    model, _ = load_model("tiny_llama_random", device="cpu")
    for tokens in (24, 40):
        stock = model(torch.arange(tokens)[None], use_cache=True).past_key_values
        full = 2 * sum(layer.keys.nbytes for layer in stock.layers)
        assert full == 2 * len(CLUSTERS) * HEADS * HEAD_DIM * FLOAT * tokens
        assert frame.loc[("mha (sdpa)", tokens), "allocated_bytes"] == full
        kept = FLOAT * HEAD_DIM * tokens * sum(HEADS + count for count in CLUSTERS)
        own = frame.loc[("CHAI", tokens)]
        assert own["formula_bytes"] == kept
        assert own["formula_saved"] == pytest.approx(1 - kept / full)
        with build_method("chai", clusters=CLUSTERS).applied(model):
            cache = model(torch.arange(tokens)[None], use_cache=True).past_key_values
            assert own["allocated_bytes"] == sum(layer.nbytes() for layer in cache.layers)
    assert "not comparable: the paper's figures are of llama7b" in (folder / "table.md").read_text()


def test_latency_is_that_of_the_samples_of_the_measurement(do: Do) -> None:
    small = ("measure.lengths=[16,24]", "measure.new_tokens=3", "measure.repetitions=3", "measure.warmup=0")
    folder = do("latency", *small)
    frame = pd.read_csv(folder / "data.csv").set_index(["contender", "tokens"])
    record = read_record(folder)
    assert record is not None
    samples = read_samples(folder.parents[2] / record["sources"]["measure"])
    for (contender, length), own in samples.groupby(["contender", "length"]):
        found = frame.loc[(contender, length)]
        seconds = own[own["token"] == 0]["seconds"]
        assert found["ttft_seconds"] == pytest.approx(seconds.median(), rel=1e-5)
        assert found["tpot_seconds"] == pytest.approx(own[own["token"] > 0]["seconds"].median(), rel=1e-5)
    assert set(frame.index.get_level_values(0)) == {"mha (sdpa)", "CHAI"}
