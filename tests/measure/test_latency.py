"""What is timed, in which order, what is kept, and what happens where memory runs out; with a clock that ticks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from chai_eval.errors import SettingError
from chai_eval.measure import latency
from chai_eval.measure.ceiling import Ceiling
from chai_eval.measure.contenders import Contender, contender
from chai_eval.measure.figures import Measured
from chai_eval.measure.generation import Generation, prepared, prompt, timed
from chai_eval.measure.grid import measure
from chai_eval.measure.room import OutOfMemory
from chai_eval.measure_settings import MeasureSettings, Point
from chai_eval.methods import build_method

from ..attention.tiny import LAYERS, llama, opt
from .fakes import Failing, TickingClock

CEILING = Ceiling(1e9, 2e9, 1e10)
CHAI = {"clusters": [[8, 1], [3, 2]]}


@pytest.fixture(autouse=True)
def known_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ceiling that is known without minutes of copying."""
    monkeypatch.setattr("chai_eval.measure.grid.measure_ceiling", lambda *_, **__: CEILING)


def chai() -> Contender:
    return contender(build_method("chai", **CHAI))


def measured(model: PreTrainedModel, *methods: Contender, **changes: Any) -> Measured:
    settings = {"kind": "latency", "lengths": (12,), "new_tokens": (4,), "repetitions": 3, "rivals": ("sdpa", "rows")}
    return measure(model, methods, MeasureSettings(**(settings | changes)), clock=TickingClock())


def test_a_generation_is_timed_token_by_token() -> None:
    model = llama()
    times = timed(model, prompt(model, Point(12, 2, 4), 0), 3, TickingClock())
    assert times.prefill == 1.0
    assert times.steps == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("build", [llama, opt])
@pytest.mark.parametrize("rival", ["sdpa", "eager", "rows", None])
@torch.inference_mode()
def test_steps_that_are_to_be_captured_give_the_same_tokens_and_say_how_they_were_run(
    build: Any, rival: str | None
) -> None:
    model = build()
    contender = chai() if rival is None else Contender("mha", rival)
    tokens = prompt(model, Point(12, 2, 6), 0)
    with contender.applied(model):
        plain, other = Generation(model, tokens), Generation(model, tokens)
        for _ in range(6):
            plain.forward()
        other.forward()
        with prepared(other, 5, capture=True) as (step, decoding):
            for expected in plain.new[1:]:
                step()
                last = other.new[-1] if rival == "eager" else step.__self__.token  # type: ignore[attr-defined]
                assert torch.equal(last, expected)
    own = "the model's own attention is eager" if rival == "eager" else "cpu has no graphs"
    assert decoding == f"not captured: {own}"


@pytest.mark.parametrize("build", [llama, opt])
def test_the_tokens_that_are_timed_are_those_that_generate_gives(build: Any) -> None:
    model = build()
    tokens = prompt(model, Point(12, 2, 6), 0)
    with torch.inference_mode(), chai().applied(model):
        run = Generation(model, tokens)
        run.forward()
        for _ in range(5):
            run.forward()
        whole = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False, eos_token_id=None
        )
    assert torch.equal(torch.cat([tokens, *run.new], 1), whole)


def test_every_sample_is_kept_but_those_of_the_warm_up() -> None:
    found = measured(llama(), chai(), warmup=2)
    names = ["mha (sdpa)", "mha (rows)", "chai"]
    assert len(found.samples) == 3 * 3 * 4
    for name in names:
        own = [sample for sample in found.samples if sample.contender == name]
        assert [sample.phase for sample in own] == 3 * ["prefill", "decode", "decode", "decode"]
        assert sorted({sample.repetition for sample in own}) == [0, 1, 2]
        assert sorted({sample.turn for sample in own}) == [0, 1, 2]
    assert [each["name"] for each in found.record["contenders"]] == names


