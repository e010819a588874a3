"""How far back a layer looks, read from the mask function that transformers' models hand to a mask interface.

A model says which keys its layers see by composing functions of `transformers.masking_utils`: causality, a sliding
window, chunks. They are read here by what they are made of; whatever is not known is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_KNOWN = "transformers.masking_utils"


class UnsupportedModel(ValueError):  # noqa: N818 - says what is wrong, not that it is an error
    """The attention of this model can't be taken over; the message says why."""


@dataclass(frozen=True)
class Chunk:
    """Chunked attention: a query sees the keys of its own chunk of `size` tokens, up to itself.

    Chunks are counted from a request's first token.
    """

    size: int


# Sliding window of so many tokens, the query's own among them; or chunks.
Window = int | Chunk


def width(window: Window) -> int:
    """Most keys that a query sees."""
    return window.size if isinstance(window, Chunk) else window


def within(window: Window, query: Tensor, key: Tensor) -> Tensor:
    """Whether keys are near enough to be seen (causality aside), by positions that broadcast to each other; bool."""
    if isinstance(window, Chunk):
        return query // window.size == key // window.size
    return query - key < window


class LayerMask:
    """What layers are given in place of a mask tensor: how far back they look.

    A model that reads its mask, rather than handing it on, needs the tensor: whatever it does ends in a refusal.
    `refusal` says why layers that are given this mask can't be computed; a model may make masks that no layer takes.
    """

    __slots__ = ("kind", "refusal", "window")

    def __init__(self, kind: str, window: Window | None, refusal: str | None = None) -> None:
        self.kind, self.window, self.refusal = kind, window, refusal

    def to(self, *args: Any, **kwargs: Any) -> LayerMask:
        """The same: accelerate moves what it hands to a module."""
        return self

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModel(
            f"model: attention of {self.kind} computes with its mask itself, which clustered attention does not have; "
            "allowed: models that hand their mask on"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        next(each for each in given if isinstance(each, cls))._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __getitem__ = __iter__ = __len__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __invert__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


def layer_mask(kind: str, mask_function: Callable[..., Any], *, packed: bool) -> LayerMask:
    """Read what a mask function, as `transformers.masking_utils` gives it to a mask interface, lets a layer see.

    Where the pass is one of `packed` rows we tell their requests apart ourselves; ValueError for any others that are
    packed by their positions.
    """
    windows: set[Window] = set()
    causal = False
    others = []
    for name, made_from in _overlays(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name.startswith("sliding_window_overlay."):
            windows.add(int(made_from["sliding_window"]))
        elif name.startswith("chunked_overlay."):
            windows.add(Chunk(int(made_from["chunk_size"])))
        elif not name.startswith("packed_sequence_mask_function."):
            others.append(name.removesuffix(".<locals>.inner_mask"))
        elif not packed:
            raise ValueError("position_ids: several requests in a line given by their positions; allowed: rows=")
    refusal = None
    if others:
        refusal = f"by a mask of another kind ({others[0]})"
    elif not causal:
        refusal = "in both directions"
    elif len(windows) > 1:
        refusal = "within several windows at once"
    elif any(width(window) < 1 for window in windows):
        refusal = "within a window of no tokens"
    return LayerMask(kind, next(iter(windows), None), refusal)


def window_given(kind: str, mask: object) -> Window | None:
    """The window of a layer, from the mask that it was called with.

    Raises UnsupportedModel for anything but causal attention, perhaps within one window; for a mask that the model made
    by itself, or none at all: what it hides is not known then.
    """
    if isinstance(mask, LayerMask):
        if mask.refusal is not None:
            raise _refused(kind, mask.refusal)
        return mask.window
    made = "without a mask" if mask is None else "with a mask of its own"
    raise _refused(kind, f"{made}, not one of transformers' mask functions")


def _overlays(mask_function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The single functions whose intersection a mask function is: their names, and what they were made from."""
    name = mask_function.__qualname__ if mask_function.__module__ == _KNOWN else ""
    cells = mask_function.__closure__ or ()
    made_from = dict(zip(mask_function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    if name.startswith("and_masks."):
        for each in made_from["mask_functions"]:
            yield from _overlays(each)
    elif name.startswith("remap_positions_for_packed_sequence."):
        yield from _overlays(made_from["mask_function"])
    else:
        yield name or f"{mask_function.__module__}.{mask_function.__qualname__}", made_from


def _refused(kind: str, how: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model: {kind} attends {how}, which clustered attention does not compute; allowed: causal attention, with or "
        "without a sliding window or chunks"
    )
