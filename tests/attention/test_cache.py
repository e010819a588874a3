from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from chai_eval.attention import ClusteredCache, RowLayer
from chai_eval.methods import build_method
from tests.attention.tiny import HEADS, LAYERS, MODELS, padded, requests

# float32, logits of order 10.
TOLERANCE = 1e-3
COUNTS = [8, 3, 1]


@contextmanager
def method(model: PreTrainedModel, name: str) -> Iterator[None]:
    with build_method(name, **({} if name == "mha" else {"clusters": COUNTS})).applied(model):
        yield


def next_tokens(rows: int, count: int) -> torch.Tensor:
    return torch.stack(requests([count] * rows, seed=9))


def step_by_step(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, after: torch.Tensor, chunk: int = 1
) -> tuple[torch.Tensor, ClusteredCache]:
    """Logits of `after` `[rows, n]`, fed in chunks behind the padded prompts."""
    logits = []
    with torch.no_grad():
        cache = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).cache
        assert isinstance(cache, ClusteredCache)
        for new in after.split(chunk, dim=1):
            mask = torch.cat((mask, torch.ones_like(new)), 1)
            positions = (mask.cumsum(1) - 1)[:, -new.shape[1] :]
            out = model(input_ids=new, attention_mask=mask, position_ids=positions, cache=cache)
            assert out.cache is cache
            logits.append(out.logits)
    return torch.cat(logits, 1), cache


def at_once(model: PreTrainedModel, prompts: list[torch.Tensor], after: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        whole = [torch.cat((prompt, new)) for prompt, new in zip(prompts, after, strict=True)]
        return torch.stack(
            [model(input_ids=each[None], use_cache=False).logits[0, -after.shape[1] :] for each in whole]
        )


@pytest.mark.parametrize("lengths", [[7, 19, 12], [2, 19, 4], [1, 1, 1], [6, 6, 6]])
@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_equals_the_whole_text_at_once(name: str, lengths: list[int]) -> None:
    model, prompts, after = MODELS[name](), requests(lengths), next_tokens(3, 32)
    with method(model, "chai"):
        expected = at_once(model, prompts, after)
        found, _ = step_by_step(model, *padded(prompts, "left"), after)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [2, 3, 8, 20])
@pytest.mark.parametrize("name", ["llama_gqa", "opt"])
def test_chunks_of_tokens_equal_the_whole_text_at_once(name: str, chunk: int) -> None:
    model, prompts, after = MODELS[name](), requests([3, 9, 1]), next_tokens(3, 40)
    with method(model, "chai"):
        expected = at_once(model, prompts, after)
        found, _ = step_by_step(model, *padded(prompts, "left"), after, chunk)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_after_the_probe_storage_is_what_the_formula_says(name: str) -> None:
    model, length, head_dim = MODELS[name](), 100, 8
    ids = torch.stack(requests([length] * 2))
    with method(model, "chai"), torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).cache
    for layer, clusters in zip(cache.layers, COUNTS, strict=True):
        elements = 2 * length * (HEADS + clusters) * head_dim
        assert layer.logical_bytes() == layer.nbytes() == elements * 4
    assert cache.nbytes() == 2 * length * sum(HEADS + clusters for clusters in COUNTS) * head_dim * 4


