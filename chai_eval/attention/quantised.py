"""Keys as small whole numbers: of each token and head, numbers of a few bits and the scale that they are multiples of.

Numbers and scale lie behind one another in a tensor of bytes, so that a cache holds it as it holds any keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of a scale, a float16.
SCALE = 2


def key_size(head_dim: int, bits: int) -> int:
    """Bytes of a token's key in one head, its scale among them; two numbers of 4 bits share one."""
    return -(-head_dim * bits // 8) + SCALE


def quantise(states: Tensor, bits: int) -> Tensor:
    """Round each token of each head to multiples of its scale: its largest number over the largest that bits can tell.

    The scale is rounded to float16 first and is never subnormal; halves go to the even number. From `[..., head_dim]`,
    floating point, to `[..., key_size(head_dim, bits)]`, int8. Bits are 8 or 4: then two numbers share a byte, the
    second half of them in its upper four bits, each plus 8.
    """
    most, half = 2 ** (bits - 1) - 1, torch.finfo(torch.float16)
    states = states if states.dtype == torch.float64 else states.float()
    scale = (states.abs().amax(-1, keepdim=True) / most).clamp(half.tiny, half.max).half()
    numbers = (states / scale.to(states.dtype)).round().clamp(-most, most)
    if bits == 4:
        first, second = torch.nn.functional.pad(numbers + 8, (0, numbers.shape[-1] % 2)).chunk(2, dim=-1)
        packed = (first + 16 * second).to(torch.uint8).view(torch.int8)
    else:
        packed = numbers.to(torch.int8)
    return torch.cat((packed, scale.view(torch.int8)), dim=-1)


def restore(packed: Tensor, head_dim: int, bits: int, dtype: torch.dtype) -> Tensor:
    """What quantised tokens stand for: `[..., key_size(head_dim, bits)]`, int8, to `[..., head_dim]`."""
    numbers, scale = packed[..., :-SCALE], packed[..., -SCALE:].contiguous().view(torch.float16)
    if bits == 4:
        both = numbers.view(torch.uint8)
        numbers = torch.cat((both & 15, both >> 4), dim=-1)[..., :head_dim].to(torch.int8) - 8
    exact = torch.promote_types(dtype, torch.float32)
    return (numbers.to(exact) * scale.to(exact)).to(dtype)
