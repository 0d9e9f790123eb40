"""The first passes over rows that a short list cannot decide, spread over the whole GPU.

The filters queued these rows. `guess_kernel` guesses two keys a < b of each, with the threshold
probably between them. One pass measures W(x >= a) and W(x >= b), lists what lies between them, and
writes each block's mass of what is at least b, kept whatever the threshold turns out to be.
Programs of one warp take a block of a queued row at a time, as the scan does: no barrier between
warps. A second launch does the same for rows whose guess was wrong, with keys next to the first;
`wide.py` does the rest. What these launches save and cost: decision 010.

A block reserves a stretch of the row's list, so that stretches lie in any order. No result depends
on it: weights are summed as integers of 2^-40 (`FIXED`; each loses less than that, and the largest
weight is 1), and what the list adds to a block's mass is added in the order of ids. In its entry
of `best` a block leaves where its stretch starts, and its length (`packed`).

The rows' short lists are unused in such rows and hold the guess and the sums, as `queue_row` says.

Shapes: N rows, V vocabulary, NB blocks, NG groups of a row (the room of the list).
Tuples: source = (logits, stride, row, V, edits), law = (maximum, scale, floor).
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.guess import (
    LIST,
    LOWEST,
    SAMPLE,
    guess,
    needed,
    sample_of,
    weight_of,
)
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    CAPACITY,
    FIXED,
    key_of,
    let_next_start,
    load_masses,
    load_span,
    log2_sum,
    value_of,
    wait_for_writes,
)

GUESSING = 132 * 2  # programs that guess, at most; they loop
PROGRAMS = 132 * 20  # that sweep, likewise
PARTS = 16  # of a row in the second sweep, where most rows have nothing to do
_PART = tl.constexpr(256)  # of a block, loaded again: listing all of it at once takes 138 registers
_ASIDE = tl.constexpr(0.45)  # of the list's room, on either side of a second guess
_LENGTHS = tl.constexpr(2048)  # more than a block's


@triton.jit
def queue_row(row, law, counts, goal, top, found):
    """Queue a row with what is sought: the first numbers of its `found[4]`.

    The guesses and the sums of two sweeps, in `found[3]`, are 0 yet.
    """
    c = tl.arange(0, 16)
    sought = tl.where(c == 0, law[0], tl.where(c == 1, law[1], law[2]))
    sought = tl.where(c == 5, goal, tl.where(c == 6, top, sought))
    sought = tl.where(c == 7, counts.to(tl.float32), sought)
    sought = tl.where((c == 3) | (c == 4) | (c > 7), 0.0, sought)
    tl.store(found[4] + row * CAPACITY + c, sought)
    tl.store(found[3] + row * CAPACITY + c, tl.zeros((16,), tl.int32))
    at = tl.atomic_add(found[5], 1)
    tl.store(found[5] + 1 + at, row.to(tl.int32))


@triton.jit
def guess_kernel(
    logits, stride, edits, out, found, V, NB, NG, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
    NBP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: any number; each takes queued rows, and guesses where their thresholds lie."""
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    for item in range(tl.program_id(0), tl.load(found[5], cache_modifier=".cg"),
                      tl.num_programs(0)):  # fmt: skip
        row = tl.load(found[5] + 1 + item).to(tl.int64)
        sought = found[4] + row * CAPACITY
        law = tl.load(sought), tl.load(sought + 1), tl.load(sought + 2)
        goal, top, counts = tl.load(sought + 5), tl.load(sought + 6), tl.load(sought + 7) > 0
        a = key_of(law[2])
        b = a
        if counts | (goal < 1):  # else min-p alone: its floor is the threshold
            x = sample_of((logits, stride, row, V, edits), 0, MASKS, ENTRIES)
            unit = tl.maximum(V / SAMPLE, 1.0)
            mass = unit * tl.sum(weight_of(x, law), axis=0)
            if (law[2] == float("-inf")) & (not counts):
                mass = tl.exp2(log2_sum(load_masses(out[0], row, NB, NBP)) - law[0] * law[1])
            low, high = tl.full((), LOWEST, tl.uint32), key_of(top) + 1
            need = needed(counts, goal, mass)
            a, b = guess(x, unit, low, high, mass, mass * 0, need, tl.minimum(NG, LIST), law)
        tl.store(sought + 3, value_of(a))
        tl.store(sought + 4, value_of(b))


@triton.jit
def guess_of(row, found, turn):
    """The keys a and b of a row's first sweep (turn 0), or of the second (1)."""
    guess = found[4] + row * CAPACITY + 3 + turn * 5
    return key_of(tl.load(guess)), key_of(tl.load(guess + 1))


@triton.jit
def swept_twice(row, found):
    """Whether a row had a second sweep, 1 or 0."""
    return tl.load(found[4] + row * CAPACITY + 10).to(tl.int32)


@triton.jit
def _put_second_guess(row, missed, a, b, found):
    """What `guess_of` and `swept_twice` read: computed once, since compilers round differently."""
    guess = found[4] + row * CAPACITY + 8
    tl.store(guess, value_of(a))
    tl.store(guess + 1, value_of(b))
    tl.store(guess + 2, missed.to(tl.float32))


