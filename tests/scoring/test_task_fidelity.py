from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lm_eval.api.instance import Instance

from chai_eval.methods import build_method
from chai_eval.models import load_model
from chai_eval.scoring import fidelity as core
from chai_eval.scoring.evaluate import PreparedTask, prepare, score
from chai_eval.scoring.pack import ScoringRequest
from chai_eval.scoring.ranks import Ranks
from chai_eval.scoring.task_fidelity import request_tokens, task_fidelity
from chai_eval.scoring.tasks import load_task
from tests.scoring.test_ranks import together

VALUES = ["divergence", "agreement", "log_likelihood", "baseline_log_likelihood"]
# Of documents of very different lengths, the shortest within the probe of CHAI once "Question: " is taken off.
GOALS = ["a", "open a jar of very old plum jam", "fold", "sharpen a knife on the unglazed foot of a mug, slowly", "b c"]
METHODS = {
    "chai": {"clusters": [[2, 4]]},
    "v_reuse": {"clusters": [[3, 4]]},
    "spatten": {"token_sparsity": 0.3, "spare_layers": 1},
    "dejavu": {"sparsity": 0.5},
}


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return load_model("tiny_llama_random", device="cpu")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedTask:
    folder = tmp_path_factory.mktemp("documents")
    rows = [{"goal": goal, "sol1": f"with {goal[::-1]}", "sol2": "no", "label": 1} for goal in GOALS]
    (folder / "piqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return prepare(load_task("piqa", data_dir=folder), limit=None, seed=1)


def compared(tiny: tuple[Any, Any], prepared: PreparedTask, name: str = "chai", **settings: Any) -> pd.DataFrame:
    wanted = {"documents": len(GOALS), "progress": False, **settings}
    found = task_fidelity(*tiny, build_method(name, **METHODS[name]), prepared, wanted.pop("documents"), **wanted)
    assert found is not None
    return found.samples


def by_hand(tiny: tuple[Any, Any], method: Any, text: str) -> list[float]:
    """The four values of a text alone, in float64, token by token."""
    model, tokenizer = tiny
    ids = torch.tensor(tokenizer(text)["input_ids"])
    with torch.no_grad():
        expected = model(ids[None]).logits[0].double().softmax(-1)
        with method.applied(model):
            given = model(ids[None]).logits[0].double().softmax(-1)
    values = []
    for at in range(len(ids) - 1):
        p, q, following = expected[at], given[at], ids[at + 1]
        divergence = float((p * (p / q).log()).sum())
        values.append([divergence, float(p.argmax() == q.argmax()), math.log(q[following]), math.log(p[following])])
    return np.mean(values, axis=0).tolist()


@pytest.mark.parametrize("name", METHODS)
def test_each_document_equals_its_first_request_alone_one_token_at_a_time(
    tiny: tuple[Any, Any], prepared: PreparedTask, name: str
) -> None:
    samples = compared(tiny, prepared, name)
    assert samples["doc_id"].tolist() == list(range(len(GOALS)))
    method = build_method(name, **METHODS[name])
    for goal, row in zip(GOALS, samples.itertuples(), strict=True):
        text = f"Question: {goal}\nAnswer: with {goal[::-1]}"  # lm-eval's prompt, with the first choice
        # The tokenizer has a token for each byte, and one before them, which nothing predicts.
        assert row.tokens == len(text)
        # float32, summed over a few hundred words.
        assert [getattr(row, name) for name in VALUES] == pytest.approx(by_hand(tiny, method, text), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_document_does_not_depend_on_its_batch(tiny: tuple[Any, Any], prepared: PreparedTask, name: str) -> None:
    alone = compared(tiny, prepared, name, batch_tokens=1)
    together = compared(tiny, prepared, name, batch_tokens=100_000)
    fewer = compared(tiny, prepared, name, documents=2)
    np.testing.assert_allclose(alone[VALUES], together[VALUES], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fewer[VALUES], together[VALUES][:2], rtol=1e-4, atol=1e-5)


def test_means_are_over_documents_and_perplexity_over_tokens(tiny: tuple[Any, Any], prepared: PreparedTask) -> None:
    found = task_fidelity(*tiny, build_method("chai", **METHODS["chai"]), prepared, 3, progress=False)
    assert found is not None
    assert found.sequences == 3
    assert found.divergence.value == pytest.approx(found.samples["divergence"].mean())
    total = (found.samples["log_likelihood"] * found.samples["tokens"]).sum()
    assert found.perplexity == pytest.approx(math.exp(-total / found.tokens))


def test_no_more_logits_are_held_than_fit_and_a_longer_document_is_compared_in_parts(
    tiny: tuple[Any, Any], prepared: PreparedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compared(tiny, prepared)
    held: list[int] = []
    compare = core._compare

    def noting(expected: torch.Tensor, given: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert expected.shape == given.shape
        held.append(expected.numel() * expected.element_size())
        return compare(expected, given, target)

    most = 50 * tiny[0].config.vocab_size * 4
    monkeypatch.setattr(core, "LOGITS_BYTES", most)
    monkeypatch.setattr(core, "_compare", noting)
    parts = compared(tiny, prepared)
    assert max(held) <= most
    assert len(held) > len(GOALS)
    np.testing.assert_allclose(parts[VALUES], whole[VALUES], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_share_the_passes_and_find_what_one_does_to_the_bit(
    tiny: tuple[Any, Any], prepared: PreparedTask, size: int
) -> None:
    models = [load_model("tiny_llama_random", device="cpu") for _ in range(size)]

    def work(ranks: Ranks) -> pd.DataFrame:
        return compared(models[ranks.rank], prepared, batch_tokens=80, ranks=ranks)

    alone = compared(tiny, prepared, batch_tokens=80)
    for found in together(size, work):
        pd.testing.assert_frame_equal(found, alone, check_exact=True)


def asked(kind: str, *arguments: Any) -> Instance:
    return Instance(kind, {}, arguments, 0)


def test_tokens_are_those_that_lm_eval_makes_of_each_kind_of_request(tiny: tuple[Any, Any]) -> None:
    encode = tiny[1]

    def read(*requests: Instance) -> list[list[int]]:
        return [list(each) for each in request_tokens(*tiny, requests)]

    begin = encode.bos_token_id
    # A space at the end of a context goes over to the continuation; an empty context is BOS.
    assert read(asked("loglikelihood", "How? ", "So."), asked("loglikelihood", "", "So.")) == [
        encode("How? So.")["input_ids"],
        encode("So.")["input_ids"],
    ]
    assert read(asked("loglikelihood_rolling", "Once")) == [[begin, *encode("Once")["input_ids"]]]
    assert read(asked("generate_until", "Once", {"until": ["."]})) == [encode("Once")["input_ids"]]


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_what_is_longer_than_the_models_positions_loses_its_start_as_in_scoring(kind: str) -> None:
    model, tokenizer = load_model("tiny_llama_random", device="cpu", config={"max_position_embeddings": 40})
    second: dict[str, Any] = {"loglikelihood": (" end",), "loglikelihood_rolling": (), "generate_until": ({},)}
    long = asked(kind, "word " * 30 + "last", *second[kind])
    (cut,) = request_tokens(model, tokenizer, [long])
    text = "".join(each for each in long.args if isinstance(each, str))
    whole = tuple(tokenizer(text)["input_ids"])
    assert cut == whole[-41:]
    scored = ScoringRequest(whole[:-4], whole[-4:]).truncated(40)
    assert cut == scored.context + scored.continuation


def test_running_text_has_the_log_likelihood_that_scoring_gives_it(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One passage.\n\nAnother, of more words than that.\n\nA third.\n")
    text = prepare(load_task("text", text=str(tmp_path / "a.txt")), limit=None, seed=1)
    method = build_method("chai", **METHODS["chai"])
    samples = compared(tiny, text, documents=3)
    for column, scorer in (("baseline_log_likelihood", build_method("mha")), ("log_likelihood", method)):
        scored = score(*tiny, scorer, text, progress=False)
        assert scored is not None
        likelihoods = [json.loads(each)[0] for each in scored.samples["word_perplexity"]]
        # Sums over a few dozen tokens in float32.
        np.testing.assert_allclose(samples[column] * samples["tokens"], likelihoods, rtol=1e-5)


def test_where_nothing_is_predicted_there_is_nothing_to_compare(tiny: tuple[Any, Any]) -> None:
    empty = SimpleNamespace(task_name="empty", task=SimpleNamespace(instances=[asked("generate_until", "", {})]))
    assert task_fidelity(*tiny, build_method("mha"), empty, 5, progress=False) is None  # type: ignore[arg-type]
