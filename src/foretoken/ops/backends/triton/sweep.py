"""The first passes over rows that a short list cannot decide, spread over the whole GPU.

The filters queue such rows. `guess_kernel` guesses two keys a < b of each, with the threshold
probably between them. One pass measures W(x >= a) and W(x >= b), lists what lies between them, and
writes each block's mass of what is at least b, kept whatever the threshold turns out to be.
Programs of one warp take a block of a queued row at a time, as the scan does: no barrier between
warps. A second launch does the same for rows whose guess was wrong, with keys next to the first;
`wide.py` does the rest. What these launches save and cost: decision 010.

A block reserves a stretch of the row's list, so that stretches lie in any order. No result depends
on it: weights are summed as integers of 2^-40 (`FIXED`; each loses less than that, and the largest
weight is 1), and what the list adds to a block's mass is added in the order of ids. In its entry
of `best_NJ` a block leaves where its stretch starts, and its length (`packed`).

A row that is searched has no short list: the memory of that holds notes, what is sought and the
guesses (float32) and what the sweeps found (int64).

Shapes: N rows, V vocabulary, NB blocks, NG groups of a row.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.guess import (
    LOWEST,
    SAMPLE,
    Bracket,
    Guess,
    Search,
    Weighting,
    guess_from,
    needed,
    room_for_list,
    sample_of,
    weight_of,
)
from foretoken.ops.backends.triton.records import Batch, Filtered, RawRows
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    CAPACITY,
    FIXED,
    key_of,
    let_next_start,
    load_blocks,
    load_span,
    log2_sum,
    value_of,
    wait_for_writes,
)

GUESSING = 132 * 2  # programs that guess, at most; they loop
PROGRAMS = 132 * 20  # that sweep, likewise
PARTS = 16  # of a row in the second sweep, where most rows have nothing to do
_PART = tl.constexpr(256)  # of a block, loaded again: for all of it registers would run short
_ASIDE = tl.constexpr(0.45)  # of the list's room, on either side of a second guess
_LENGTHS = tl.constexpr(2048)  # more than a block's

Swept = namedtuple("Swept", "whole from_a from_b listed")
"""What a sweep measured: W of the row, W(x >= a), W(x >= b), the number of logits in [a, b)."""


@triton.jit
def queue_row(filtered: Filtered, row, search: Search):
    """Queue a row, with notes of what is sought; the sums of its two sweeps are 0 yet."""
    notes = filtered.list_x_NC + row * CAPACITY
    tl.store(notes, search.weighting.maximum)
    tl.store(notes + 1, search.weighting.scale)
    tl.store(notes + 2, search.weighting.floor)
    tl.store(notes + 3, search.counted.to(tl.float32))
    tl.store(notes + 4, search.goal)
    tl.store(notes + 5, search.top)
    sums = filtered.list_id_NC + row * CAPACITY
    tl.store(sums + tl.arange(0, 16), tl.zeros((16,), tl.int32))
    place = tl.atomic_add(filtered.queue_N1, 1)
    tl.store(filtered.queue_N1 + 1 + place, row.to(tl.int32))


@triton.jit
def load_search(filtered: Filtered, row):
    """What `queue_row` noted."""
    notes = filtered.list_x_NC + row * CAPACITY
    weighting = Weighting(tl.load(notes), tl.load(notes + 1), tl.load(notes + 2))
    return Search(weighting, tl.load(notes + 3) > 0, tl.load(notes + 4), tl.load(notes + 5))


@triton.jit
def store_guess(filtered: Filtered, row, turn, guess: Guess):
    """Note the guess of a row's first sweep (turn 0) or of its second (1)."""
    notes = filtered.list_x_NC + row * CAPACITY + 6 + 2 * turn
    tl.store(notes, value_of(guess.a))
    tl.store(notes + 1, value_of(guess.b))


@triton.jit
def load_guess(filtered: Filtered, row, turn):
    """What `store_guess` noted."""
    notes = filtered.list_x_NC + row * CAPACITY + 6 + 2 * turn
    return Guess(key_of(tl.load(notes)), key_of(tl.load(notes + 1)))


@triton.jit
def _missed_note(filtered: Filtered, row):
    """Where the second sweep notes whether the first one missed, 1.0 or 0.0."""
    return filtered.list_x_NC + row * CAPACITY + 10


