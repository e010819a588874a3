"""What a clustered layer does to predictions, held against predictions of the model with a little of the change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from chai_eval.attention.shape import attention_shape
from chai_eval.calibration import sensitivity
from chai_eval.calibration.moments import head_moments
from chai_eval.calibration.sensitivity import divergences, layer_sensitivity, true_divergences, with_gradients
from chai_eval.errors import RunError
from chai_eval.methods import build_method
from tests.attention.tiny import HEADS, LAYERS, MODELS, VOCABULARY, HeadLoop, chai_loop, looped_logits, requests

LENGTH = 9
# Of the change of the outputs; what is of third order in it cancels between the two signs.
PART = 0.002


def fixed_loop(serving: torch.Tensor) -> HeadLoop:
    """The last token of every head by the probabilities of the head that serves it."""

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = np.stack([own @ each for own, each in zip(probabilities, values, strict=True)])
        for head, by in enumerate(serving.tolist()):
            out[head, -1] = probabilities[by, -1] @ values[head]
        return out

    return layer_output


def shared_loop() -> HeadLoop:
    """Every layer by the probabilities that the layer before has of its own."""
    last: dict[str, np.ndarray] = {}

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        taken = last.get("own", probabilities) if layer else probabilities
        last["own"] = probabilities
        return np.stack([own @ each for own, each in zip(taken, values, strict=True)])

    return layer_output


def part_of(changed: HeadLoop, only: int, part: float) -> HeadLoop:
    """A part of the change in one layer, none in the others."""
    stock = chai_loop([HEADS] * LAYERS)

    def layer_output(layer: int, *given: np.ndarray) -> np.ndarray:
        before = stock(layer, *given)
        after = changed(layer, *given)
        return before + part * (after - before) if layer == only else before

    return layer_output


def measured(model: torch.nn.Module, ids: torch.Tensor, changed: HeadLoop, layer: int) -> float:
    """KL divergence of the last token's predictions as the change goes to zero, scaled up to all of it."""
    exact = copy.deepcopy(model).double()
    stock, *others = (
        looped_logits(exact, [ids], part_of(changed, layer, part))[0][-1].log_softmax(-1) for part in (0, PART, -PART)
    )
    return float(np.mean([(stock.exp() * (stock - other)).sum().item() for other in others])) / PART**2


