"""Whether the compiled kernels of a GPU take an attention, and which; the others are those of PyTorch."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from chai_eval.attention.sharing import SharedHeads
from chai_eval.attention.view import View

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Beyond, a program's numbers do not fit in registers.
WIDEST_HEAD = 256


def takes(query: Tensor, key: Tensor, value: Tensor, view: View) -> bool:
    """Whether the kernels compute it: on a GPU, with no gradients, branches, or keys that a method chose.

    Nothing that a tensor on the device holds is looked at.
    """
    states = (query, key, value)
    return (
        query.is_cuda
        and view.rows.branch is None
        and view.chosen is None
        and all(each.dtype in DTYPES and each.dtype == value.dtype for each in states)
        and all(each.shape[-1] <= WIDEST_HEAD for each in states)
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in states))
        and not torch.compiler.is_compiling()
        and compiles_for(query.device)
    )


def attend(query: Tensor, key: Tensor, value: Tensor, shared: SharedHeads, view: View, first: int) -> Tensor:
    """Output of every head; of the representatives alone, where members share their values too.

    Parameters, results and their shapes are those of `decode.attend`, for any number of queries.
    """
    from chai_eval.attention.kernels import triton_decode, triton_prefill

    few = query.shape[2] <= triton_decode.FEW_QUERIES
    return (triton_decode if few else triton_prefill).attend(query, key, value, shared, view, first)


@cache
def compiles_for(device: torch.device) -> bool:
    """Whether triton is here, and the GPU one that kernels are made for: NVIDIA's, of compute capability 8 or above."""
    try:
        import triton  # noqa: F401
    except ImportError:
        log.warning("triton: not installed; attention on %s is computed by PyTorch's operations", device)
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