@triton.jit
def sweeps_of(filtered: Filtered, row):
    """How many sweeps a queued row had."""
    return 1 + tl.load(_missed_note(filtered, row)).to(tl.int32)


@triton.jit
def _sums(filtered: Filtered, row, turn):
    """Where a sweep's sums are: three in units of 1 / FIXED, and the number of listed logits."""
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
def guess_kernel(batch: Batch, NBP: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs: any number; each takes queued rows, and guesses where their thresholds lie."""
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    batch = batch  # see `records.py`
    rows, filtered = batch.rows, batch.scratch.filtered
    queued = tl.load(filtered.queue_N1, cache_modifier=".cg")
    for item in range(tl.program_id(0), queued, tl.num_programs(0)):
        row = tl.load(filtered.queue_N1 + 1 + item).to(tl.int64)
        search = load_search(filtered, row)
        weighting = search.weighting
        floor = key_of(weighting.floor)
        guess = Guess(floor, floor)
        if search.counted | (search.goal < 1):  # else min-p alone: its floor is the threshold
            x = sample_of(rows, row, 0)
            unit = tl.maximum(rows.V / SAMPLE, 1.0)
            mass = unit * tl.sum(weight_of(x, weighting), axis=0)
            if (weighting.floor == float("-inf")) & (not search.counted):
                masses = load_blocks(batch.scratch.mass_NJ, row, rows.NB, NBP)
                mass = tl.exp2(log2_sum(masses) - weighting.maximum * weighting.scale)
            low, high = tl.full((), LOWEST, tl.uint32), key_of(search.top) + 1
            bracket, need = Bracket(low, high, mass, mass * 0), needed(search, mass)
            guess = guess_from(x, unit, bracket, need, room_for_list(rows), weighting)
        store_guess(filtered, row, 0, guess)


@triton.jit
def sweep_kernel(batch: Batch, parts, TURN: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs: any number; each takes parts of queued rows until none is left.

    TURN: 0 sweeps all of them, 1 those where the first sweep missed.
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
                tl.store(_missed_note(filtered, row), missed.to(tl.float32))
        for j in range(item % parts, end, parts):
            _sweep_block(batch, row, j, guess, TURN)


@triton.jit
def _some(keys, most):
    """That many keys, at most `most`."""
    return tl.minimum(tl.clamp(keys, 0.0, 2e9).to(tl.uint32), most)


@triton.jit
def _second_guess(filtered: Filtered, row, first: Guess, room):
    """(whether the first sweep missed, the guess for a second).

    What is listed between the first keys says how dense the logits are near by, and so how far
    away the threshold is, or where between them if the list overflowed.
    """
    a, b = first.a, first.b
    search, swept = load_search(filtered, row), load_sweep(filtered, row, 0)
    weighting, need = search.weighting, needed(search, swept.whole)
    too_high, too_low = swept.from_a < need, swept.from_b >= need
    missed = (swept.listed > 0) & (b > a + 1) & (too_high | too_low | (swept.listed > room))
    lowest, end = tl.full((), LOWEST, tl.uint32), key_of(search.top) + 1
    apart = (b - a).to(tl.float32) / tl.maximum(swept.listed, 1)
    aside = room * _ASIDE * apart
    if too_high:
        gap = (need - swept.from_a) / tl.maximum(weight_of(value_of(a), weighting), 1e-30) * apart
        b = a - _some(gap - aside, a - lowest)
        a = b - _some(2 * aside, b - lowest)
    elif too_low:
        gap = (swept.from_b - need) / tl.maximum(weight_of(value_of(b), weighting), 1e-30) * apart
        a = b + _some(gap - aside, end - b)
        b = a + _some(2 * aside, end - a)
    else:
        share = (need - swept.from_b) / (swept.from_a - swept.from_b)
        middle = b - _some(share * (b - a).to(tl.float32), b - a)
        a, b = middle - _some(aside, middle - a), middle + _some(aside, b - middle)
    return missed, Guess(a, b)


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
        list_ = filtered.group_top_NG + row * rows.NG
        _list_block(rows, row, j * BLOCK, lowest, highest, list_, start, room)
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
    """A block's stretch of the list in one float32, exactly."""
    return (tl.minimum(start, room) * _LENGTHS + number).to(tl.float32)


@triton.jit
def unpacked(stretch):
    """(start, number) of a block's listed logits."""
    both = stretch.to(tl.int32)
    return both // _LENGTHS, both % _LENGTHS
