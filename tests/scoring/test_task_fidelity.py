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
from chai_eval.scoring import compare as core
from chai_eval.scoring.evaluate import score
from chai_eval.scoring.fidelity import first_requests, task_fidelity
from chai_eval.scoring.pack import ScoringRequest
from chai_eval.scoring.prepare import PreparedTask, prepare
from chai_eval.scoring.ranks import Ranks
from chai_eval.scoring.runner import Runner
from chai_eval.scoring.tasks import load_task
from chai_eval.scoring.tokens import request_tokens
from chai_eval.settings import TaskSettings
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
    return prepare(load_task("piqa", TaskSettings(data_dir=folder)), limit=None, seed=1)


def compared(tiny: tuple[Any, Any], prepared: PreparedTask, name: str = "chai", **settings: Any) -> pd.DataFrame:
    documents = settings.pop("documents", len(GOALS))
    runner = Runner(*tiny, progress=False, **settings)
    found = task_fidelity(runner, build_method(name, **METHODS[name]), prepared, documents)
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
    found = task_fidelity(Runner(*tiny, progress=False), build_method("chai", **METHODS["chai"]), prepared, 3)
    assert found is not None
    assert found.sequences == 3
    assert found.divergence.value == pytest.approx(found.samples["divergence"].mean())
    total = (found.samples["log_likelihood"] * found.samples["tokens"]).sum()
    assert found.perplexity == pytest.approx(math.exp(-total / found.tokens))


class Watched:
    """CHAI, which notes when it is put in, and how many tokens its passes and plain attention's have."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch) -> None:
        self.passes: list[tuple[str, list[int]]] = []
        for name in ("mha", "chai"):
            made = type(build_method(name, **METHODS.get(name, {})))
            patch.setattr(made, "applied", self._noting(name, made.applied))
        forward = model.forward

        def counted(*args: Any, **given: Any) -> Any:
            self.passes[-1][1].append(given["input_ids"].shape[1])
            return forward(*args, **given)

        patch.setattr(model, "forward", counted)

    def _noting(self, name: str, applied: Any) -> Any:
        def noting(method: Any, model: Any) -> Any:
            self.passes.append((name, []))
            return applied(method, model)

        return noting


def test_no_more_logits_are_held_than_fit_but_those_of_a_longer_document_which_has_one_pass(
    tiny: tuple[Any, Any], prepared: PreparedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compared(tiny, prepared)
    lengths = sorted(whole["tokens"])
    most = lengths[-1] - 1  # all fit but the longest
    monkeypatch.setattr(core, "LOGITS_BYTES", 40 * tiny[0].config.vocab_size * 4)
    monkeypatch.setattr(core, "HELD_BYTES", most * tiny[0].config.vocab_size * 4)
    watched = Watched(tiny[0], monkeypatch)
    parts = compared(tiny, prepared)
    np.testing.assert_allclose(parts[VALUES], whole[VALUES], rtol=1e-4, atol=1e-5)
    plain, clustered = watched.passes[::2], watched.passes[1::2]
    assert len(plain) > 1
    assert ["mha"] * len(plain) == [name for name, _ in plain]
    # Each method runs over the same passes, once.
    assert [tokens for _, tokens in plain] == [tokens for _, tokens in clustered]
    assert sum(sum(tokens) for _, tokens in plain) == sum(lengths)
    assert plain[0][1] == [lengths[-1]]
    assert all(sum(tokens) <= most for _, tokens in plain[1:])
    assert any(len(tokens) > 1 for _, tokens in plain)


def test_a_method_is_put_in_once_where_all_fits(
    tiny: tuple[Any, Any], prepared: PreparedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tiny[0], monkeypatch)
    compared(tiny, prepared, batch_tokens=1)
    assert [(name, len(tokens)) for name, tokens in watched.passes] == [("mha", len(GOALS)), ("chai", len(GOALS))]


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


def test_scores_are_shared_after_every_round_of_passes_and_the_bar_counts_those_of_all(
    tiny: tuple[Any, Any], prepared: PreparedTask
) -> None:
    models = [load_model("tiny_llama_random", device="cpu") for _ in range(2)]
    tokens = request_tokens(*tiny, first_requests(prepared))

    def work(ranks: Ranks) -> list[int]:
        done: list[int] = []
        method = build_method("chai", **METHODS["chai"])
        runner = Runner(*models[ranks.rank], batch_tokens=1, ranks=ranks)
        core.compare(runner, {"chai": method}, tokens, after=done.append)
        return done

    assert together(1, work) == [[1] * len(GOALS)]
    assert together(2, work) == [[2, 2, 1]] * 2


def test_no_process_holds_more_logits_than_fit(
    tiny: tuple[Any, Any], prepared: PreparedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 130
    monkeypatch.setattr(core, "HELD_BYTES", most * tiny[0].config.vocab_size * 4)
    held: list[list[list[int]]] = []
    split = core._held_together

    def noting(plan: Any, most: int, size: int) -> Any:
        parts = split(plan, most, size)
        held.extend([[batch.tokens for batch in part[rank::size]] for rank in range(size)] for part in parts)
        return parts

    monkeypatch.setattr(core, "_held_together", noting)
    models = [load_model("tiny_llama_random", device="cpu") for _ in range(2)]
    alone = compared(tiny, prepared, batch_tokens=1)
    held.clear()
    for found in together(2, lambda ranks: compared(models[ranks.rank], prepared, batch_tokens=1, ranks=ranks)):
        pd.testing.assert_frame_equal(found, alone, check_exact=True)
    assert any(len(tokens) > 1 for part in held for tokens in part)
    assert all(len(tokens) <= 1 or sum(tokens) <= most for part in held for tokens in part)


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
    text = prepare(load_task("text", TaskSettings(text=str(tmp_path / "a.txt"))), limit=None, seed=1)
    method = build_method("chai", **METHODS["chai"])
    samples = compared(tiny, text, documents=3)
    for column, scorer in (("baseline_log_likelihood", build_method("mha")), ("log_likelihood", method)):
        scored = score(Runner(*tiny, progress=False), scorer, text)
        assert scored is not None
        likelihoods = [json.loads(each)[0] for each in scored.samples["byte_perplexity"]]
        # Sums over a few dozen tokens in float32.
        np.testing.assert_allclose(samples[column] * samples["tokens"], likelihoods, rtol=1e-5)


def test_where_nothing_is_predicted_there_is_nothing_to_compare(tiny: tuple[Any, Any]) -> None:
    empty = SimpleNamespace(task_name="empty", task=SimpleNamespace(instances=[asked("generate_until", "", {})]))
    assert task_fidelity(Runner(*tiny, progress=False), build_method("mha"), empty, 5) is None  # type: ignore[arg-type]
