"""On real weights and real documents, MHA's scores are those of stock lm-eval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from chai_eval import build_method, load_model
from chai_eval.scoring.evaluate import score
from chai_eval.scoring.prepare import prepare
from chai_eval.scoring.runner import Runner
from chai_eval.scoring.tasks import PAPER_TASKS, load_task
from chai_eval.settings import TaskSettings

pytestmark = pytest.mark.assets

DOCUMENTS = 5


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load_model("smollm2_mha", device="cpu", dtype="float32")


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_every_choice_and_every_prediction_equal_those_of_stock_lm_eval(loaded: tuple[Any, Any], name: str) -> None:
    model, tokenizer = loaded
    task = load_task(name, TaskSettings(source="local"))
    ours = score(Runner(model, tokenizer, progress=False), build_method("mha"), prepare(task, limit=DOCUMENTS, seed=1))
    theirs = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8),
        tasks=[load_task(name, TaskSettings(source="local"))],
        task_manager=TaskManager(include_defaults=False),
        limit=DOCUMENTS,
        bootstrap_iters=0,
    )
    samples = sorted(theirs["samples"][name], key=lambda sample: sample["doc_id"])
    assert len(samples) == DOCUMENTS
    for sample, (_, row) in zip(samples, ours.samples.iterrows(), strict=True):
        assert (sample["doc_hash"], sample["prompt_hash"]) == (row.doc_hash, row.prompt_hash)
        stock = [response[0][0] for response in sample["resps"]]
        # float32; a choice of a hundred tokens sums a hundred roundings of about 1e-5.
        np.testing.assert_allclose(row.loglikelihoods, stock, atol=1e-3, rtol=0)
        assert row.acc == sample["acc"]
        assert row.get("acc_norm") == sample.get("acc_norm")


def test_the_first_hundred_documents_of_piqa_score_as_known(loaded: tuple[Any, Any]) -> None:
    prepared = prepare(load_task("piqa", TaskSettings(source="local")), limit=100, seed=1)
    found = score(Runner(*loaded, progress=False), build_method("mha"), prepared).metrics
    assert found["acc"]["value"] == pytest.approx(0.65)
    assert found["acc_norm"]["value"] == pytest.approx(0.69)
