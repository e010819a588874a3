"""Attention on a GPU in which heads share scores: one kernel for decoding and for prompts, and one that joins splits.

A program meets the keys of one representative once and hands its probabilities to the values of up to `MEMBERS` heads
that lie side by side: one head with keys of width d_k and values of width MEMBERS · d_v. With one member every head
looks up its representative and meets the keys by itself; they come from the second-level cache then.

The softmax is computed online (Milakov and Gimelshein, 2018, arXiv 1805.02867), in float32 and to base 2. Where keys
are split among programs, each leaves its output and the logarithm of its sum, which `join` weighs (Dao et al., 2023,
Flash-Decoding). Arguments are the tuples of `triton_arguments`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _members(lookup, row, program, block):
    """The cluster of a program, and the heads whose values it reads: `[MEMBERS]`, -1 for none."""
    if block.members == 1:
        heads = program + tl.arange(0, 1)
        cluster = program
        if lookup.cluster is not None:
            cluster = tl.load(lookup.cluster + row * lookup.cluster_row + program).to(tl.int32)
    else:
        cluster = program // block.pieces
        head = tl.arange(0, block.padded_heads)
        table = lookup.cluster + row * lookup.cluster_row + head
        mine = (tl.load(table, mask=head < block.heads, other=-1).to(tl.int32) == cluster).to(tl.int32)
        number = tl.cumsum(mine, 0) * mine - 1  # among the cluster's, from 0; -1 for heads of others
        wanted = program % block.pieces * block.members + tl.arange(0, block.members)
        found = number[:, None] == wanted[None, :]
        heads = tl.sum(tl.where(found, head[:, None] + 1, 0), 0) - 1
    return cluster, heads


@triton.jit
def _along_values(each, block):
    """One number per member for all of its values, side by side: `[MEMBERS]` to `[MEMBERS * d_v]`."""
    wide = tl.broadcast_to(each[:, None], (block.members, block.padded_value))
    # The compiler must be told, else it reads and writes number by number.
    return tl.max_constancy(tl.reshape(wide, (block.members * block.padded_value,)), block.padded_value)


@triton.jit
def _lines(states, lookup, row, column, stop, block):
    """Where the columns of a row begin: offsets `[n]`, int64; columns from `stop` on may lie anywhere."""
    if lookup.pages is None:
        lines = row * states.row + column.to(tl.int64) * states.column
    else:
        pages = lookup.pages + row * lookup.pages_row + column // block.page
        page = tl.load(pages, mask=column < stop, other=0).to(tl.int64)
        lines = page * states.row + (column % block.page) * states.column
    return lines


@triton.jit
def _product(left, right, block):
    if block.widened:  # the interpreter would multiply the bits of bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _step(carry, meets, reads, limits, seen, block):
    """Take the next keys and values into the running maximum, sum and weighted values."""
    best, total, joint = carry
    query, first_score, position = meets
    key, value, lookup, row, key_head, value_head, read = reads
    at, stop, masked = limits
    column = at + tl.arange(0, block.keys)
    inside = column < stop
    width = tl.arange(0, block.padded_key)
    there = _lines(key, lookup, row, column, stop, block)
    there = key.start + there[:, None] + (key_head.to(tl.int64) * key.head + width * key.width)[None, :]
    keys = tl.load(there, mask=inside[:, None] & (width < block.key_width)[None, :], other=0.0)
    if block.matrices:
        scores = _product(query, tl.trans(keys), block)
    else:
        scores = tl.sum(keys.to(tl.float32) * query.to(tl.float32), 1)[None, :]
    if seen.first_score is not None:
        scores = tl.where((column == 0)[None, :], first_score[:, None], scores)
    scores *= seen.scale
    if masked:
        shown = inside[None, :] & (column[None, :] <= position[:, None])
        if seen.window is not None:
            if block.chunked:
                shown = shown & (column[None, :] // seen.window == position[:, None] // seen.window)
            else:
                shown = shown & (position[:, None] - column[None, :] < seen.window)
        scores = tl.where(shown, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    # A query that has seen nothing yet keeps a maximum of minus infinity: there is nothing to rescale.
    from_here = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - from_here[:, None])
    rescale = tl.exp2(best - from_here)
    place = tl.arange(0, block.members * block.padded_value) % block.padded_value
    there = _lines(value, lookup, row, column, stop, block)
    there = value.start + there[:, None] + (value_head.to(tl.int64) * value.head + place * value.width)[None, :]
    values = tl.load(there, mask=inside[:, None] & read[None, :], other=0.0)
    if block.matrices:
        added = _product(weights.to(values.dtype), values, block)
    else:
        added = tl.sum(tl.trans(weights) * values.to(tl.float32), 0)[None, :]
    return higher, total * rescale + tl.sum(weights, 1), joint * rescale[:, None] + added


@triton.jit
def _store(out, carry, place, block):
    """Leave outputs, and logarithms of sums where they are to be joined."""
    best, total, joint = carry
    row, heads, split, index, queries = place
    asked = index < queries
    head, number = _along_values(heads, block), tl.arange(0, block.members * block.padded_value)
    width = number % block.padded_value
    line = out.start + row * out.row + split * out.split + index.to(tl.int64)[:, None] * out.query
    there = line + (head.to(tl.int64) * out.head + width)[None, :]
    mask = asked[:, None] & ((head >= 0) & (width < block.value_width))[None, :]
    tl.store(there, joint / tl.where(total == 0, 1.0, total)[:, None], mask=mask)
    if out.logarithm is not None:
        line = out.logarithm + ((row * block.heads + heads[None, :]) * block.splits + split) * queries
        tl.store(line + index[:, None], (best + tl.log2(total))[:, None], mask=asked[:, None] & (heads >= 0)[None, :])


@triton.jit
def _keys_of(seen, row, block):
    """Of a program: the columns of its queries, the first that one of them stands in, and the keys it reads.

    They are `start` to `stop`, its share of what its queries see.
    """
    # The last queries see most: their programs begin first.
    number = tl.num_programs(1) // block.splits - 1 - tl.program_id(1) // block.splits
    split = tl.program_id(1) % block.splits
    index = number * block.queries + tl.arange(0, block.queries)
    before = seen.first
    if seen.past is not None:
        before += tl.load(seen.past + row).to(tl.int32)
    position = before + tl.minimum(index, seen.queries - 1)
    nearest = before + number * block.queries
    last = before + tl.minimum((number + 1) * block.queries, seen.queries)
    begin = 0
    if seen.window is not None:
        if block.chunked:  # noqa: SIM108 - the compiler takes a branch that is constant, not an expression
            begin = nearest // seen.window * seen.window
        else:
            begin = tl.maximum(nearest - seen.window + 1, 0)
    share = tl.cdiv(tl.cdiv(last - begin, block.splits), block.keys) * block.keys
    start = begin + split * share
    return index, position, nearest, start, tl.minimum(start + share, last), split


@triton.jit
def _asked(query, at, asked, block):
    """The queries of a program: `[queries, d_k]`."""
    row, cluster, index = at
    width = tl.arange(0, block.padded_key)
    line = query.start + row * query.row + cluster.to(tl.int64) * query.head
    there = line + index.to(tl.int64)[:, None] * query.column + width[None, :] * query.width
    return tl.load(there, mask=asked[:, None] & (width < block.key_width)[None, :], other=0.0)


@triton.jit
def attention(states, lookup, seen, out, block):
    """Of a program: a head, or a cluster and a piece of its members; a block of queries and a split of keys; a row."""
    query, key, value = states
    row = tl.program_id(2).to(tl.int64)
    cluster, heads = _members(lookup, row, tl.program_id(0), block)
    if tl.max(heads, 0) < 0:  # a cluster with fewer members than there are programs for it
        return
    key_head, value_head = cluster, tl.maximum(heads, 0) // lookup.group
    if lookup.slot is not None:
        key_head = tl.load(lookup.slot + row * lookup.slot_row + cluster).to(tl.int32)
    if lookup.value is not None:
        value_head = tl.load(lookup.value + row * lookup.value_row + heads, mask=heads >= 0, other=0).to(tl.int32)
    wide = tl.arange(0, block.members * block.padded_value) % block.padded_value
    read = (_along_values(heads, block) >= 0) & (wide < block.value_width)

    index, position, nearest, start, stop, split = _keys_of(seen, row, block)
    asked = index < seen.queries
    asking = _asked(query, (row, cluster, index), asked, block)
    first_score = tl.zeros([block.queries], tl.float32)
    if seen.first_score is not None:
        there = seen.first_score + (row * block.clusters + cluster) * seen.queries + index
        first_score = tl.load(there, mask=asked, other=0.0).to(tl.float32)
    meets = (asking, first_score, position)
    reads = (key, value, lookup, row, key_head, _along_values(value_head, block), read)
    best = tl.full([block.queries], float("-inf"), tl.float32)
    total = tl.zeros([block.queries], tl.float32)
    joint = tl.zeros([block.queries, block.members * block.padded_value], tl.float32)
    # Whole blocks of keys that every query sees need no mask. Stages are named at the loops: by default only what a
    # matrix product reads is loaded ahead.
    middle = start
    if seen.window is None:
        middle += tl.maximum(tl.minimum(nearest + 1, stop) - start, 0) // block.keys * block.keys
    for at in tl.range(start, middle, block.keys, num_stages=block.stages):
        best, total, joint = _step((best, total, joint), meets, reads, (at, stop, False), seen, block)
    for at in tl.range(middle, stop, block.keys, num_stages=block.stages):
        best, total, joint = _step((best, total, joint), meets, reads, (at, stop, True), seen, block)
    _store(out, (best, total, joint), (row, heads, split, index, seen.queries), block)


@triton.jit
def join(parts, out, sizes):
    """Weigh the outputs of splits by their sums; of a program: a head, a query, a row."""
    head, query, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    split, column = tl.arange(0, sizes.padded_splits), tl.arange(0, sizes.padded_width)
    line = parts.logarithm + ((row * sizes.heads + head) * sizes.splits + split) * sizes.queries + query
    logarithm = tl.load(line, mask=split < sizes.splits, other=float("-inf"))
    weight = tl.exp2(logarithm - tl.max(logarithm, 0))
    there = parts.start + row * parts.row + head * parts.head + query * parts.query
    there = there + split[:, None] * parts.split + column[None, :]
    mask = (split < sizes.splits)[:, None] & (column < sizes.width)[None, :]
    weighed = tl.sum(tl.load(there, mask=mask, other=0.0) * weight[:, None], 0) / tl.sum(weight, 0)
    there = out.start + row * out.row + head * out.head + query * out.query + column
    tl.store(there, weighed, mask=column < sizes.width)
