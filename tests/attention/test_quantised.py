"""Keys as whole numbers: what comes back is as near as their bits allow, in no more bytes than is said."""

from __future__ import annotations

import pytest
import torch

from chai_eval.attention.quantised import key_size, quantise, restore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [1, 7, 8])
@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
def test_each_number_comes_back_within_half_a_step(bits: int, most: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    states = (torch.randn(2, 3, 50, head_dim) * torch.logspace(-2, 3, 50)[:, None]).to(dtype)
    packed = quantise(states, bits)
    assert packed.dtype == torch.int8
    assert packed.shape == (2, 3, 50, key_size(head_dim, bits))
    assert key_size(head_dim, bits) == (head_dim if bits == 8 else (head_dim + 1) // 2) + 2
    found = restore(packed, head_dim, bits, dtype)
    assert found.dtype == dtype
    largest = states.double().abs().amax(-1, keepdim=True)
    step = (largest / most).clamp(min=torch.finfo(torch.float16).tiny)
    # The scale is rounded to 11 bits, and what comes back to its precision.
    allowed = (0.5 + 2**-10) * step + largest * torch.finfo(dtype).eps
    assert bool(((found.double() - states.double()).abs() <= allowed).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_at_a_half_go_to_the_even_one_and_zeros_stay(bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    states = torch.tensor([[most, 0.5, 1.5, -2.5, -most, 0.0], [0.0] * 6])
    found = restore(quantise(states, bits), 6, bits, torch.float32)
    assert found.tolist() == [[most, 0, 2, -2, -most, 0], [0] * 6]
