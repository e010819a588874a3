"""Decoding in steps of fixed shapes is decoding, and a step asks the host nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from chai_eval.attention import Hooks, apply
from chai_eval.attention.decode_graph import DecodingSteps, NotFixedError, decoding_steps, in_rows
from chai_eval.attention.kernels import decode
from chai_eval.attention.passes import cache_in
from chai_eval.methods import build_method
from tests.attention.no_host import no_host_work
from tests.attention.tiny import HEADS, MODELS, padded, requests
from tests.methods.cases import CASES

# float32: sums over the free room, too, are in another order.
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-4}
STEPS = 9
STATIC = [[0, 0, 1, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 5, 6, 7], [0] * 8]
CONTENDERS = ("mha", "chai", "chai_static", "v_reuse", "kv_rank")


@contextmanager
def applied(model: PreTrainedModel, name: str) -> Iterator[None]:
    """A method put in; plain attention as methods' hooks compute it."""
    if name == "mha":
        with apply(model, Hooks()):
            yield
        return
    settings: dict[str, Any] = {"membership": STATIC} if name == "chai_static" else {"clusters": [HEADS, 5, 3]}
    method = CASES["kv_rank"].build(model) if name == "kv_rank" else build_method(name, **settings)
    with method.applied(model):
        yield


def prompt_of(model: PreTrainedModel, ids: Tensor, **more: Any) -> tuple[dict[str, Any], Tensor]:
    """The cache after a prompt, and the next token of every row."""
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **more)
    return cache_in(out), out.logits[:, -1].argmax(-1, keepdim=True)