def test_under_grouped_queries_the_distinct_key_heads_of_representatives_are_kept() -> None:
    model = MODELS["llama_gqa"]()  # 8 query heads on 2 key heads
    ids = torch.stack(requests([50] * 6))
    with method(model, "chai"), torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).cache
    for layer in cache.layers[1:]:
        distinct = [len(set((row // 4).tolist())) for row in layer.membership.representative]
        assert layer.keys.shape[1] == max(distinct)
        assert layer.logical_bytes() == sum(50 * (kept + 2) * 8 * 4 for kept in distinct)


def test_generation_does_not_copy_the_cache_at_every_token() -> None:
    model = MODELS["llama"]()
    ids, after = torch.stack(requests([64] * 2)), next_tokens(2, 60)
    with method(model, "chai"), torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).cache
        seen = set()
        for column in range(60):
            model(input_ids=after[:, column : column + 1], cache=cache, use_cache=True)
            seen.add(tuple(layer.keys.data_ptr() for layer in cache.layers))
    assert len(seen) == 4  # room for 16 more was made at the first token, and each time that it was full


@pytest.mark.parametrize("name", ["llama", "llama_gqa", "opt"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_equals_generating_each_prompt_alone_without_a_cache(name: str, beams: int) -> None:
    model, prompts = MODELS[name](), requests([3, 14, 7])
    ids, mask = padded(prompts, "left")
    settings = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    with method(model, "chai"):
        found = model.generate(input_ids=ids, attention_mask=mask, **settings)
        for row, prompt in enumerate(prompts):
            alone = model.generate(
                input_ids=prompt[None], attention_mask=torch.ones_like(prompt[None]), use_cache=False, **settings
            )
            assert found[row, -12:].tolist() == alone[0, -12:].tolist()


def test_sampling_under_a_seed_is_the_same_with_and_without_a_cache() -> None:
    model, prompts = MODELS["llama"](), requests([3, 14, 7])
    ids, mask = padded(prompts, "left")
    settings = {"max_new_tokens": 12, "do_sample": True, "pad_token_id": 1, "eos_token_id": None}
    with method(model, "chai"):
        found = []
        for cached in (True, False):
            torch.manual_seed(5)
            found.append(model.generate(input_ids=ids, attention_mask=mask, use_cache=cached, **settings))
    assert torch.equal(*found)


def test_rows_selected_repeated_and_cropped_go_on_as_if_they_had_always_been_so() -> None:
    model, prompts, after = MODELS["llama_gqa"](), requests([9, 15]), next_tokens(2, 10)
    chosen = torch.tensor([1, 0, 1, 1])
    with method(model, "chai"):
        ids, mask = padded(prompts, "left")
        _, cache = step_by_step(model, ids, mask, after)
        expected = at_once(model, [prompts[row] for row in chosen], torch.cat((after[:, :6], after[:, :1]), 1)[chosen])
        cache.crop(-4)
        cache.batch_select_indices(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([0, 2, 1, 1]))
        mask = torch.cat((mask, torch.ones(2, 7, dtype=torch.int64)), 1)[chosen]
        with torch.no_grad():
            out = model(
                input_ids=after[chosen, :1],
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                cache=cache,
            )
    torch.testing.assert_close(out.logits[:, 0], expected[:, -1], atol=TOLERANCE, rtol=0)


def test_mha_keeps_the_models_own_cache() -> None:
    model = MODELS["llama"]()
    with method(model, "mha"), torch.no_grad():
        cache = model(input_ids=torch.stack(requests([9])), use_cache=True).cache
    assert isinstance(cache, DynamicCache)


def test_a_users_own_empty_cache_is_filled() -> None:
    model, prompt = MODELS["llama"](), requests([9])[0]
    for cache in (DynamicCache(config=model.config), DynamicCache(), ClusteredCache(LAYERS)):
        with method(model, "chai"), torch.no_grad():
            model(input_ids=prompt[None], cache=cache)
            assert cache.get_seq_length() == 9
            assert all(isinstance(layer, RowLayer) for layer in cache.layers)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_static_cache_is_refused_with_what_is_allowed(rows: int) -> None:
    model = MODELS["llama"]()
    ids, mask = padded(requests([9, 4][:rows]), "left")
    cache = StaticCache(config=model.config, max_cache_len=32)
    said = "^cache: StaticCache given to a method; allowed: none, an empty DynamicCache, or one of its own$"
    with method(model, "chai"), torch.no_grad():
        with pytest.raises(ValueError, match=said):
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, cache_implementation="static")
        with pytest.raises(ValueError, match=said):
            model(input_ids=ids, attention_mask=mask, cache=cache)
    with method(model, "mha"), torch.no_grad():
        assert model(input_ids=ids, attention_mask=mask, cache=cache).cache is cache


def test_a_cache_filled_without_the_method_is_refused() -> None:
    model, prompt = MODELS["llama"](), requests([9])[0]
    with torch.no_grad():
        cache = model(input_ids=prompt[None]).cache
    with method(model, "chai"), pytest.raises(ValueError, match="cache: filled without the method"):
        model(input_ids=prompt[None], cache=cache)


def test_a_cache_is_refused_after_its_method_ended_and_under_other_settings() -> None:
    model, prompt = MODELS["llama"](), requests([9])[0]
    new = prompt[None, :1]
    with method(model, "chai"), torch.no_grad():
        cache = model(input_ids=prompt[None]).cache
    with pytest.raises(ValueError, match="cache: filled under a method that is no longer applied"), torch.no_grad():
        model(input_ids=new, cache=cache)
    for other in (build_method("chai", clusters=[2, 2, 2]), build_method("spatten")):
        with other.applied(model), pytest.raises(ValueError, match="cache: filled under another method"):
            model(input_ids=new, cache=cache)
    with method(model, "chai"), torch.no_grad():  # the same again goes on
        model(input_ids=new, cache=cache)


def test_cropping_into_the_probe_is_refused_once_clusters_were_found_in_it() -> None:
    model = MODELS["llama"]()
    with method(model, "chai"), torch.no_grad():
        cache = model(input_ids=torch.stack(requests([12]))).cache
        with pytest.raises(ValueError, match="crop: 3 tokens would be left; allowed: at least the 5"):
            cache.crop(-9)
        cache.crop(-7)
        assert cache.get_seq_length() == 5
        with pytest.raises(ValueError, match="crop: 4 given; allowed: minus"):
            cache.crop(4)


def test_a_short_prompt_cropped_before_its_probe_ends_goes_on_with_other_tokens() -> None:
    model, prompt, after = MODELS["llama_gqa"](), requests([4]), next_tokens(1, 20)
    with method(model, "chai"), torch.no_grad():
        expected = at_once(model, [prompt[0][:2]], after)
        ids = prompt[0][None]
        cache = model(input_ids=ids).cache
        cache.crop(-2)
        found = torch.cat([model(input_ids=new, cache=cache).logits for new in after.split(1, dim=1)], 1)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_what_inference_mode_stored_can_be_gone_on_with_outside_it() -> None:
    model, prompt = MODELS["llama"](), requests([9])[0]
    with method(model, "chai"):
        with torch.inference_mode():
            cache = model(input_ids=prompt[None]).cache
            model(input_ids=prompt[None, :1], cache=cache)
        with torch.no_grad():
            model(input_ids=prompt[None, :1], cache=cache)