def test_figures_follow_from_the_samples() -> None:
    found = measured(llama(), chai(), batch_sizes=(2,))
    (point,) = found.record["points"]
    result = point["results"]["chai"]
    assert result["ttft"] == {"median": 1.0, "p10": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "n": 3}
    assert result["tpot"]["n"] == 9
    assert result["tokens_per_second"] == 2.0  # two requests, a second a token
    assert result["prefill_tokens_per_second"] == 24.0
    assert result["times_as_fast_as"]["mha (sdpa)"]["tpot"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert point["results"]["mha (sdpa)"]["limit"]["ttft"]["times_as_fast_as_mha"] == 1.0
    assert result["limit"]["ttft"]["times_as_fast_as_mha"] > 1.0


def test_the_share_of_clustering_is_that_of_the_calls_that_find_memberships() -> None:
    model, clock = llama(), TickingClock()
    settings = MeasureSettings("latency", (12,), new_tokens=(1,), repetitions=3)
    tokens = prompt(model, settings.points[0], 0)
    share = latency.clustering_share(model, chai(), tokens, settings, clock)
    clustered_layers = LAYERS - 1
    # Two marks around each call, one before all and one after: each call takes one of 2n + 1 ticks.
    assert share == clustered_layers / (2 * clustered_layers + 1)


def test_a_method_that_is_not_clustering_has_no_share() -> None:
    (point,) = measured(llama()).record["points"]
    assert all("clustering_share" not in result for result in point["results"].values())


def test_one_new_token_has_no_time_per_token() -> None:
    (point,) = measured(llama(), chai(), new_tokens=(1,)).record["points"]
    assert "tpot" not in point["results"]["chai"]
    assert "tpot" not in point["results"]["chai"]["limit"]


def test_two_methods_of_one_name_are_told_apart() -> None:
    (point,) = measured(llama(), chai(), chai(), rivals=()).record["points"]
    assert list(point["results"]) == ["chai 1", "chai 2"]


def test_the_model_is_left_as_it_was() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    tokens = prompt(model, Point(12, 1, 1), 0)
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        measured(model, chai(), rivals=None)
        after = model(input_ids=tokens).logits
    assert model.config._attn_implementation == "eager"
    assert torch.equal(before, after)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_contender_that_runs_out_of_memory_is_recorded_and_the_rest_goes_on(nth: int) -> None:
    failing = Failing("greedy", "sdpa", nth=nth)
    found = measured(llama(), failing, chai(), lengths=(8, 12))
    first, second = (point["results"] for point in found.record["points"])
    assert first["greedy"]["out_of_memory"]["asked_bytes"] == 2 << 30
    assert first["greedy"]["out_of_memory"]["free_bytes"] > 0
    assert first["greedy"]["out_of_memory"]["foreseen"] is False
    assert "ttft" not in first["greedy"]
    assert not [s for s in found.samples if s.contender == "greedy" and s.length == 8]
    assert "ttft" in first["chai"]
    assert "ttft" in second["greedy"]


def test_an_error_that_has_nothing_to_do_with_memory_ends_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        measured(llama(), Failing("broken", "sdpa", error=RuntimeError("shapes do not match")))


def test_a_point_that_would_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chai_eval.measure.room.free_bytes", lambda device: 100_000)
    found = measured(llama(), chai(), lengths=(4, 100))
    small, large = (point["results"] for point in found.record["points"])
    assert all("ttft" in result for result in small.values())
    for result in large.values():
        trouble = OutOfMemory(**result["out_of_memory"])
        assert trouble.foreseen
        assert trouble.asked_bytes is not None
        assert trouble.asked_bytes > 100_000
        assert trouble.free_bytes == 100_000
    assert {sample.length for sample in found.samples} == {4}


def test_a_sequence_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(SettingError, match=r"measure\.lengths: 126 given, .* 128 positions; allowed: 1 to 124"):
        measured(llama(), lengths=(126,))


def test_a_rival_that_the_machine_has_not_is_said() -> None:
    found = measured(llama(), rivals=("sdpa", "flash"))
    assert found.record["notes"] == ["mha (flash): not measured, flash attention needs a CUDA device"]