def eager(model: PreTrainedModel, past: dict[str, Any], token: Tensor, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and logits of ordinary passes."""
    tokens, logits = [], []
    for _ in range(steps):
        out = model(input_ids=token, use_cache=True, **past)
        past, token = cache_in(out), out.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
        logits.append(out.logits)
    return tokens, logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("contender", CONTENDERS)
@torch.inference_mode()
def test_steps_of_fixed_shapes_decode_what_ordinary_passes_do(name: str, contender: str) -> None:
    model, ids = MODELS[name](), torch.stack(requests([20] * 3))
    with applied(model, contender):
        tokens, logits = eager(model, *prompt_of(model, ids), STEPS + 2)
        past, token = prompt_of(model, ids)
        with decoding_steps(model, past, token, STEPS) as (steps, why):
            assert why == "cpu has no graphs"
            for expected, beside in zip(tokens[:STEPS], logits, strict=False):
                assert torch.equal(steps.step(), expected)
                torch.testing.assert_close(steps.logits, beside, **CLOSE)
            with pytest.raises(ValueError, match="steps: 10 asked for; allowed: the 9 "):
                steps.step()
        # What goes on from the cache afterwards is an ordinary pass again.
        after, _ = eager(model, past, steps.token, 2)
        assert [each.tolist() for each in after] == [each.tolist() for each in tokens[STEPS:]]


@pytest.mark.parametrize("contender", CONTENDERS)
@torch.inference_mode()
def test_rows_of_different_length_go_on_each_at_its_own_column(contender: str) -> None:
    model, alone = MODELS["llama"](), requests([20, 9, 14])
    ids, mask = padded(alone, "left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with applied(model, contender):
        past, token = prompt_of(model, ids, attention_mask=mask, position_ids=positions)
        steps = DecodingSteps(model, past, token, STEPS, positions=mask.sum(1, keepdim=True))
        found = torch.cat([steps.step().clone() for _ in range(STEPS)], dim=1)
        for row, request in enumerate(alone):
            expected, _ = eager(model, *prompt_of(model, request[None]), STEPS)
            assert found[row].tolist() == torch.cat(expected).flatten().tolist()


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_cache_of_the_models_own_goes_on_as_one_of_ours(name: str) -> None:
    model, ids = MODELS[name](), torch.stack(requests([12] * 2))
    past, token = prompt_of(model, ids)
    tokens, logits = eager(model, *prompt_of(model, ids), STEPS)
    ((named, cache),) = past.items()
    assert isinstance(cache, DynamicCache)
    with apply(model, Hooks()):
        steps = DecodingSteps(model, {named: in_rows(cache)}, token, STEPS)
        for expected, beside in zip(tokens, logits, strict=True):
            assert torch.equal(steps.step(), expected)
            torch.testing.assert_close(steps.logits, beside, **CLOSE)


@pytest.mark.parametrize("contender", CONTENDERS)
@torch.inference_mode()
def test_a_step_that_is_run_again_sees_the_same_tokens(contender: str) -> None:
    model, ids = MODELS["llama_gqa"](), torch.stack(requests([20] * 2))
    with applied(model, contender):
        _, (expected,) = eager(model, *prompt_of(model, ids), 1)
        past, token = prompt_of(model, ids)
        steps = DecodingSteps(model, past, token, 1, again=True)
        for _ in range(3):
            steps.token.copy_(token)
            steps.step()
            torch.testing.assert_close(steps.logits, expected, **CLOSE)
        steps.release()
        assert next(iter(past.values())).get_seq_length() == 20


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("contender", CONTENDERS)
@torch.inference_mode()
def test_a_step_asks_the_host_nothing(name: str, contender: str) -> None:
    model, (ids, mask) = MODELS[name](), padded(requests([20, 14]), "left")
    with applied(model, contender):
        for aligned in (True, False):
            given = {} if aligned else {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
            steps = DecodingSteps(model, *prompt_of(model, ids, **given), STEPS)
            with no_host_work():
                steps._step()


def asking() -> dict[str, Callable[[Tensor], object]]:
    """Ways to make the host wait: of numbers that were there before the step, and of what it computes."""
    return {
        "tolist": lambda cluster: cluster.tolist(),
        "item": lambda cluster: cluster.max().item(),
        "branch": lambda cluster: bool((cluster > 1).all()),
        "int": lambda cluster: int(cluster[0, 0]),
        "transfer": lambda cluster: cluster.cpu(),
        "nonzero": lambda cluster: cluster.nonzero(),
        "where": lambda cluster: torch.where(cluster > 1),
        "boolean indexing": lambda cluster: cluster[cluster > 1],
        "unique": lambda cluster: torch.unique(cluster),
        "repeats": lambda cluster: torch.repeat_interleave(cluster[0], cluster[0]),
    }


@pytest.mark.parametrize("way", asking())
@torch.inference_mode()
def test_a_step_that_asks_the_host_is_found_out(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, attend, ask = MODELS["llama"](), decode.attend, asking()[way]

    def waiting(query: Tensor, key: Tensor, value: Tensor, shared: Any, *more: Any) -> Tensor:
        ask(shared.membership.cluster)
        return attend(query, key, value, shared, *more)

    with applied(model, "chai"):
        steps = DecodingSteps(model, *prompt_of(model, torch.stack(requests([20] * 2))), STEPS)
        monkeypatch.setattr(decode, "attend", waiting)
        with pytest.raises((AssertionError, RuntimeError)), no_host_work():
            steps._step()


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_methods_say_truly_whether_their_steps_are_alike(case: str) -> None:
    model, ids = MODELS["llama"](), torch.stack(requests([20] * 2))
    method = CASES[case].build(model)
    with method.applied(model) as handle:
        if not handle.fixed_steps:
            with pytest.raises(NotFixedError):
                DecodingSteps(model, *prompt_of(model, ids), STEPS)
            return
        expected, _ = eager(model, *prompt_of(model, ids), STEPS)
        steps = DecodingSteps(model, *prompt_of(model, ids), STEPS)
        assert all(torch.equal(steps.step(), each) for each in expected)
        with no_host_work():
            steps._step()


@torch.inference_mode()
def test_what_has_no_steps_alike_is_refused_in_words() -> None:
    model, ids = MODELS["llama"](), torch.stack(requests([4] * 2))
    past, token = prompt_of(model, ids)
    with pytest.raises(NotFixedError, match="steps are not all alike"):
        DecodingSteps(model, past, token, STEPS)
    with applied(model, "chai"), pytest.raises(NotFixedError, match="not seen its probe"):
        DecodingSteps(model, *prompt_of(model, ids), STEPS)
