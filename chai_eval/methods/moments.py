"""Second moments of what heads ask and are asked (`calibration.moments`), as calibrations store them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Of queries, of what they ask of keys, of the gradients of predictions by heads' outputs, and of those outputs.
QUERY, PULL, GRADIENT, OUTPUT = KINDS = ("query", "pull", "gradient", "output")
# Of each layer, the divergence when it takes the attention probabilities of the layer before.
LAYER_SHARE = "layer_share"


class Packed(NamedTuple):
    """Moments as they are stored.

    Attributes
    ----------
    factors : Tensor [..., n (n + 1) / 2], float16
        The lower triangle of each Cholesky factor, row by row, the largest entry being 1.
    scale : Tensor [...], float64
        What the factor is to be multiplied with.
    """

    factors: Tensor
    scale: Tensor


# Of the mean eigenvalue, what is added to all: moments may be singular. The rounding of factors adds as much.
RIDGE = 1e-6


def pack(moments: Tensor) -> Packed:
    """Store moments `[..., n, n]` in half the numbers, such that what is read back has no negative eigenvalue."""
    n = moments.shape[-1]
    ridge = moments.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30) * RIDGE
    factor = torch.linalg.cholesky(moments + ridge[..., None, None] * torch.eye(n, dtype=moments.dtype))
    scale = factor.abs().amax((-2, -1))
    rows, columns = torch.tril_indices(n, n)
    return Packed((factor / scale[..., None, None])[..., rows, columns].half(), scale)


def unpack(factors: Tensor, scale: Tensor) -> Tensor:
    """The moments `[..., n, n]`, float64, that `pack` stored."""
    n = int(((8 * factors.shape[-1] + 1) ** 0.5 - 1) / 2)
    factor = torch.zeros(*factors.shape[:-1], n, n, dtype=torch.float64)
    rows, columns = torch.tril_indices(n, n)
    factor[..., rows, columns] = factors.double()
    factor = factor * scale.double()[..., None, None]
    return factor @ factor.transpose(-1, -2)
