"""`snapkv` one token and one key head at a time, with lists of the tokens that are held."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from tests.attention.tiny import HeadLoop
from tests.methods.cases.case import Case
from tests.methods.loops import best


def snapkv_loop(model: PreTrainedModel, keep: float, every: int, window: int, kernel: int) -> HeadLoop:
    kv_heads = attention_shape(model).kv_heads

    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        heads, n, _ = probabilities.shape
        out = np.zeros(values.shape)
        for readers in np.arange(heads).reshape(kv_heads, -1):
            held: list[int] = []
            given = np.zeros((n, n))  # by each query to each key, averaged over heads
            for t in range(n):
                held.append(t)
                for head in readers:
                    raised = np.exp(scores[head, t, held] - scores[head, t, held].max())
                    out[head, t] = raised / raised.sum() @ values[head, held]
                    given[t, held] += raised / raised.sum() / len(readers)
                if (t + 1) % every:
                    continue
                earlier, kept = held[:-window], held[-window:]
                votes = given[t + 1 - window : t + 1, earlier].sum(0)
                reach = kernel // 2
                smooth = [votes[max(at - reach, 0) : at + reach + 1].max() for at in range(len(votes))]
                count = math.ceil(Fraction(str(keep)) * (t + 1 - window))
                held = [earlier[at] for at in sorted(best(np.array(smooth), count))] + kept
        return out

    return layer_output


def case(**settings: Any) -> Case:
    return Case("snapkv", settings, loop_of=lambda model: snapkv_loop(model, **settings))


CASES = {
    "snapkv": case(keep=0.5, every=8, window=3, kernel=3),
    "snapkv_few": case(keep=0.2, every=5, window=2, kernel=1),
    "snapkv_most": case(keep=0.8, every=7, window=1, kernel=5),
}
NOTHING = {"snapkv": {"keep": 1, "every": 4, "window": 2}}
