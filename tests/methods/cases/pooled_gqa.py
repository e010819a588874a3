"""`pooled_gqa`: every head's keys and values become the mean over its group, found by looking at all pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from tests.attention.tiny import LAYERS, HeadLoop
from tests.methods.cases.case import Case
from tests.methods.loops import every_head


def neighbours(kv_heads: int, groups: int) -> list[list[int]]:
    size = kv_heads // groups
    return [list(range(start, start + size)) for start in range(0, kv_heads, size)]


def alike(model: PreTrainedModel, layer: int, groups: int) -> list[list[int]]:
    """Each first head that is left with the others whose rows of the key projection point its way most."""
    kv_heads = attention_shape(model).kv_heads
    weights = model.base_model.get_submodule(f"{'decoder.' * (model.config.model_type == 'opt')}layers.{layer}")
    rows = np.split(weights.self_attn.k_proj.weight.detach().double().numpy(), kv_heads)
    left, found = list(range(kv_heads)), []
    while left:
        one = rows[left[0]]
        cosine = {each: (one * rows[each]).sum() / np.linalg.norm(one) / np.linalg.norm(rows[each]) for each in left}
        found.append(sorted(left, key=lambda each: -cosine[each])[: kv_heads // groups])
        left = [each for each in left if each not in found[-1]]
    return found


def pooled_loop(groups: list[list[list[int]]]) -> HeadLoop:
    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        return every_head(probabilities, values)

    def states(layer: int, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        key, value = key.copy(), value.copy()
        for heads in groups[layer]:
            for each in (key, value):
                each[heads] = sum(each[head] for head in heads) / len(heads)
        return key, value

    layer_output.states = states  # type: ignore[attr-defined]
    return layer_output


def case(groups: int, by: str = "neighbours") -> Case:
    def given(model: PreTrainedModel) -> tuple[int, str]:
        fused = model.config.model_type == "gpt_neox"  # whose keys are projected together with all else
        return min(groups, attention_shape(model).kv_heads), "neighbours" if fused else by

    def settings(model: PreTrainedModel) -> dict[str, Any]:
        count, chosen = given(model)
        return {"groups": count, "by": chosen}

    def loop(model: PreTrainedModel) -> HeadLoop:
        count, chosen = given(model)
        if chosen == "similarity":
            return pooled_loop([alike(model, layer, count) for layer in range(LAYERS)])
        return pooled_loop([neighbours(attention_shape(model).kv_heads, count)] * LAYERS)

    return Case("pooled_gqa", settings, loop_of=loop)


CASES = {
    "pooled_gqa": case(4),
    "pooled_gqa_one": case(1),
    "pooled_gqa_similar": case(2, "similarity"),
    "pooled_gqa_pairs": case(4, "similarity"),
}
NOTHING = {"pooled_gqa": lambda model: {"groups": attention_shape(model).kv_heads}}
