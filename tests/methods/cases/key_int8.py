"""`key_int8`: every key rounded number by number, in units of its largest over 127 or 7."""

from __future__ import annotations

import numpy as np

from tests.attention.tiny import HeadLoop
from tests.methods.cases.case import Case
from tests.methods.loops import every_head


def key_int8_loop(most: int) -> HeadLoop:
    def layer_output(layer: int, probabilities: np.ndarray, scores: np.ndarray, values: np.ndarray) -> np.ndarray:
        return every_head(probabilities, values)

    def states(layer: int, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rounded = np.empty_like(key)
        for head, token in np.ndindex(key.shape[:2]):
            unit = float(np.float16(max(abs(number) for number in key[head, token]) / most))
            for place, number in enumerate(key[head, token]):
                rounded[head, token, place] = round(number / unit) * unit  # Python rounds halves to even
        return rounded, value

    layer_output.states = states  # type: ignore[attr-defined]
    return layer_output


CASES = {
    "key_int8": Case("key_int8", {}, lambda: key_int8_loop(127), exact=True),
    "key_int8_of_4_bits": Case("key_int8", {"bits": 4}, lambda: key_int8_loop(7), exact=True),
}
NOTHING = {"key_int8": {"bits": 16}}
