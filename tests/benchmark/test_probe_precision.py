"""The comparison of clusters found in bfloat16 with those of float32, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from chai_eval.benchmark import probe_precision
from chai_eval.data.text import open_text
from chai_eval.methods import build_method
from chai_eval.models import load_model
from chai_eval.scoring.fidelity import fidelities
from chai_eval.scoring.runner import Runner

WORDS = "the cat sat on a mat while rain fell over hills and old men told tales of ships"
CLUSTERS = [[8, 1], [5, 1], [3, 2]]  # the model's own
SEED, TOKENS, SEQUENCES = 99, 24, 5


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "my text.txt"
    path.write_text("\n\n".join(WORDS[start:] for start in range(30)))
    return path


def test_the_float32_models_own_clusters_cost_what_fidelity_says_and_differ_nowhere(text: Path, tmp_path: Path) -> None:
    given = ["--model", "tiny_llama_random", "--text", str(text), "--requests", "12", "--tokens", str(TOKENS)]
    record = probe_precision.main([*given, "--sequences", str(SEQUENCES), "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["divergence"] == record["divergence"]
    own = record["partitions"][probe_precision.FULL]
    assert (own["partitions"], own["differ"]) == (3 * 12, 0)
    assert all(each["partitions"] == 3 * 12 for each in record["partitions"].values())

    runner, method = Runner(*load_model("tiny_llama_random", device="cpu")), build_method("chai", clusters=CLUSTERS)
    texts = open_text(str(text), SEED).documents
    expected = fidelities(runner, {"": method}, texts, tokens=TOKENS, sequences=SEQUENCES)[""]
    found = record["divergence"]["float32 model, clusters of the float32 model"]
    # float32, summed over a few hundred words.
    assert found["value"] == pytest.approx(expected.divergence.value, rel=1e-4)
    assert found["high"] == pytest.approx(expected.divergence.high, rel=1e-4)


def test_products_in_float32_are_those_of_bfloat16_numbers_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    states, weights = (torch.randn(20, 64, generator=generator).bfloat16() for _ in range(2))
    with probe_precision._InFloat32():
        found = linear(states, weights)
    exact = states.double() @ weights.double().T
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of 8 binary places, and a little for the sum in float32.
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)
