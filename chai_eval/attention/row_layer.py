"""One layer of the cache, in rows: V whole, and K of the heads that are still read once a method knows which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from chai_eval.attention.membership import Membership
from chai_eval.attention.rows import Rows
from chai_eval.attention.sharing import SharedHeads, heads_of
from chai_eval.attention.sources import HeadProjection

# Room made when a buffer is full: a sixteenth of what it holds, within these bounds. The whole cache is then copied
# once in many tokens, and never has much more room than it needs.
LEAST_ROOM, MOST_ROOM = 16, 1024

# Name under which queries of the probe tokens are remembered until every row has seen its probe.
PROBE_QUERY = "probe_query"
# Name under which each row's first key is remembered whole.
FIRST_KEY = "first_key"
# What is remembered of a row's first tokens alone: it holds as long as these are there, and is filled anew if not.
OF_FIRST_TOKENS = {PROBE_QUERY, FIRST_KEY}


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, one request a row, each row's first token in column 0.

    Attributes
    ----------
    keys : Tensor [rows, kept, room, head_dim]
        Of every key head; of those that representatives read, once heads share them. Whatever else a method stores.
    values : Tensor [rows, kept, room, head_dim]
    lengths : Tensor [rows], int64
        Tokens of each row; those that are held, where a method drops some.
    width : int
        Columns in use: the longest row's tokens, or a few more after tokens that were padding.
    seen : int
        Tokens of the batch so far, padding included.
    aligned : bool
        All rows are known to be of the same length.
    shared : SharedHeads or None
        Which heads share scores, once that is known: keys of others are not here any more.
    made_by : str
        The method and settings that stored what is here.
    probe_tokens : int
        Tokens in which that method finds its clusters, in any layer.
    in_use : bool
        A pass under that method is going on.
    least : int
        Tokens that no row may be cropped below: `probe_tokens`, once clusters were found in them.
    state : dict of str to Tensor [rows, ...]
        What a method remembers from pass to pass.
    projections : dict of str to HeadProjection
        Of the heads that are kept, gathered once for these rows.
    reserved : bool
        Whoever holds the cache counts its tokens, on the device: see `reserve`.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, made_by: str = "", probe_tokens: int = 0) -> None:
        super().__init__()
        self.made_by = made_by
        self.probe_tokens = probe_tokens
        self.in_use = False
        self._forget()

    def _forget(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.lengths: Tensor | None = None
        self.width = 0
        self.seen = 0
        self.aligned = False
        self.shared: SharedHeads | None = None
        self.least = 0
        self.state: dict[str, Tensor] = {}
        self.projections: dict[str, HeadProjection] = {}
        self.reserved = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the tokens of a pass, and hand its keys and values on; they are stored in rows by `append`.

        ValueError outside a pass under the method that the cache belongs to: the model's own attention can't read it.
        """
        if not self.in_use:
            raise ValueError("cache: filled under a method that is no longer applied; allowed: only under that method")
        self.count(key_states.shape[-2])
        return key_states, value_states

    def count(self, tokens: int) -> None:
        """Count the tokens of a pass, padding included."""
        self.is_initialized = True
        self.seen += tokens

    def following(self, rows: Rows) -> Rows:
        """The rows of a pass that goes on from what is here; as they are where nothing is."""
        if self.lengths is None:
            return rows
        if not self.reserved:
            return rows.after(self.lengths, self.width, self.aligned)
        assert self.keys is not None
        room = self.keys.shape[2]
        # All of the room counts as keys; where it is for this pass alone, none of it need be masked.
        return rows.after(self.lengths, room - rows.length, self.aligned and room == self.width + rows.length)

    def append(self, key: Tensor, value: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Store the tokens of a pass behind those of earlier ones; return the whole rows, where they lie.

        From keys and values of the pass alone, and of the heads that are kept, `[rows, kept, length, head_dim]`, to
        `[rows, kept, width, head_dim]`; of the whole room where it is reserved.
        """
        self.keys = self._stored(self.keys, key, rows)
        self.values = self._stored(self.values, value, rows)
        if self.reserved:
            return self.keys, self.values
        self.lengths = rows.lengths if rows.past is None else rows.past + rows.lengths
        self.aligned = rows.aligned
        if self.least < self.probe_tokens <= rows.shortest:
            self.least = self.probe_tokens
        self.width = rows.key_columns(rows.length)
        return self.keys[:, :, : self.width], self.values[:, :, : self.width]

    def reserve(self, tokens: int, lengths: Tensor) -> None:
        """Make room for so many more tokens, held at one place in memory from now on; so are `lengths`, `[rows]`.

        Until `release` whoever reserved it counts tokens in `lengths`, and passes have the same shapes whatever these
        say: what the host does in one of them holds for all.
        """
        self.keys, self.values = (self._grown(held, self.width + tokens) for held in self.with_room())
        self.lengths, self.reserved = lengths, True

    def release(self, tokens: int) -> None:
        """Count tokens oneself again; so many were added to every row since `reserve`."""
        assert self.lengths is not None
        self.lengths, self.reserved = self.lengths.clone(), False
        self.width += tokens

    def _grown(self, buffer: Tensor, room: int) -> Tensor:
        """What is in use of a buffer, with zeros behind it."""
        grown = buffer.new_zeros(*buffer.shape[:2], room, buffer.shape[3])
        grown[:, :, : self.width] = buffer[:, :, : self.width]
        return grown

    def with_room(self) -> tuple[Tensor, Tensor]:
        """Keys and values with the free room behind them, which holds nothing that counts: `[rows, kept, room, d]`."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _stored(self, buffer: Tensor | None, new: Tensor, rows: Rows) -> Tensor:
        if rows.past is None or buffer is None:
            return new.contiguous()
        if buffer.is_inference() and not torch.is_inference_mode_enabled():
            buffer = buffer.clone()  # what inference mode made can't be written outside it
        needed = rows.key_columns(rows.length)
        if buffer.shape[2] < needed:
            buffer = self._grown(buffer, needed + min(max(needed // 16, LEAST_ROOM), MOST_ROOM))
        if rows.aligned:
            buffer[:, :, self.width : needed] = new
        else:  # rows of different length go on at different columns
            buffer.scatter_(2, rows.columns[:, None, :, None].expand_as(new), new)
        return buffer

    @property
    def membership(self) -> Membership | None:
        """The clusters of every row, once they are known."""
        return None if self.shared is None else self.shared.membership

    def share(self, shared: SharedHeads) -> None:
        """Drop the keys (and values, where members share them) of heads that no representative reads."""
        keys, values = self.with_room()
        self.keys = heads_of(keys[:, :, : self.width], shared.key_heads)
        if shared.share_value:
            self.values = heads_of(values[:, :, : self.width], shared.value_heads)
        self.shared = shared

    def select(self, columns: Tensor, lengths: Tensor) -> None:
        """Drop all tokens but some, of each head other ones.

        `columns`, `[rows, kept, n]`, int64, are where those that stay are, in their order; the first `lengths`,
        `[rows]`, of them count.
        """
        self.keys, self.values = (
            held.gather(2, columns[..., None].expand(-1, -1, -1, held.shape[3])) for held in self.with_room()
        )
        self.lengths, self.width = lengths, columns.shape[2]

    def trim(self) -> None:
        """Give back the free room."""
        self.keys, self.values = (held[:, :, : self.width].contiguous() for held in self.with_room())

    def nbytes(self) -> int:
        """Bytes of storage that the layer's keys, values and state hold, room included.

        Projections gathered for decoding are weights, and not counted.
        """
        held = [self.keys, self.values, *self.state.values()]
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held if each is not None
        }
        return sum(storages.values())

    def logical_bytes(self) -> int:
        """Bytes of keys and values of real tokens: L (H + G) d_h numbers for each row, by its own L and kept heads."""
        if self.keys is None or self.values is None or self.lengths is None:
            return 0
        keys = torch.full_like(self.lengths, self.keys.shape[1])
        slot = None if self.shared is None else self.shared.slot
        if slot is not None:  # rows may read fewer heads than the row that reads most
            keys = torch.tensor([len(set(row)) for row in slot.tolist()], device=keys.device)
        of_key, of_value = (each.shape[3] * each.element_size() for each in (self.keys, self.values))
        per_token = keys * of_key + self.values.shape[1] * of_value
        return int((self.lengths * per_token).sum())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of every row; transformers gives minus their number.

        ValueError where that can't be undone: it reaches into the probe that the membership was found in, or a method
        remembers what the tokens did.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop: {tokens_to_remove} given; allowed: minus the number of tokens to remove")
        gone = -tokens_to_remove
        if gone == 0 or self.lengths is None:
            return
        if self.state.keys() - OF_FIRST_TOKENS:
            raise ValueError(f"crop: {gone} tokens asked for, but this method remembers them; allowed: 0")
        left = int(self.lengths.min()) - gone
        if left < self.least:
            raise ValueError(
                f"crop: {left} tokens would be left; allowed: at least the {self.least} that the clusters were found in"
            )
        self.lengths = self.lengths - gone
        self.seen -= gone
        self.width -= gone

    def _for_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("keys", "values", "lengths"):
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, change(held))
        if self.shared is not None:
            self.shared = self.shared.for_rows(change)
        self.state = {name: change(held) for name, held in self.state.items()}
        self.projections = {name: held.for_rows(change) for name, held in self.projections.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._for_rows(lambda held: held.index_select(0, beam_idx.to(held.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._for_rows(lambda held: held.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._for_rows(lambda held: held[indices])