@triton.jit
def _some(keys, most):
    """That many keys, at most `most`."""
    return tl.minimum(tl.clamp(keys, 0.0, 2e9).to(tl.uint32), most)


@triton.jit
def _second_guess(row, found, few):
    """(whether the first sweep missed, keys a and b of the second).

    What is listed between the first keys says how dense the logits are near by, and so how far
    away the threshold is, or where between them if the list overflowed.
    """
    a, b = guess_of(row, found, 0)
    mass, w_a, w_b, count = take_sweep(row, found, 0)
    guess = found[4] + row * CAPACITY
    law = tl.load(guess), tl.load(guess + 1), tl.load(guess + 2)
    need = needed(tl.load(guess + 7) > 0, tl.load(guess + 5), mass)
    end = key_of(tl.load(guess + 6)) + 1
    lowest = tl.full((), LOWEST, tl.uint32)
    missed = (count > 0) & (b > a + 1) & ((w_a < need) | (w_b >= need) | (count > few))
    apart = (b - a).to(tl.float32) / tl.maximum(count, 1)
    aside = few * _ASIDE * apart
    if w_a < need:
        gap = (need - w_a) / tl.maximum(weight_of(value_of(a), law), 1e-30) * apart
        b = a - _some(gap - aside, a - lowest)
        a = b - _some(2 * aside, b - lowest)
    elif w_b >= need:
        gap = (w_b - need) / tl.maximum(weight_of(value_of(b), law), 1e-30) * apart
        a = b + _some(gap - aside, end - b)
        b = a + _some(2 * aside, end - a)
    else:
        middle = b - _some((need - w_b) / (w_a - w_b) * (b - a).to(tl.float32), b - a)
        a, b = middle - _some(aside, middle - a), middle + _some(aside, b - middle)
    return missed, a, b


@triton.jit
def take_sweep(row, found, turn):
    """(W of the row, W(x >= a), W(x >= b), number of logits in [a, b)) of a sweep."""
    sums = _sums(row, found, turn)
    w_all = tl.load(sums, cache_modifier=".cg").to(tl.float32) / FIXED
    w_a = tl.load(sums + 1, cache_modifier=".cg").to(tl.float32) / FIXED
    w_b = tl.load(sums + 2, cache_modifier=".cg").to(tl.float32) / FIXED
    count = tl.load(sums + 3, cache_modifier=".cg").to(tl.int32)
    return w_all, w_a, w_b, count


@triton.jit
def _sums(row, found, turn):
    """Where a sweep's sums are: three in units of 1 / FIXED, and the number of listed logits."""
    return (found[3] + row * CAPACITY).to(tl.pointer_type(tl.int64)) + 4 * turn


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
    source, j, a, b, out, found, NB, NG, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """Add a block to its row's sums, and list what lies between the keys."""
    logits, stride, row, V, edits = source
    x = load_span(logits, stride, row, j * BLOCK, V, edits, BLOCK, MASKS, ENTRIES, "evict_first")
    guess = found[4] + row * CAPACITY
    law = tl.load(guess), tl.load(guess + 1), tl.load(guess + 2)
    lowest, highest = value_of(a), value_of(b)
    weight = weight_of(x, law)
    w_all = tl.sum(weight, axis=0)
    w_a = tl.sum(tl.where(x >= lowest, weight, 0.0), axis=0)
    w_b = tl.sum(tl.where(x >= highest, weight, 0.0), axis=0)
    tl.store(out[0] + row * NB + j, w_b)
    i = tl.arange(0, 4)
    sums = (tl.where(i == 0, w_all, tl.where(i == 1, w_a, w_b)) * FIXED).to(tl.int64)
    tl.atomic_add(_sums(row, found, TURN) + i, sums, mask=i < 3, sem="relaxed")
    number = tl.sum(((x >= lowest) & (x < highest)).to(tl.int32), axis=0)
    start, few = number * 0, tl.minimum(NG, LIST)
    if number > 0:
        before = tl.atomic_add(_sums(row, found, TURN) + 3, number.to(tl.int64), sem="relaxed")
        start = before.to(tl.int32)
        room = out[2] + row * NG
        _list_block(source, j * BLOCK, lowest, highest, start, few, room, MASKS, ENTRIES)
    tl.store(out[1] + row * NB + j, packed(start, number, few))


@triton.jit
def sweep_kernel(
    logits, stride, edits, out, found, V, NB, NG, parts, MASKS: tl.constexpr,
    ENTRIES: tl.constexpr, TURN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: any number; each takes parts of queued rows until none is left.

    TURN: 0 for all of them, 1 for those where the first sweep missed.
    """
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    items = tl.load(found[5], cache_modifier=".cg") * parts
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.load(found[5] + 1 + item // parts).to(tl.int64)
        source, end = (logits, stride, row, V, edits), NB
        a, b = guess_of(row, found, 0)
        if TURN:
            missed, a, b = _second_guess(row, found, tl.minimum(NG, LIST))
            end = tl.where(missed, NB, 0)
            if item % parts == 0:
                _put_second_guess(row, missed, a, b, found)
        for j in range(item % parts, end, parts):
            _sweep_block(source, j, a, b, out, found, NB, NG, MASKS, ENTRIES, TURN)
