"""The search for the threshold of a row that a short list cannot decide, and its first passes.

The threshold is the largest t such that W(x >= t), the weight of all logits >= t, reaches the
weight that is needed. For top-k every finite logit weighs 1. For top-p a logit that reaches min-p's
floor weighs its mass, relative to that of the row's maximum. Thresholds are handled as *keys*,
integers in the order of logits (`rows.py: key_of`). A guess is two keys a < b that probably have
the threshold between them.

The filters queue such a row, and `guess_kernel` guesses its keys. The first sweep, spread over the
whole GPU, measures W(x >= a) and W(x >= b), lists the logits in [a, b), and writes each block's
weight W(x >= b), which stays valid wherever in [a, b) the threshold is. Programs of one warp take
blocks of queued rows one by one: no barrier between warps. If the guess was wrong or too wide, a
second sweep does the same with keys that follow from the results of the first; `wide.py` continues
from there (decision 010).

Blocks take stretches of the row's list in any order. No result depends on the order: weights are
summed as integers of 2^-40 (`FIXED`; the largest weight is 1), and listed logits are added to a
block's mass in the order of ids.

A queued row has no short list. Until `wide_kernel` has ended, that memory holds notes:

    list_x_NC   0-5  the `Search`: maximum, scale, floor, counted, goal, top
                6-9  the logits of a and b of its first guess, then of its second
                10   1.0 if the first sweep missed
    list_id_NC  as int64, for each of two sweeps: W of the row, W(x >= a), W(x >= b) in units of
                1 / FIXED, and the number of logits in [a, b)

The memory of the row's `group_top_NG` holds the list of a search (`list_of`).
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.records import Batch, Filtered, RawRows

from foretoken.ops.backends.triton.rows import (  # isort: skip
    BLOCK, CAPACITY, FIXED, key_of, let_next_start, load_at, load_blocks, load_span, log2_sum,
    value_of, wait_for_writes, zero_like,
)  # fmt: skip

GUESS_PROGRAMS = 132 * 2  # upper bound; programs loop. An H200 has 132 multiprocessors
SWEEP_PROGRAMS = 132 * 20  # upper bound; programs loop
SECOND_PARTS = 16  # parts of a row in the second sweep, which skips most rows
SAMPLE = tl.constexpr(4096)  # logits of a sample
LIST = tl.constexpr(4096)  # upper bound of the entries of a list
LOWEST = tl.constexpr(0x00800000)  # the key of the lowest finite float
GUESSES = tl.constexpr(6)  # passes over a row before its bracket is halved instead
MISSED_NOTE = tl.constexpr(10)  # the place of the note on whether the first sweep missed
_NEIGHBOURS = tl.constexpr(8)  # adjacent logits of a sample: memory is read by sectors
_DEVIATIONS = tl.constexpr(3.0)  # standard deviations on either side of a guess
_FILL = tl.constexpr(0.9)  # share of the list's room that a guess should fill, by the sample
_LOAD_WIDTH = tl.constexpr(256)  # logits of one load in `_list_block`: more need registers
_MARGIN = tl.constexpr(0.45)  # share of the list's room on either side of a second guess
_LENGTH_BASE = tl.constexpr(2048)  # above the length of a stretch, which is at most 1024

Weighting = namedtuple("Weighting", "maximum scale floor")
"""The weight of a logit x: 2^((x - maximum) scale) if x reaches the floor, else 0.

For top-k, maximum and scale are 0 and the floor is the lowest finite float: all weights are 1.
"""

Search = namedtuple("Search", "weighting counted goal top")
"""The search for a row's threshold of top-k if `counted`, else of top-p.