def expected(model, ids: torch.Tensor, serving: torch.Tensor, probe: int) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    """The mean over all tokens that could be drawn for the last position."""
    with torch.no_grad():
        likely = model(input_ids=ids[None], use_cache=False).logits[0, -1].softmax(-1)

    def last(token: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda likely: torch.tensor([0] * (len(likely) - 1) + [token])

    found = [divergences(with_gradients(model, ids, last(token)), serving, probe) for token in range(VOCABULARY)]
    chai, fixed = (torch.stack(each) for each in zip(*found, strict=True))
    weight = likely.double()[:, None, None]
    return (weight * chai).sum(0), (weight * fixed).sum(0)


@pytest.mark.parametrize("kind", ["llama", "llama_gqa", "opt"])
def test_a_small_change_moves_predictions_as_far_as_is_foretold(kind: str) -> None:
    model = MODELS[kind]()
    (ids,) = requests([LENGTH])
    every = torch.arange(HEADS).expand(LAYERS, HEADS, -1)
    # All tokens but the last are the probe: what is summed over tokens is the last one's alone.
    chai, _ = expected(model, ids, every, LENGTH - 1)
    for layer, count in ((0, 2), (1, 5), (2, 1)):
        counts = [count if at == layer else HEADS for at in range(LAYERS)]
        found = measured(model, ids, chai_loop(counts, probe_tokens=LENGTH - 1), layer)
        # Differences of float32 and what is of fourth order in the part.
        assert float(chai[layer, count - 1]) == pytest.approx(found, rel=1e-2)
    assert torch.equal(chai[:, -1], torch.zeros(LAYERS).double())


def test_fixed_memberships_change_every_token() -> None:
    model = MODELS["llama"]()
    (ids,) = requests([2])
    drawn = torch.Generator().manual_seed(3)
    # Of two tokens the first has one key only, which every head attends to: what is summed is the last one's alone.
    serving = torch.randint(HEADS, (LAYERS, HEADS, HEADS), generator=drawn)
    _, fixed = expected(model, ids, serving, 1)
    for layer, count in ((0, 3), (1, 7), (2, 1)):
        found = measured(model, ids, fixed_loop(serving[layer, count - 1]), layer)
        assert float(fixed[layer, count - 1]) == pytest.approx(found, rel=1e-2)


@pytest.mark.parametrize("kind", ["llama", "llama_gqa", "opt"])
def test_a_layer_with_the_probabilities_of_the_one_before_moves_predictions_as_far_as_is_foretold(kind: str) -> None:
    model = MODELS[kind]()
    # Of two tokens the first has one key only, which every head attends to: what is summed is the last one's alone.
    (ids,) = requests([2])
    with torch.no_grad():
        likely = model(input_ids=ids[None], use_cache=False).logits[0, -1].double().softmax(-1)
    foretold = torch.zeros(LAYERS).double()
    for token in range(VOCABULARY):
        layers = with_gradients(model, ids, lambda likely, drawn=token: torch.tensor([0, drawn]))
        for at, each in enumerate(layers):
            found = head_moments(*each, layers[at - 1].seen if at else None)
            foretold[at] += likely[token] * found["layer_share"]
    assert float(foretold[0]) == 0
    for layer in range(1, LAYERS):
        found = measured(model, ids, shared_loop(), layer)
        assert float(foretold[layer]) == pytest.approx(found, rel=1e-2)


def test_the_model_is_left_as_it_was_and_what_is_known_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["opt"]()
    wanted = [each.requires_grad for each in model.parameters()]
    serving = torch.zeros(LAYERS, HEADS, HEADS, dtype=torch.int64)
    samples = requests([12, 12, 7])
    first = layer_sensitivity(model, samples, serving, 5, 1, tmp_path / "sensitivity.pt")
    assert [each.requires_grad for each in model.parameters()] == wanted
    assert all(each.grad is None for each in model.parameters())
    assert first.divergence.shape == (2, attention_shape(model).layers, HEADS)
    assert (first.divergence[1] > 0).all()

    def never(*given: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(sensitivity, "divergences", never)
    again = layer_sensitivity(model, samples, serving, 5, 1, tmp_path / "sensitivity.pt")
    assert torch.equal(first.divergence, again.divergence)
    assert again.moments.tokens == first.moments.tokens == 31
    assert all(torch.equal(each, again.moments.sums[name]) for name, each in first.moments.sums.items())


def test_divergences_of_whole_methods_are_those_of_loops() -> None:
    model = MODELS["llama"]()
    samples = requests([12, 20])
    counts = [3, HEADS, 5]
    stock, clustered = (looped_logits(model, samples, chai_loop(each)) for each in ([HEADS] * LAYERS, counts))
    pairs = [(a.log_softmax(-1), b.log_softmax(-1)) for a, b in zip(stock, clustered, strict=True)]
    whole = sum((a.exp() * (a - b)).sum().item() for a, b in pairs) / 32
    methods = [build_method("chai", clusters=[[HEADS, LAYERS]]), build_method("chai", clusters=counts)]
    # Logits within 1e-4 of each other, and a divergence of their order.
    assert true_divergences(model, samples, methods) == pytest.approx([0, whole], rel=1e-3, abs=1e-6)


def test_tokens_that_are_ruled_out_under_every_method_change_no_divergence() -> None:
    model = MODELS["llama"]()
    gone = [0, 1, VOCABULARY - 1]
    model.lm_head.register_forward_hook(
        lambda module, args, logits: logits.index_fill(-1, torch.tensor(gone), -torch.inf)
    )
    samples = requests([12, 20])
    counts = [3, HEADS, 5]
    stock, clustered = (looped_logits(model, samples, chai_loop(each)) for each in ([HEADS] * LAYERS, counts))
    kept = [token for token in range(VOCABULARY) if token not in gone]
    pairs = [(a[:, kept].log_softmax(-1), b[:, kept].log_softmax(-1)) for a, b in zip(stock, clustered, strict=True)]
    whole = sum((a.exp() * (a - b)).sum().item() for a, b in pairs) / 32
    assert true_divergences(model, samples, [build_method("chai", clusters=counts)]) == pytest.approx([whole], rel=1e-3)
    serving = torch.zeros(LAYERS, HEADS, HEADS, dtype=torch.int64)
    foretold = divergences(with_gradients(model, samples[0], lambda likely: likely.argmax(-1)), serving, 5)
    assert torch.isfinite(torch.stack(foretold)).all()
    assert (foretold[1] > 0).any()


def test_predictions_that_are_no_numbers_are_said_in_one_line() -> None:
    model = MODELS["llama"]()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(RunError, match=r"^model: its predictions for the calibration text are not all finite"):
        with_gradients(model, requests([12])[0], lambda likely: likely.argmax(-1))
