"""Rows of the table from results with stand-ins for what scoring leaves."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from chai_eval.errors import RunError
from chai_eval.report.rows import brief, row

WORDS = [10, 25, 40, 7]
LIKELIHOODS = {"mha": [-30.0, -70.0, -130.0, -22.0], "chai": [-33.0, -71.0, -128.0, -25.0]}


def result(metric: str, column: list[Any], value: float) -> Any:
    samples = pd.DataFrame({"doc_hash": list("abcd"), metric.partition(" (")[0]: column})
    return SimpleNamespace(samples=samples, record={"metrics": {metric: {"value": value}}, "n_documents": 4})


def perplexity(likelihoods: list[float], weights: list[float]) -> float:
    return math.exp(-sum(likelihoods) / sum(weights))


def made(metric: str, method: str) -> Any:
    """A result of running text, as lm-eval's samples hold the parts of its metrics."""
    parts = [json.dumps(each) for each in zip(LIKELIHOODS[method], WORDS, strict=True)]
    value = perplexity(LIKELIHOODS[method], WORDS)
    return result(metric, parts, math.log2(value) if metric == "bits_per_byte" else value)


@pytest.mark.parametrize("metric", ["word_perplexity", "byte_perplexity", "bits_per_byte"])
def test_metrics_of_running_text_have_an_interval_and_are_shown_as_they_are(metric: str) -> None:
    mha, chai = made(metric, "mha"), made(metric, "chai")
    found = row("text", metric, mha, chai, None)
    assert not found.percent
    assert found.difference is not None
    before, after = (each.record["metrics"][metric]["value"] for each in (mha, chai))
    assert found.difference.points == pytest.approx(100 * (after - before))
    assert found.difference.low < found.difference.points < found.difference.high


def test_a_perplexity_over_documents_of_equal_weight_has_one_as_well() -> None:
    results = [
        result("perplexity", LIKELIHOODS[name], perplexity(LIKELIHOODS[name], [1] * 4)) for name in ("mha", "chai")
    ]
    found = row("lambada_openai", None, *results, None)
    assert found.difference is not None
    assert found.difference.low <= found.difference.points <= found.difference.high


@pytest.mark.parametrize("lost", ["doc_hash of the baseline", "doc_hash of the method", "metric of the method"])
def test_a_result_that_lacks_what_a_row_needs_is_one_line(lost: str) -> None:
    mha, chai = (result("acc", [1.0, 0.0, 1.0, 1.0], 0.75) for _ in range(2))
    damaged = mha if lost.endswith("baseline") else chai
    damaged.folder = SimpleNamespace(path="results/tiny/piqa/damaged")
    if lost.startswith("doc_hash"):
        damaged.samples = damaged.samples.rename(columns={"doc_hash": "doc_hasi"})
    else:
        damaged.record["metrics"] = {"abc": {"value": 0.75}}
    with pytest.raises(RunError, match=r"^results/tiny/piqa/damaged lacks acc or doc_hash; move [^\n]+$"):
        row("piqa", "acc", mha, chai, None)


@pytest.mark.parametrize(
    "column",
    [[json.dumps(each) for each in ([1, 0], [1, 1], [0, 1], [1, 1])], ["not", "JSON", "at", "all"], [None] * 4],
    ids=["parts of F1", "texts", "nothing"],
)
def test_a_metric_that_is_made_otherwise_has_no_interval(column: list[Any]) -> None:
    found = row("mrpc", "f1", result("f1", column, 0.8), result("f1", column, 0.75), None)
    assert found.difference is not None
    assert found.difference.points == pytest.approx(-5)
    assert math.isnan(found.difference.low)


def test_shares_of_documents_keep_their_own_interval() -> None:
    before, after = result("acc", [1.0, 1.0, 0.0, 1.0], 0.75), result("acc", [1.0, 0.0, 0.0, 1.0], 0.5)
    found = row("piqa", "acc", before, after, None)
    assert found.percent
    assert found.difference is not None
    assert found.difference.points == -25
    assert np.isfinite(found.difference.low)


@pytest.mark.parametrize(
    ("fidelity", "expected"),
    [
        (None, (None, None)),
        ({"divergence": {"value": 0.25}, "agreement": {"value": 0.5}}, (0.25, 0.5)),
        ({"divergence": {"value": None}, "agreement": {"value": 0.5}}, (None, 0.5)),
        ({"divergence": {"value": None}, "agreement": {"value": 0.5}, "infinite_tokens": 2}, (math.inf, 0.5)),
    ],
)
def test_a_row_has_the_fidelity_of_the_record(fidelity: Any, expected: tuple[float | None, float | None]) -> None:
    found = row("text", None, made("word_perplexity", "mha"), made("word_perplexity", "chai"), None, fidelity)
    assert (found.divergence, found.agreement) == expected


def test_a_calibration_is_named_by_the_start_of_its_hash_and_counts_by_runs() -> None:
    assert brief({"sha256": "0123456789abcdef", "preset": "balanced"}) == "of calibration 01234567 balanced"
    assert brief([9, 9, 3]) == brief([[9, 2], [3, 1]]) == "9×2 3×1"
