"""The first pass over rows that a short list cannot decide, spread over the whole GPU.

The filters left a first guess per row, two keys a < b with the threshold probably between them, and
queued the row. One pass measures W(x >= a) and W(x >= b), lists what lies between them, and writes
each block's mass of what is at least b, kept whatever the threshold turns out to be. Programs of
one warp take a block of a queued row at a time, as the scan does: no barrier between warps.

A block reserves a stretch of the row's list, so that stretches lie in any order. No result depends
on it: weights are summed as integers of 2^-40 (`FIXED`; each loses less than that, and the largest
weight is 1), and what the list adds to a block's mass is added in the order of ids. In its entry
of `best` a block leaves where its stretch starts, and its length (`packed`).

The rows' short lists are unused in such rows and hold the guess and the sums, as `put_guess` says.

Shapes: N rows, V vocabulary, NB blocks, NG groups of a row (the room of the list).
Tuples: source = (logits, stride, row, V, edits), law = (maximum, scale, floor).
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.guess import LIST, weight_of
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    CAPACITY,
    key_of,
    let_next_start,
    load_span,
    value_of,
    wait_for_writes,
)

PROGRAMS = 132 * 20  # at most; they loop
FIXED = tl.constexpr(1099511627776.0)  # 2^40
_PART = tl.constexpr(256)  # of a block, loaded again: listing all of it at once takes 138 registers
_LENGTHS = tl.constexpr(2048)  # more than a block's


@triton.jit
def put_guess(row, law, a, b, found):
    """Queue a row with a guess: `found[4]` of it gets (law, a, b), `found[3]` empty sums."""
    c = tl.arange(0, 8)
    lowest, highest = value_of(a), value_of(b)
    guess = tl.where(c == 0, law[0], tl.where(c == 1, law[1], law[2]))
    guess = tl.where(c == 3, lowest, tl.where(c == 4, highest, guess))
    tl.store(found[4] + row * CAPACITY + c, guess)
    tl.store(found[3] + row * CAPACITY + c, tl.zeros((8,), tl.int32))
    at = tl.atomic_add(found[5], 1)
    tl.store(found[5] + 1 + at, row.to(tl.int32))


@triton.jit
def take_sweep(row, found):
    """(a, b, W of the row, W(x >= a), W(x >= b), number of logits in [a, b)) of a swept row."""
    guess = found[4] + row * CAPACITY
    a, b = key_of(tl.load(guess + 3)), key_of(tl.load(guess + 4))
    sums = _sums(row, found)
    w_all = tl.load(sums, cache_modifier=".cg").to(tl.float32) / FIXED
    w_a = tl.load(sums + 1, cache_modifier=".cg").to(tl.float32) / FIXED
    w_b = tl.load(sums + 2, cache_modifier=".cg").to(tl.float32) / FIXED
    count = tl.load(found[3] + row * CAPACITY + 6, cache_modifier=".cg")
    return a, b, w_all, w_a, w_b, count


@triton.jit
def _sums(row, found):
    """Where a row's sums are, in units of 1 / FIXED; the number of listed logits is behind them."""
    return (found[3] + row * CAPACITY).to(tl.pointer_type(tl.int64))


@triton.jit
def packed(start, number, few):
    """A block's stretch of the list in one float32, exactly."""
    return (tl.minimum(start, few) * _LENGTHS + number).to(tl.float32)


@triton.jit
def unpacked(stretch):
    """(start, number) of a block's listed logits."""
    both = stretch.to(tl.int32)
    return both // _LENGTHS, both % _LENGTHS


@triton.jit
def _list_block(
    source, first, lowest, highest, start, few, room, MASKS: tl.constexpr, ENTRIES: tl.constexpr
):
    """Write a block's logits in [lowest, highest) into the room from `start`, by rising id."""
    logits, stride, row, V, edits = source
    for at in range(first, first + BLOCK, _PART):
        x = load_span(logits, stride, row, at, V, edits, _PART, MASKS, ENTRIES, "evict_first")
        listed = ((x >= lowest) & (x < highest)).to(tl.int32)
        rank = start + tl.cumsum(listed, axis=0) - 1
        tl.store(room + rank, x, mask=(listed > 0) & (rank < few))
        start += tl.sum(listed, axis=0)


@triton.jit
def _sweep_block(
    logits, stride, row, j, edits, out, found, V, NB, NG, MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Add a block to its row's sums, and list what lies between the row's keys."""
    x = load_span(logits, stride, row, j * BLOCK, V, edits, BLOCK, MASKS, ENTRIES, "evict_first")
    guess = found[4] + row * CAPACITY
    law = tl.load(guess), tl.load(guess + 1), tl.load(guess + 2)
    lowest, highest = tl.load(guess + 3), tl.load(guess + 4)
    weight = weight_of(x, law)
    w_all = tl.sum(weight, axis=0)
    w_a = tl.sum(tl.where(x >= lowest, weight, 0.0), axis=0)
    w_b = tl.sum(tl.where(x >= highest, weight, 0.0), axis=0)
    tl.store(out[0] + row * NB + j, w_b)
    i = tl.arange(0, 4)
    sums = (tl.where(i == 0, w_all, tl.where(i == 1, w_a, w_b)) * FIXED).to(tl.int64)
    tl.atomic_add(_sums(row, found) + i, sums, mask=i < 3, sem="relaxed")
    number = tl.sum(((x >= lowest) & (x < highest)).to(tl.int32), axis=0)
    start, few = number * 0, tl.minimum(NG, LIST)
    if number > 0:
        start = tl.atomic_add(found[3] + row * CAPACITY + 6, number, sem="relaxed")
        source, room = (logits, stride, row, V, edits), out[2] + row * NG
        _list_block(source, j * BLOCK, lowest, highest, start, few, room, MASKS, ENTRIES)
    tl.store(out[1] + row * NB + j, packed(start, number, few))


@triton.jit
def sweep_kernel(
    logits, stride, edits, out, found, V, NB, NG, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: any number; each takes blocks of queued rows until none is left."""
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    items = tl.load(found[5], cache_modifier=".cg") * NB
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.load(found[5] + 1 + item // NB).to(tl.int64)
        _sweep_block(logits, stride, row, item % NB, edits, out, found, V, NB, NG, MASKS, ENTRIES)
