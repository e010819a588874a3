"""Refuse whatever would make the host wait for a device, with no device: numbers exist on none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

# What hands numbers, or shapes that depend on them, to the host. Of tensors that were there before, a fake mode alone
# does not see the first of these: they read memory directly.
ASKING = {
    "tolist", "item", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__",
    "cpu", "nonzero", "unique", "unique_consecutive", "masked_select", "equal", "allclose", "is_nonzero",
}  # fmt: skip


class _Refusing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ASKING:
            raise AssertionError(f"the host asks for numbers: {name}")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_work() -> Iterator[None]:
    """Run operations on shapes alone; what is written to tensors from outside is not kept."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Refusing():
        yield