goal: k, or the share top_p of the row's weight; top: the row's maximum
"""

Guess = namedtuple("Guess", "a b")
"""Keys a <= b; the threshold is probably in [a, b)."""

Bracket = namedtuple("Bracket", "low high w_low w_high")
"""Keys with the threshold surely in [low, high); w_low, w_high: W(x >= low), W(x >= high)."""


@triton.jit
def guess_kernel(batch: Batch, NBP: tl.constexpr, OVERLAP: tl.constexpr):
    """Guess where the thresholds of queued rows lie, with any number of programs."""
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows, filtered = batch.rows, batch.scratch.filtered
    queued = tl.load(filtered.queue_N1, cache_modifier=".cg")
    for item in range(tl.program_id(0), queued, tl.num_programs(0)):
        row = tl.load(filtered.queue_N1 + 1 + item).to(tl.int64)
        search = load_search(filtered, row)
        weighting = search.weighting
        floor = key_of(weighting.floor)
        guess = Guess(floor, floor)
        if search.counted | (search.goal < 1):  # else only min-p: its floor is the threshold
            x = load_sample(rows, row, 0)
            unit = tl.maximum(rows.V / SAMPLE, 1.0)
            mass = unit * tl.sum(weight_of(x, weighting), axis=0)
            if (weighting.floor == float("-inf")) & (not search.counted):
                masses = load_blocks(batch.scratch.mass_NJ, row, rows.NB, NBP)
                mass = tl.exp2(log2_sum(masses) - weighting.maximum * weighting.scale)
            low, high = tl.full((), LOWEST, tl.uint32), key_of(search.top) + 1
            bracket, need = Bracket(low, high, mass, zero_like(mass)), needed(search, mass)
            guess = guess_from(x, unit, bracket, need, room_for_list(rows), weighting)
        store_guess(filtered, row, 0, guess)


@triton.jit
def search_for(counted, goal, top, scale, floor):
    """The `Search` for the threshold of top-k (`counted`) or of top-p."""
    zero = tl.full((), 0.0, tl.float32)
    floor = tl.where(counted, value_of(tl.full((), LOWEST, tl.uint32)), floor)
    weighting = Weighting(tl.where(counted, zero, top), tl.where(counted, zero, scale), floor)
    return Search(weighting, counted, goal, top)


@triton.jit
def weight_of(x, weighting: Weighting):
    """The weight of a logit; 0 if it is -inf."""
    weight = tl.exp2((x - weighting.maximum) * weighting.scale)
    return tl.where(x >= weighting.floor, weight, 0.0)


@triton.jit
def needed(search: Search, mass):
    """The weight that W(x >= t) must reach, in a row of weight `mass`."""
    return tl.where(search.counted, search.goal, tl.maximum(search.goal * mass, 1e-30))


@triton.jit
def queue_row(filtered: Filtered, row, search: Search):
    """Queue a row, note its search, and set the sums of its two sweeps to 0."""
    notes = notes_of(filtered, row)
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
def notes_of(filtered: Filtered, row):
    """The address of a queued row's notes."""
    return filtered.list_x_NC + row * CAPACITY


@triton.jit
def load_search(filtered: Filtered, row):
    """The `Search` that `queue_row` noted."""
    notes = notes_of(filtered, row)
    weighting = Weighting(tl.load(notes), tl.load(notes + 1), tl.load(notes + 2))
    return Search(weighting, tl.load(notes + 3) > 0, tl.load(notes + 4), tl.load(notes + 5))


@triton.jit
def store_guess(filtered: Filtered, row, turn, guess: Guess):
    """Note the guess of a row's first sweep (turn 0) or of its second sweep (turn 1)."""
    notes = notes_of(filtered, row) + 6 + 2 * turn
    tl.store(notes, value_of(guess.a))
    tl.store(notes + 1, value_of(guess.b))


@triton.jit
def load_guess(filtered: Filtered, row, turn):
    """The `Guess` that `store_guess` noted."""
    notes = notes_of(filtered, row) + 6 + 2 * turn
    return Guess(key_of(tl.load(notes)), key_of(tl.load(notes + 1)))


@triton.jit
def list_of(batch: Batch, row):
    """The address of the list of a queued row's search, in place of the maxima of its groups."""
    return batch.scratch.filtered.group_top_NG + row * batch.rows.NG


@triton.jit
def room_for_list(rows: RawRows):
    """How many logits the list of a row can hold."""
    return tl.minimum(rows.NG, LIST)


