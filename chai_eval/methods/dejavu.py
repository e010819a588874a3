"""DejaVu's contextual sparsity (Liu et al., ICML 2023, arXiv 2310.17157): the heads and neurons a token needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from pydantic import SkipValidation
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks
from chai_eval.attention.inputs import attention_inputs
from chai_eval.attention.shape import attention_shape
from chai_eval.calibration_file import COMMAND, Calibration, calibration
from chai_eval.errors import SettingError
from chai_eval.methods.base import Fraction, Method
from chai_eval.methods.keep import highest, kept_count
from chai_eval.methods.neurons import top_neurons
from chai_eval.schema import SETTINGS

# The two matrices of a layer's predictor: [hidden, d] and [heads, hidden].
Predictor = tuple[Tensor, Tensor]


@dataclass(frozen=True, config=SETTINGS)
class DejaVu(Method):
    """Every token keeps the heads, and if asked for the MLP's neurons, that put out most; the others are zero.

    A head puts out the L2 norm of its output before the output projection: the top ⌈(1 − s) H⌉ stay, the lowest head
    among ties. A neuron puts out the absolute value that enters the down projection (a ReLU activation in OPT,
    act(gate) · up in gated MLPs): the top ⌈(1 − s_mlp) N⌉ stay.

    Approximates: the output of the other heads and neurons. Saves what they compute for this token, if a predictor
    chooses them; keys and values are needed by later tokens and stay. `oracle` chooses by what they do put out, so it
    saves nothing: it is the best that any predictor could do.

    Parameters
    ----------
    sparsity : float
        Fraction of the heads that a token drops.
    selector : "oracle" or "predictor"
        Choose heads by their true norms, or by what two bias-free linear layers (d → 1000 → H, trained in
        calibration) make of the previous layer's attention input; in layer 0, of its own.
    predictor : str or None
        The calibration that has the predictors: a model's name, or a folder; with `selector` "predictor".
    mlp_sparsity : float
        Fraction of the MLP's neurons that a token drops, by the true values.
    """

    sparsity: Fraction = 0.5
    selector: Literal["oracle", "predictor"] = "oracle"
    predictor: SkipValidation[str | None] = None
    mlp_sparsity: Fraction = 0.0

    name: ClassVar[str] = "dejavu"

    def __post_init__(self) -> None:
        if self.selector == "predictor":
            assert self._calibration is not None

    @cached_property
    def _calibration(self) -> Calibration | None:
        if self.selector == "oracle":
            return None
        if not isinstance(self.predictor, str):
            raise SettingError(
                f"method.predictor: {self.predictor!r} given; allowed: a calibration with trained predictors, made by "
                f"`{COMMAND}…`, or method.selector=oracle"
            )
        return calibration(self.predictor, "method.predictor")

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        del found["predictor"]
        if self._calibration is not None:
            found["predictor"] = {"sha256": self._calibration.sha256}
        return found

    def hooks(self, model: PreTrainedModel) -> Hooks:
        predictors = self._predictors(model) if self.selector == "predictor" else None
        return _TopHeads(self.sparsity, self.mlp_sparsity, predictors)

    def _predictors(self, model: PreTrainedModel) -> list[Predictor]:
        assert self._calibration is not None
        self._calibration.check(model)
        shape = attention_shape(model)
        return [self._calibration.predictor(layer) for layer in range(shape.layers)]


class _TopHeads(Hooks):
    """The heads and neurons that a token keeps, by what they put out or by what predictors say (`DejaVu`)."""

    def __init__(self, sparsity: float, mlp_sparsity: float, predictors: list[Predictor] | None) -> None:
        super().__init__()
        self.sparsity, self.mlp_sparsity, self.predictors = sparsity, mlp_sparsity, predictors
        self.predicted: dict[int, Tensor] = {}

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        with ExitStack() as stack:
            if self.predictors is not None:
                stack.enter_context(predicted_scores(model, self.predictors, self.predicted))
            stack.enter_context(top_neurons(model, self.mlp_sparsity))
            yield

    def heads(self, call: AttentionCall, out: Tensor) -> Tensor:
        if self.predictors is None:
            importance = out.float().norm(dim=-1)  # [rows, heads, length]
        else:
            by_head = self.predicted.pop(call.index).transpose(1, 2)[..., None]  # [batch, heads, tokens, 1]
            importance = call.rows.gather(by_head)[..., 0]
        count = kept_count(out.shape[1], self.sparsity)
        kept = highest(importance.transpose(1, 2), count).transpose(1, 2)
        return out.masked_fill(~kept[..., None], 0)


def head_scores(hidden: Tensor, predictor: Predictor) -> Tensor:
    """What a predictor says of each head: `[..., d]` to `[..., heads]`, in float32."""
    down, up = (matrix.to(hidden.device, torch.float32) for matrix in predictor)
    return hidden.float() @ down.T @ up.T


@contextmanager
def predicted_scores(model: PreTrainedModel, predictors: list[Predictor], scores: dict[int, Tensor]) -> Iterator[None]:
    """Put each layer's head scores into `scores`, `[batch, tokens, heads]`, before the layer attends."""
    on_device = [(down.to(model.device), up.to(model.device)) for down, up in predictors]

    def before(layer: int, hidden: Tensor) -> None:
        if layer == 0:
            scores.clear()  # a pass that failed may have left some
            scores[0] = head_scores(hidden, on_device[0])
        if layer + 1 < len(on_device):
            scores[layer + 1] = head_scores(hidden, on_device[layer + 1])

    with attention_inputs(model, before):
        yield
