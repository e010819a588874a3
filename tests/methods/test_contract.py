"""What every method keeps to, whatever it does: asked of each entry of `METHODS`, a new one among them."""

from __future__ import annotations

import pytest
import torch

from chai_eval.attention.shape import attention_shape
from chai_eval.errors import SettingError
from chai_eval.methods import METHODS, build_method
from chai_eval.methods.base import LayerFootprint
from tests.attention.tiny import HEADS, MODELS, looped_logits, masked_logits, padded, requests
from tests.methods.cases import CASES, NOTHING
from tests.methods.cases.ours import COUNTS
from tests.methods.loops import HeadLoop, chai_loop, dejavu_loop
from tests.methods.test_against_loops import assert_same

LENGTH = 40


def test_every_method_has_loops_that_it_must_equal_and_settings_that_change_nothing() -> None:
    assert {case.method for case in CASES.values()} == set(METHODS)
    assert set(NOTHING) == set(METHODS)


@pytest.mark.parametrize("name", ["llama", "llama_gqa", "opt", "neox"])
@pytest.mark.parametrize("case", CASES)
def test_the_footprint_is_what_the_cache_holds(case: str, name: str) -> None:
    """Bytes of keys and values; a method that simulates its saving holds what plain attention does."""
    model = MODELS[name]()
    method = CASES[case].build(model)
    with method.applied(model), torch.no_grad():
        cache = model(input_ids=torch.stack(requests([LENGTH] * 2)), use_cache=True).cache
    shape, size = attention_shape(model), model.dtype.itemsize
    layers = method.footprint(model) or [LayerFootprint.full(shape)] * shape.layers
    for layer, footprint in zip(cache.layers, layers, strict=True):
        held = [getattr(layer, name).untyped_storage().nbytes() / (2 * LENGTH) for name in ("keys", "values")]
        foreseen = footprint.bytes_per_token(shape.head_dim, size, LENGTH)
        if shape.kv_heads == shape.heads:
            assert held == list(foreseen)
        else:  # representatives may read the same key heads: the footprint says the most there can be
            assert all(each <= most for each, most in zip(held, foreseen, strict=True))


def composed_loop(counts: list[int], sparsity: float) -> HeadLoop:
    """CHAI's outputs, of which each token keeps the heads with the highest norm."""
    shared, top = chai_loop(counts), dejavu_loop(sparsity)

    def layer_output(layer, probabilities, scores, values):  # type: ignore[no-untyped-def]
        out = shared(layer, probabilities, scores, values)
        # Each head's outputs as values of a sequence in which every token looks at itself.
        alone = torch.eye(out.shape[1]).expand(len(out), -1, -1).double().numpy()
        return top(layer, alone, scores, out)

    return layer_output


@pytest.mark.parametrize("name", MODELS)
def test_methods_put_in_beside_each_other_equal_loops(name: str) -> None:
    model, tokens = MODELS[name](), requests([3, 12, 40])
    method = build_method("chai", clusters=COUNTS, **{"with": [{"name": "dejavu", "sparsity": 0.5}]})
    assert method.name == "chai+dejavu"
    assert method.footprint(model) is None
    expected = looped_logits(model, tokens, composed_loop(COUNTS, 0.5))
    with method.applied(model):
        assert_same(masked_logits(model, *padded(tokens, "left")), expected)
        assert_same(masked_logits(model, *padded(tokens, "right")), expected)


@pytest.mark.parametrize(
    ("beside", "line"),
    [
        (["v_reuse"], "method.with: chai and v_reuse given (both let heads share scores); allowed: one of them"),
        (["spatten"], "method.with: chai and spatten given (spatten has attention of its own, chai lets heads share"),
        (["nothing"], "method: 'nothing' given; allowed: mha, chai, chai_static"),
        (7, "method.with: 7 given; allowed: methods, such as [dejavu]"),
        ([7], "method.with: 7 given; allowed: methods, such as [dejavu] or [{name: dejavu}]"),
        ([{"name": "dejavu", "sparsity": 2}], "method.sparsity: 2 given"),
    ],
)
def test_methods_that_exclude_each_other_are_refused_with_the_reason(beside: object, line: str) -> None:
    model = MODELS["llama"]()
    if beside == ["v_reuse"]:
        beside = [{"name": "v_reuse", "clusters": [[HEADS, 1], [2, 2]]}]
    with pytest.raises(SettingError) as raised:
        build_method("chai", clusters=COUNTS, **{"with": beside}).check_settings(model)
    assert str(raised.value).startswith(line)
