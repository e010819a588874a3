"""Plain attention that is watched on its way: what each layer reads and puts out, shown to watchers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.attention import AttentionCall, full_attention, probe_features, probe_probabilities, take_over
from chai_eval.attention.inputs import attention_inputs
from chai_eval.attention.masks import within
from chai_eval.attention.probe import repeat_heads


class Seen(NamedTuple):
    """One attention layer in a pass under plain attention, over rows without padding, and the call that it was.

    `hidden`, `[rows, length, hidden]`, is what goes into the layer. Queries and output are `[rows, heads, length,
    head_dim]`, keys and values `[rows, kv_heads, length, head_dim]`.
    """

    call: AttentionCall
    hidden: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    def probabilities(self, columns: Tensor) -> Tensor:
        """Attention probabilities of the queries in `columns` [n] over all keys: `[rows, heads, n, keys]`, float32."""
        heads, length = self.query.shape[1], self.query.shape[2]
        columns = columns.to(self.query.device)
        key = repeat_heads(self.key, heads).float()
        scores = torch.matmul(self.query[:, :, columns].float(), key.transpose(-1, -2)) * self.call.view.scaling
        at = torch.arange(length, device=self.query.device)
        hidden = at > columns[:, None]
        if self.call.view.window is not None:
            hidden = hidden | ~within(self.call.view.window, columns[:, None], at)
        return scores.masked_fill_(hidden, float("-inf")).softmax(-1)

    def last_row(self) -> Tensor:
        """Attention probabilities of the last token: `[rows, heads, keys]`, float32."""
        return self.probabilities(torch.tensor([self.query.shape[2] - 1]))[:, :, 0]

    def probe(self, tokens: int) -> Tensor:
        """What CHAI compares heads by, of the first tokens: `[rows, heads, n]`, float32."""
        query, key = self.query[:, :, :tokens], self.key[:, :, :tokens]
        return probe_features(probe_probabilities(query, key, self.call.view.scaling))


Watcher = Callable[[Seen], object]


@contextmanager
def watching(model: PreTrainedModel, watchers: Sequence[Watcher]) -> Iterator[None]:
    """Run plain attention while the context lasts, and show every layer to all watchers as it is computed."""
    inputs: dict[int, Tensor] = {}

    def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = full_attention(query, key, value, call.view)
        seen = Seen(call, inputs.pop(call.index), query, key, value, output)
        for watch in watchers:
            watch(seen)
        return output

    with take_over(model, attend), attention_inputs(model, inputs.__setitem__):
        yield


@torch.no_grad()
def observe(model: PreTrainedModel, batches: Iterable[Tensor], watchers: Sequence[Watcher]) -> None:
    """Run the model's layers over batches `[samples, tokens]`, int64, under the eyes of the watchers."""
    with watching(model, watchers):
        for tokens in batches:
            model.base_model(input_ids=tokens.to(model.device))
