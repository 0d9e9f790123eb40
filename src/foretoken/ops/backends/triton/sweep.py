"""The first passes over rows that a short list cannot decide, spread over the whole GPU.

The filters queue such rows, and `guess_kernel` guesses two keys a < b of each (`guess.py`). The
first sweep measures W(x >= a) and W(x >= b), lists what lies between them, and writes each block's
mass of what is at least b, kept whatever the threshold turns out to be. Programs of one warp take a
block of a queued row at a time, as the scan does: no barrier between warps. The second sweep does
the same for rows whose guess was wrong or too wide, with keys that the first one's figures suggest;
`wide.py` does the rest. What these launches save and cost: decision 010.

A block reserves a stretch of the row's list, so that stretches lie in any order. No result depends
on it: weights are summed as integers of 2^-40 (`FIXED`; each loses less than that, and the largest
weight is 1), and what the list adds to a block's mass is added in the order of ids. In its entry
of `best_NJ` a block leaves where its stretch starts, and its length (`packed`).
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.guess import (
    LOWEST,
    MISSED,
    Guess,
    list_of,
    load_guess,
    load_search,
    needed,
    notes_of,
    room_for_list,
    store_guess,
    weight_of,
)
from foretoken.ops.backends.triton.records import Batch, Filtered, RawRows
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    CAPACITY,
    FIXED,
    key_of,
    let_next_start,
    load_span,
    value_of,
    wait_for_writes,
)

SWEEP_PROGRAMS = 132 * 20  # at most; they loop
SECOND_PARTS = 16  # of a row in the second sweep, where most rows have nothing to do
_PART = tl.constexpr(256)  # of a block, loaded again: for all of it registers would run short
_ASIDE = tl.constexpr(0.45)  # of the list's room, on either side of a second guess
_LENGTHS = tl.constexpr(2048)  # above the length of a stretch, at most a block's 1024

Swept = namedtuple("Swept", "whole from_a from_b listed")
"""What a sweep measured: W of the row, W(x >= a), W(x >= b), the number of logits in [a, b)."""


@triton.jit
def sweep_kernel(batch: Batch, parts, TURN: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs: any number; each takes parts of queued rows until none is left.

    parts: of a row; part n takes blocks n, n + parts, ... TURN: 0 sweeps all queued rows, 1 those
    where the first sweep missed.
    """
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    batch = batch  # see `records.py`
    rows, filtered = batch.rows, batch.scratch.filtered
    items = tl.load(filtered.queue_N1, cache_modifier=".cg") * parts
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.load(filtered.queue_N1 + 1 + item // parts).to(tl.int64)
        guess, end = load_guess(filtered, row, 0), rows.NB
        if TURN:
            missed, guess = _second_guess(filtered, row, guess, room_for_list(rows))
            end = tl.where(missed, rows.NB, 0)
            if item % parts == 0:  # noted, not computed twice: compilers round differently
                store_guess(filtered, row, 1, guess)
                tl.store(notes_of(filtered, row) + MISSED, missed.to(tl.float32))
        for j in range(item % parts, end, parts):
            _sweep_block(batch, row, j, guess, TURN)


@triton.jit
def _second_guess(filtered: Filtered, row, first: Guess, room):
    """(whether the first sweep missed, the guess for a second).

    It missed if W(b) < need <= W(a) does not hold (W as in `guess.py`), or if the list overflowed,
    and is repeated if something was listed: that says how dense logits are near the first keys, and
    so how many keys away the threshold is, or, if the list overflowed, where between them.
    """
    a, b = first.a, first.b
    search, swept = load_search(filtered, row), load_sweep(filtered, row, 0)
    weighting, need = search.weighting, needed(search, swept.whole)
    too_high, too_low = swept.from_a < need, swept.from_b >= need
    missed = (swept.listed > 0) & (b > a + 1) & (too_high | too_low | (swept.listed > room))
    lowest, end = tl.full((), LOWEST, tl.uint32), key_of(search.top) + 1
    apart = (b - a).to(tl.float32) / tl.maximum(swept.listed, 1)  # keys between listed logits
    aside = room * _ASIDE * apart  # keys on either side of where the threshold should be
    if too_high:
        gap = (need - swept.from_a) / tl.maximum(weight_of(value_of(a), weighting), 1e-30) * apart
        b = a - _at_most(gap - aside, a - lowest)
        a = b - _at_most(2 * aside, b - lowest)
    elif too_low:
        gap = (swept.from_b - need) / tl.maximum(weight_of(value_of(b), weighting), 1e-30) * apart
        a = b + _at_most(gap - aside, end - b)
        b = a + _at_most(2 * aside, end - a)
    else:
        share = (need - swept.from_b) / (swept.from_a - swept.from_b)
        middle = b - _at_most(share * (b - a).to(tl.float32), b - a)
        a, b = middle - _at_most(aside, middle - a), middle + _at_most(aside, b - middle)
    return missed, Guess(a, b)


@triton.jit
def _at_most(keys, most):
    """A float number of keys as an integer in 0..most."""
    return tl.minimum(tl.clamp(keys, 0.0, 2e9).to(tl.uint32), most)


@triton.jit
def _sweep_block(batch: Batch, row, j, guess: Guess, TURN: tl.constexpr):
    """Add a block to its row's sums, list what lies between the keys, note its mass above them."""
    rows, scratch, filtered = batch.rows, batch.scratch, batch.scratch.filtered
    x = load_span(rows, row, j * BLOCK, BLOCK, "evict_first")
    lowest, highest = value_of(guess.a), value_of(guess.b)
    weight = weight_of(x, load_search(filtered, row).weighting)
    whole = tl.sum(weight, axis=0)
    from_a = tl.sum(tl.where(x >= lowest, weight, 0.0), axis=0)
    from_b = tl.sum(tl.where(x >= highest, weight, 0.0), axis=0)
    tl.store(scratch.mass_NJ + row * rows.NB + j, from_b)
    i = tl.arange(0, 4)
    added = (tl.where(i == 0, whole, tl.where(i == 1, from_a, from_b)) * FIXED).to(tl.int64)
    sums = _sums(filtered, row, TURN)
    tl.atomic_add(sums + i, added, mask=i < 3, sem="relaxed")
    number = tl.sum(((x >= lowest) & (x < highest)).to(tl.int32), axis=0)
    start, room = number * 0, room_for_list(rows)
    if number > 0:
        start = tl.atomic_add(sums + 3, number.to(tl.int64), sem="relaxed").to(tl.int32)
        _list_block(rows, row, j * BLOCK, lowest, highest, list_of(batch, row), start, room)
    tl.store(scratch.best_NJ + row * rows.NB + j, packed(start, number, room))


@triton.jit
def _list_block(rows: RawRows, row, first, lowest, highest, list_, start, room):
    """Write a block's logits in [lowest, highest) to the list from `start` on, by rising id."""
    for part in range(first, first + BLOCK, _PART):
        x = load_span(rows, row, part, _PART, "evict_first")
        listed = ((x >= lowest) & (x < highest)).to(tl.int32)
        rank = start + tl.cumsum(listed, axis=0) - 1
        tl.store(list_ + rank, x, mask=(listed > 0) & (rank < room))
        start += tl.sum(listed, axis=0)


@triton.jit
def packed(start, number, room):
    """A block's stretch of the list in one float32: exactly, as integers up to 2^24 are."""
    return (tl.minimum(start, room) * _LENGTHS + number).to(tl.float32)


@triton.jit
def unpacked(stretch):
    """(start, number) of a block's listed logits."""
    both = stretch.to(tl.int32)
    return both // _LENGTHS, both % _LENGTHS


@triton.jit
def _sums(filtered: Filtered, row, turn):
    """Where a sweep's four sums are (`guess.py`)."""
    return (filtered.list_id_NC + row * CAPACITY).to(tl.pointer_type(tl.int64)) + 4 * turn


@triton.jit
def load_sweep(filtered: Filtered, row, turn):
    """What a sweep found."""
    sums = _sums(filtered, row, turn)
    return Swept(
        tl.load(sums, cache_modifier=".cg").to(tl.float32) / FIXED,
        tl.load(sums + 1, cache_modifier=".cg").to(tl.float32) / FIXED,
        tl.load(sums + 2, cache_modifier=".cg").to(tl.float32) / FIXED,
        tl.load(sums + 3, cache_modifier=".cg").to(tl.int32),
    )


@triton.jit
def sweeps_of(filtered: Filtered, row):
    """How many sweeps a queued row had: 2 if the first one missed, else 1."""
    return 1 + tl.load(notes_of(filtered, row) + MISSED).to(tl.int32)