@triton.jit
def load_sample(rows: RawRows, row, turn):
    """SAMPLE logits, in groups spread over a row; each turn takes other groups. -inf past V."""
    i = tl.arange(0, SAMPLE)
    distance = tl.maximum(rows.V // (SAMPLE // _NEIGHBOURS), _NEIGHBOURS)
    shift = (distance - _NEIGHBOURS) * turn // GUESSES
    off = i // _NEIGHBOURS * distance + i % _NEIGHBOURS + shift
    return load_at(rows, row, off, off < rows.V)


@triton.jit
def guess_from(x, unit, bracket: Bracket, need, room, weighting: Weighting):
    """The `Guess` inside a bracket that follows from a sample x of its row.

    W is known at both ends of the bracket, so W(x >= t) can be estimated from either end: by the
    sample above t, or by the sample below it. The best mix weighs them by their variances, so that
    a few heavy logits, sampled or not, do not blur a threshold far below them.

    unit: logits of the row per sampled logit. room: how many logits the list can hold.
    """
    low, high = bracket.low, bracket.high
    a, b = low, high
    key = key_of(x)
    weight = tl.where((key >= low) & (key < high), weight_of(x, weighting), 0.0)
    sampled = tl.sum(weight, axis=0)
    if sampled > 0:
        ones = tl.where(weight > 0, 1.0, 0.0)
        first = tl.min(tl.where(weight > 0, key, high), axis=0)
        last = tl.max(tl.where(weight > 0, key, low), axis=0) + 1
        step = tl.maximum((last - first) >> 18, 1)
        mass = bracket.w_low - bracket.w_high
        t = bisect(key, weight, first, last, sampled * (need - bracket.w_high) / mass, step)
        above = tl.sum(tl.where(key >= t, weight * weight, 0.0), axis=0)
        below = tl.sum(weight * weight, axis=0) - above
        both = tl.maximum(above + below, 1e-37)
        sampled_need = (need - bracket.w_high) / unit + above / both * (sampled - mass / unit)
        t = bisect(key, weight, first, last, sampled_need, step)
        t = tl.min(tl.where((weight > 0) & (key >= t), key, last), axis=0)
        weight_at_t = tl.maximum(weight_of(value_of(t), weighting), 1e-18)
        ties = tl.sum(tl.where(key == t, ones, 0.0), axis=0)
        count = tl.sum(tl.where(key > t, ones, 0.0), axis=0)
        # The margin is a number of sampled logits on either side of t.
        variance = above * tl.maximum(below, 0.0) / both / (weight_at_t * weight_at_t)
        margin = tl.sqrt(variance + 1) * _DEVIATIONS
        largest_margin = (room * _FILL / unit - ties) / 2
        margin = tl.minimum(margin, largest_margin)
        if largest_margin < 0:
            a, b = t, t + 1
        else:
            if count + ties + margin < tl.sum(ones, axis=0):
                a = bisect(key, ones, first, last, count + ties + margin, step)
            if count - margin >= 1:
                b = tl.minimum(bisect(key, ones, first, last, count - margin, step) + step, high)
    return Guess(a, b)


@triton.jit
def bisect(key, weight, low, high, need, step):
    """The largest t in [low, high) such that the weight of keys >= t reaches `need`; else low.
    The result can be up to step - 1 less than t: a step of 1 is exact."""
    while high - low > step:
        middle = low + ((high - low) >> 1)
        if tl.sum(tl.where(key >= middle, weight, tl.zeros_like(weight)), axis=0) >= need:
            low = middle
        else:
            high = middle
    return low


Swept = namedtuple("Swept", "whole from_a from_b listed")
"""Results of a sweep: W of the row, W(x >= a), W(x >= b), the number of logits in [a, b)."""


@triton.jit
def sweep_kernel(batch: Batch, parts, TURN: tl.constexpr, OVERLAP: tl.constexpr):
    """Sweep the parts of queued rows, with any number of programs.
    parts: number of parts of a row; part n takes blocks n, n + parts, ... TURN: 0 sweeps all queued
    rows, 1 those in which the first sweep missed the threshold."""
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows, filtered = batch.rows, batch.scratch.filtered
    items = tl.load(filtered.queue_N1, cache_modifier=".cg") * parts
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = tl.load(filtered.queue_N1 + 1 + item // parts).to(tl.int64)
        guess, end = load_guess(filtered, row, 0), rows.NB
        if TURN:
            missed, guess = _second_guess(filtered, row, guess, room_for_list(rows))
            end = tl.where(missed, rows.NB, 0)
            if item % parts == 0:  # for `wide.py`, which might round the guess differently
                store_guess(filtered, row, 1, guess)
                tl.store(notes_of(filtered, row) + MISSED_NOTE, missed.to(tl.float32))
        for j in range(item % parts, end, parts):
            _sweep_block(batch, row, j, guess, TURN)


@triton.jit
def _second_guess(filtered: Filtered, row, first: Guess, room):
    """(`missed`: whether the row needs a second sweep, the guess of that sweep).
    A row needs it if the threshold is not in [a, b) or the list overflowed, unless no logit was
    listed or [a, b) is one key. The number of listed logits tells how dense logits are near a and
    b, and so where the threshold probably is."""
    a, b = first.a, first.b
    search, swept = load_search(filtered, row), load_sweep(filtered, row, 0)
    weighting, need = search.weighting, needed(search, swept.whole)
    too_high, too_low = swept.from_a < need, swept.from_b >= need
    missed = (swept.listed > 0) & (b > a + 1) & (too_high | too_low | (swept.listed > room))
    lowest, end = tl.full((), LOWEST, tl.uint32), key_of(search.top) + 1
    spacing = (b - a).to(tl.float32) / tl.maximum(swept.listed, 1)  # keys between listed logits
    margin = room * _MARGIN * spacing  # keys on either side of where the threshold should be
    if too_high:
        gap = (need - swept.from_a) / tl.maximum(weight_of(value_of(a), weighting), 1e-30) * spacing
        b = a - _num_keys(gap - margin, a - lowest)
        a = b - _num_keys(2 * margin, b - lowest)
    elif too_low:
        gap = (swept.from_b - need) / tl.maximum(weight_of(value_of(b), weighting), 1e-30) * spacing
        a = b + _num_keys(gap - margin, end - b)
        b = a + _num_keys(2 * margin, end - a)
    else:
        share = (need - swept.from_b) / (swept.from_a - swept.from_b)
        middle = b - _num_keys(share * (b - a).to(tl.float32), b - a)
        a, b = middle - _num_keys(margin, middle - a), middle + _num_keys(margin, b - middle)
    return missed, Guess(a, b)


@triton.jit
def _num_keys(keys, limit):
    """A float number of keys as an integer in 0..limit."""
    return tl.minimum(tl.clamp(keys, 0.0, 2e9).to(tl.uint32), limit)


@triton.jit
def _sweep_block(batch: Batch, row, j, guess: Guess, TURN: tl.constexpr):
    """Add a block to its row's sums, list its logits in [a, b), and store its W(x >= b)."""
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
    length = tl.sum(((x >= lowest) & (x < highest)).to(tl.int32), axis=0)
    start, room = zero_like(length), room_for_list(rows)
    if length > 0:
        start = tl.atomic_add(sums + 3, length.to(tl.int64), sem="relaxed").to(tl.int32)
        _list_block(rows, row, j * BLOCK, lowest, highest, list_of(batch, row), start, room)
    tl.store(scratch.best_NJ + row * rows.NB + j, pack_stretch(start, length, room))


@triton.jit
def _list_block(rows: RawRows, row, first, lowest, highest, list_, start, room):
    """Write a block's logits in [lowest, highest) to the list from `start` on, by rising id."""
    for begin in range(first, first + BLOCK, _LOAD_WIDTH):
        x = load_span(rows, row, begin, _LOAD_WIDTH, "evict_first")
        listed = ((x >= lowest) & (x < highest)).to(tl.int32)
        rank = start + tl.cumsum(listed, axis=0) - 1
        tl.store(list_ + rank, x, mask=(listed > 0) & (rank < room))
        start += tl.sum(listed, axis=0)


@triton.jit
def pack_stretch(start, length, room):
    """A block's stretch of the list as one float32, exact: an integer up to 2^24."""
    return (tl.minimum(start, room) * _LENGTH_BASE + length).to(tl.float32)


@triton.jit
def unpack_stretch(stretch):
    """(start, length) of a block's stretch of the list."""
    both = stretch.to(tl.int32)
    return both // _LENGTH_BASE, both % _LENGTH_BASE


@triton.jit
def _sums(filtered: Filtered, row, turn):
    return (filtered.list_id_NC + row * CAPACITY).to(tl.pointer_type(tl.int64)) + 4 * turn


@triton.jit
def load_sweep(filtered: Filtered, row, turn):
    """The `Swept` of a row's first sweep (turn 0) or second sweep (turn 1)."""
    sums = _sums(filtered, row, turn)
    whole = tl.load(sums, cache_modifier=".cg").to(tl.float32) / FIXED
    from_a = tl.load(sums + 1, cache_modifier=".cg").to(tl.float32) / FIXED
    from_b = tl.load(sums + 2, cache_modifier=".cg").to(tl.float32) / FIXED
    return Swept(whole, from_a, from_b, tl.load(sums + 3, cache_modifier=".cg").to(tl.int32))
