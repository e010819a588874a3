"""Quest: each query reads the pages of keys that could matter most to it (Tang et al., ICML 2024, arXiv 2406.10774)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, Hooks, Rows
from chai_eval.attention.probe import repeat_heads
from chai_eval.attention.rows import CONTEXT
from chai_eval.methods.base import FromZero, LayerFootprint, Method, Positive, Share, plain_footprint
from chai_eval.methods.keep import kept_counts
from chai_eval.schema import SETTINGS


@dataclass(frozen=True, config=SETTINGS)
class Quest(Method):
    """Each head of each query reads the pages whose keys could score highest with it, and the page it stands in.

    The keys of `page_size` tokens in succession make a page. Of a page that was complete before the query's own, the
    bound is Σ_d max(q_d min_d, q_d max_d), min and max over its keys: no key of it scores more (section 3.3 of the
    paper). Of n such pages the ⌈read n⌉ with the highest bounds are read, the first among ties. The paper reads as many
    at any length, while decoding; here a prompt's queries choose as well, so that a text is scored as it is decoded.
    Beside CHAI representatives choose for their cluster, from the end of the probe on.

    Approximates: the scores of keys in other pages are minus infinity. Saves reading them, not holding them. Bounds are
    found anew from all keys here; a kernel would hold every page's min and max, and read 1 / page_size more.

    Parameters
    ----------
    read : float
        Share of the earlier pages that are read.
    page_size : int
        Tokens of a page.
    spare_layers : int
        First layers, which read everything; two in the paper's code.
    """

    read: Share = 0.25
    page_size: Positive = 16
    spare_layers: FromZero = 2

    name: ClassVar[str] = "quest"

    @classmethod
    def at_savings(
        cls, model: PreTrainedModel, calibrated: str, savings: Sequence[float], context: int
    ) -> Sequence[Method]:
        return [cls(read=1 - saving) for saving in savings]

    def hooks(self, model: PreTrainedModel) -> Hooks:
        return Hooks() if self.read == 1 else _Pages(self)

    def footprint(self, model: PreTrainedModel) -> list[LayerFootprint]:
        layers, read = plain_footprint(model), min(self.read + 1 / self.page_size, 1.0)
        return [replace(each, read=read if at >= self.spare_layers else 1.0) for at, each in enumerate(layers)]


class _Pages(Hooks):
    """Pages are chosen wherever queries meet keys, but in the spared layers (`Quest`)."""

    by_position = True

    def __init__(self, settings: Quest) -> None:
        super().__init__()
        self.settings = settings

    def reads(self, call: AttentionCall, query: Tensor, key: Tensor, first: int) -> Tensor | None:
        if call.index < self.settings.spare_layers or key.shape[2] <= self.settings.page_size:
            return None
        size, rows = self.settings.page_size, call.rows
        of_key = torch.arange(key.shape[2], device=key.device)[None]
        of_query = of_key[:, first : first + query.shape[2]]
        if rows.past is not None:
            of_query = torch.arange(query.shape[2], device=key.device) + rows.past[:, None]
        if rows.position is not None:
            of_key, of_query = rows.position, rows.position[:, first:]
        pages = read_pages(_bounds(query, key, rows, first, size), of_query // size, self.settings.read)
        pages = pad(pages, (0, 1), value=True)  # one that is not complete is always read
        of_key = (of_key // size).clamp(max=pages.shape[-1] - 1)
        return pages.gather(-1, of_key[:, None, None].expand(*pages.shape[:3], -1))


def read_pages(bounds: Tensor, own: Tensor, read: float) -> Tensor:
    """The pages that each query reads.

    Parameters
    ----------
    bounds : Tensor [rows, n, queries, pages]
    own : Tensor [rows or 1, queries], int64
        The page that each query stands in.
    read : float
        Share of the pages before that.

    Returns
    -------
    Tensor [rows, n, queries, pages], bool
    """
    page = torch.arange(bounds.shape[-1], device=bounds.device)
    earlier = page < own[:, None, :, None]
    order = bounds.masked_fill(~earlier, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    taken = page < kept_counts(own, 1 - read)[:, None, :, None]
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, taken.expand_as(order)) | ~earlier


def _bounds(query: Tensor, key: Tensor, rows: Rows, first: int, size: int) -> Tensor:
    """What the keys of each whole page can score at most with each query: `[rows, n, queries, pages]`.

    Where rows have branches, the tokens of a page are those of the query's own request.
    """
    if rows.branch is None:
        return page_bounds(query, key, size)
    bounds, branch = torch.empty(0), rows.branch[:, first:, None]
    for number in range(int(rows.branch.max()) + 1):
        other = (rows.branch != CONTEXT) & (rows.branch != number)
        order = other.to(torch.uint8).argsort(dim=1, stable=True)  # the tokens of this request first
        found = page_bounds(query, key.gather(2, order[:, None, :, None].expand_as(key)), size)
        bounds = found if number == 0 else torch.where((branch == number)[:, None], found, bounds)
    return bounds


def page_bounds(query: Tensor, key: Tensor, size: int) -> Tensor:
    """Σ_d max(q_d min_d, q_d max_d) of each query and each whole page.

    Parameters
    ----------
    query : Tensor [rows, n, queries, head_dim]
    key : Tensor [rows, n or a divisor of it, keys, head_dim]

    Returns
    -------
    Tensor [rows, n, queries, keys // size]
    """
    exact = torch.promote_types(key.dtype, torch.float32)
    paged = key[:, :, : key.shape[2] // size * size].unflatten(2, (-1, size))
    low, high = (repeat_heads(each, query.shape[1]).to(exact).transpose(-1, -2) for each in paged.aminmax(dim=3))
    query = query.to(exact)
    return query.clamp(min=0) @ high + query.clamp(max=0) @ low
