"""Correlation and error curves against numpy on the stock model's attention."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from chai_eval.data.text import cut, open_text
from chai_eval.models import load_model
from tests.experiments.conftest import Do, Path
from tests.experiments.test_membership import CLUSTERS, SAMPLES, TOKENS, partition

HEADS = 8


@pytest.fixture
def attention(prepared: Path) -> list[np.ndarray]:
    """By layer, `[samples, heads, queries, keys]`."""
    model, tokenizer = load_model("tiny_llama_random", device="cpu")
    model.set_attn_implementation("eager")
    stream = cut(open_text(str(prepared / "text.txt"), 1234).documents, tokenizer, TOKENS)
    with torch.no_grad():
        seen = model(torch.stack([next(stream) for _ in range(SAMPLES)]), output_attentions=True).attentions
    return [each.numpy() for each in seen]


def asked(prepared: Path) -> tuple[str, ...]:
    return f"samples={SAMPLES}", f"tokens={TOKENS}", f"text={prepared / 'text.txt'}"


def test_correlation_is_numpys_and_clusters_are_scikit_learns(
    do: Do, prepared: Path, attention: list[np.ndarray]
) -> None:
    folder = do("head_correlation", *asked(prepared))
    pairs = pd.read_parquet(folder / "pairs.parquet")
    frame = pd.read_csv(folder / "data.csv", dtype={"layer": str}).set_index("layer")
    above = np.triu_indices(HEADS, 1)
    for layer, seen in enumerate(attention):
        each = [np.corrcoef(sample[:, -1].astype(float)) for sample in seen]
        square = pairs[pairs["layer"] == layer].pivot_table(index="head", columns="other", values="correlation")
        np.testing.assert_allclose(square.to_numpy(), np.mean(each, axis=0), atol=1e-5)
        assert frame.loc[str(layer), "pairs"] == pytest.approx(np.mean([one[above] for one in each]), abs=1e-5)
        within = []
        for sample, one in zip(seen, each, strict=True):
            labels = np.array(partition(sample, 5, CLUSTERS[layer]))
            same = (labels[:, None] == labels)[above]
            within.append(one[above][same].mean() if same.any() else np.nan)
        expected = np.nan if np.isnan(within).all() else np.nanmean(within)
        assert frame.loc[str(layer), "within"] == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert "not comparable" in (folder / "table.md").read_text()


def test_error_curves_begin_with_the_distance_to_the_mean_and_end_with_nothing(
    do: Do, prepared: Path, attention: list[np.ndarray]
) -> None:
    folder = do("error_curves", *asked(prepared), "starts=2")
    frame = pd.read_csv(folder / "data.csv")
    for layer, seen in enumerate(attention):
        own = frame[frame["layer"] == layer].set_index("clusters")
        last = seen[:, :, -1].astype(float)
        single = ((last - last.mean(1, keepdims=True)) ** 2).sum((1, 2)).mean()
        assert own["error"][1] == pytest.approx(single, rel=1e-4)
        assert own["relative"][1] == 1
        assert own["error"][HEADS] == pytest.approx(0, abs=1e-9)
        assert own["is_elbow"].sum() == 1
        assert (own["relative"].diff().dropna() <= 1e-9).all()
