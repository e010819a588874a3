"""What attention costs under a method while it decodes, in one currency for all: bytes held, bytes read, products."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from chai_eval.attention.shape import attention_shape
from chai_eval.methods.base import LONG, Method, plain_footprint
from chai_eval.methods.mha import MHA

# Bytes of a number: methods are compared as they would be served, in 16 bits, whatever precision a run has.
SIZE = 2


@dataclass(frozen=True)
class Costs:
    """Costs of each token of the context, in all layers together; a prompt's first tokens may cost more.

    Attributes
    ----------
    held : float
        Bytes of keys and values that are cached.
    read : float
        Bytes of them that a decoded token reads.
    multiplications : float
        Multiplications of a decoded token's attention: its queries with keys, its probabilities with values.
    """

    held: float
    read: float
    multiplications: float

    def shares(self, whole: Costs) -> Costs:
        """Each as a share of another's."""
        return Costs(self.held / whole.held, self.read / whole.read, self.multiplications / whole.multiplications)


def costs(method: Method, model: PreTrainedModel, tokens: int = LONG) -> Costs:
    """What a method costs in a context of so many tokens.

    One that simulates its saving holds, reads and multiplies what plain attention does.
    """
    head_dim, held, read, products = attention_shape(model).head_dim, 0.0, 0.0, 0.0
    for layer in method.footprint(model) or plain_footprint(model):
        cached = sum(layer.bytes_per_token(head_dim, SIZE, tokens))
        held += cached
        read += cached * layer.read
        products += layer.multiplications(head_dim) * layer.read * layer.share_held(tokens)
    return Costs(held, read, products)


def described_costs(method: Method, model: PreTrainedModel, tokens: int = LONG) -> dict[str, Any]:
    """The costs of a method as records have them: as they are, as shares of plain attention's, and how they came."""
    own = costs(method, model, tokens)
    return {
        **asdict(own),
        "of_mha": {name: round(share, 6) for name, share in asdict(own.shares(costs(MHA(), model))).items()},
        "simulated": method.footprint(model) is None,
    }
