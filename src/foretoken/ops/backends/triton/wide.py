"""Thresholds of rows that a short list cannot decide: wide nuclei, large k, many ties.

The largest t whose weight W(x >= t) reaches `need` is sought so:

1. `guess.py`: two keys a < b with the threshold between them, from a sample of the row, as narrow
   as its spread allows and no further apart than the list has room.
2. A pass measures W at a and at b, lists what lies between them, and writes each block's mass of
   what is at least b, kept whatever the threshold turns out to be. The first pass, and a second
   where it missed, are launches of their own over all multiprocessors (`sweep.py`); here a
   program has a row to itself.
3. If the guess was right, the threshold is found in the list, and what the list adds to the masses
   is added: one pass for most rows of 151 936 normal logits, two for nearly all others. Else what
   was learned bounds the next guess; a list that overflowed is its sample (but not that of
   `sweep.py`, whose order is that of arrival). A value that would fill the list by itself is
   bracketed alone (b is the next key). After GUESSES the keys between the bounds are halved, so
   that it ends whatever the row.

A pass by one program is a chain of latencies: what counts is their number, and that a span is
loaded while the one before it is worked on. Flat noise takes a pass of its own, which writes masses
and best scores as the scan does.

Weights are relative to the row's maximum, and so are the masses until they are complete: a block
that underflows next to it has no part in any draw, since top-p drops it, min-p drops what is below
2^-126, and under flat noise the masses say no more than whether a row is empty.

Shapes: N rows, V vocabulary, NB blocks, NG groups of a row (the room of the list).
Tuples: source = (logits, stride, row, V, edits), law = (maximum, scale, floor).
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.filters import DENSE, UNDECIDED, min_p_floor
from foretoken.ops.backends.triton.guess import (
    GUESSES,
    LIST,
    LOWEST,
    SAMPLE,
    bisect,
    guess,
    law_of,
    needed,
    sample_of,
    weight_of,
)
from foretoken.ops.backends.triton.noise import LOG2E, gumbel_span, log2
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    FIXED,
    first_row,
    is_flat,
    key_of,
    let_next_start,
    load_masses,
    load_span,
    log2_sum,
    log2_sum_rows,
    value_of,
    wait_for_writes,
)
from foretoken.ops.backends.triton.scan import flat_noise
from foretoken.ops.backends.triton.sweep import (
    guess_of,
    packed,
    swept_twice,
    take_sweep,
    unpacked,
)

WARPS = 4
REGISTERS = 168  # per thread: three programs of four warps fit a multiprocessor
_LANES = tl.constexpr(32 * WARPS)
_SPAN = tl.constexpr(2048)
_LISTED_AT_ONCE = tl.constexpr(8)


@triton.jit
def _span(source, first, MASKS: tl.constexpr, ENTRIES: tl.constexpr):
    """Logits first..first + _SPAN - 1; of the row's last span, if that is behind it."""
    logits, stride, row, V, edits = source
    last = (V - 1) // _SPAN * _SPAN
    first = tl.minimum(first, last)
    return load_span(logits, stride, row, first, V, edits, _SPAN, MASKS, ENTRIES, "evict_last")


@triton.jit
def _all(x):
    """The sum of a matrix."""
    return tl.sum(tl.sum(x, axis=0), axis=0)


@triton.jit
def _sweep(
    source, law, a, b, few, out, NB, NG, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """One pass: (W of the row, W(x >= a), W(x >= b), number of logits in [a, b)).

    Leaves the first `few` of those in the room, block by block, each block's stretch of them as its
    best score, and as its mass the W of what is at least b.
    """
    row, V = source[2], source[3]
    lowest, highest = value_of(a), value_of(b)
    per: tl.constexpr = _SPAN // BLOCK
    shape: tl.constexpr = (per, BLOCK // _LANES, _LANES)
    w_all = tl.zeros((per, _LANES), tl.float32)
    w_a, w_b = tl.zeros((per, _LANES), tl.float32), tl.zeros((per, _LANES), tl.float32)
    count = tl.full((), 0, tl.int32)
    room = out[2] + row * NG
    tl.debug_barrier()  # the room may have been a sample
    ahead = _span(source, 0, MASKS, ENTRIES)
    for first in range(0, V, _SPAN):
        span = ahead
        x = tl.reshape(span, shape)
        ahead = _span(source, first + _SPAN, MASKS, ENTRIES)
        weight = weight_of(x, law)
        w_all += tl.sum(weight, axis=1)
        w_a += tl.sum(tl.where(x >= lowest, weight, 0.0), axis=1)
        sure = tl.sum(tl.where(x >= highest, weight, 0.0), axis=1)
        w_b += sure
        listed = (x >= lowest).to(tl.int32) - (x >= highest).to(tl.int32)
        mine = tl.sum(listed, axis=1)
        number = tl.sum(mine, axis=1)
        start = count + tl.cumsum(number, axis=0) - number
        stretch = packed(start, number, few)
        before = start[:, None] + tl.cumsum(mine, axis=1) - mine
        rank = tl.reshape(before[:, None, :] + tl.cumsum(listed, axis=1) - 1, (_SPAN,))
        # flat again: a store of three dimensions is brought into another layout, by 16 KiB
        tl.store(room + rank, span, mask=(tl.reshape(listed, (_SPAN,)) > 0) & (rank < few))
        count += tl.sum(number, axis=0)
        mass = tl.sum(sure, axis=1)
        for p in tl.static_range(per):
            j = first // BLOCK + p
            if j < NB:
                own = tl.arange(0, per) == p
                to = row * NB + j
                tl.store(out[0] + to, tl.sum(tl.where(own, mass, 0.0), axis=0))
                tl.store(out[1] + to, tl.sum(tl.where(own, stretch, 0.0), axis=0))
    tl.debug_barrier()
    return _all(w_all), _all(w_a), _all(w_b), count


@triton.jit
def _search(
    source, top, law, counts, goal, mass, swept, few, out, found, NB, NG, MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """(the largest t such that W(x >= t) reaches `goal`, the number listed by the last sweep).

    goal: a share of W of the whole row, which is `mass` (below 0: not known yet), unless it counts.
    swept: whether `sweep.py` made the first sweeps. If more than `few` were listed, the list
    and the masses are not those of t.
    """
    low, high = tl.full((), LOWEST, tl.uint32), key_of(top) + 1
    w_low, w_high, need = mass, mass * 0, mass * 0
    count, passes = few + 1, few * 0
    inside, width, sweeps = passes > 0, few * 0, passes
    if swept:
        sweeps = 1 + swept_twice(source[2], found)
    while (count > few) & (high - low > 1):
        a, b = low, low + ((high - low) >> 1)
        w_a, w_b = mass, mass
        if passes < sweeps:
            a, b = guess_of(source[2], found, passes)
            mass, w_a, w_b, count = take_sweep(source[2], found, passes)
        else:
            if passes < GUESSES:
                unit = tl.maximum(source[3] / SAMPLE, 1.0)
                if inside & (passes > sweeps):
                    i = tl.arange(0, SAMPLE)
                    x = tl.load(out[2] + source[2] * NG + i, mask=i < few, other=float("-inf"),
                                cache_modifier=".cg")  # fmt: skip
                    unit = width / tl.minimum(few, SAMPLE).to(tl.float32)
                else:
                    x = sample_of(source, passes, MASKS, ENTRIES)
                    if inside:
                        hits = (x >= value_of(low)) & (x < value_of(high))
                        hits = tl.sum(hits.to(tl.float32), axis=0)
                        unit = width / tl.maximum(hits, 1.0)
                if w_low < 0:
                    w_low = unit * tl.sum(weight_of(x, law), axis=0)
                    mass = w_low
                need = needed(counts, goal, mass)
                a, b = guess(x, unit, low, high, w_low, w_high, need, few, law)
            mass, w_a, w_b, count = _sweep(source, law, a, b, few, out, NB, NG, MASKS, ENTRIES)
        need = needed(counts, goal, mass)
        w_low = tl.where(low == LOWEST, mass, w_low)
        passes += 1
        inside = (w_a >= need) & (w_b < need)
        if w_a < need:
            high, w_high = a, w_a
        else:
            low, w_low = a, w_a
            if w_b < need:
                high, w_high = b, w_b
            else:
                low, w_low = b, w_b
        width = count
        count = tl.where(inside, count, few + 1)
    if count <= few:
        i = tl.arange(0, LIST)
        room = out[2] + source[2] * NG
        x = tl.load(room + i, mask=i < count, other=float("-inf"), cache_modifier=".cg")
        weight = tl.where(i < count, weight_of(x, law), 0.0)
        weight = (weight * FIXED).to(tl.int64)  # in any order
        left = tl.maximum(((need - w_high) * FIXED).to(tl.int64), 1)
        low = bisect(key_of(x), weight, low, high, left, 1)
    return value_of(low), count


@triton.jit
def _add_listed(row, law, threshold, out, NB, NG, NBP: tl.constexpr):
    """Complete the masses that a sweep wrote by the listed logits >= threshold, in log2."""
    j = tl.arange(0, NBP)
    mass = tl.load(out[0] + row * NB + j, mask=j < NB, other=0.0)
    start, number = unpacked(tl.load(out[1] + row * NB + j, mask=j < NB, other=0.0))
    for c in range(0, tl.max(number, axis=0), _LISTED_AT_ONCE):
        i = (c + tl.arange(0, _LISTED_AT_ONCE))[None, :]
        at = out[2] + row * NG + start[:, None] + i
        use = i < number[:, None]
        x = tl.load(at, mask=use, other=float("-inf"), cache_modifier=".cg")
        mass += tl.sum(tl.where(x >= threshold, tl.exp2((x - law[0]) * law[1]), 0.0), axis=1)
    tl.store(out[0] + row * NB + j, law[0] * law[1] + log2(mass), mask=j < NB)


@triton.jit
def _score(
    source, law, threshold, at, out, NB, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
    FP64: tl.constexpr,
):  # fmt: skip
    """Masses and best scores under flat noise of what reaches the threshold."""
    row, V = source[2], source[3]
    per: tl.constexpr = _SPAN // BLOCK
    ahead = _span(source, 0, MASKS, ENTRIES)
    for first in range(0, V, _SPAN):
        x = ahead
        ahead = _span(source, first + _SPAN, MASKS, ENTRIES)
        weight = tl.where(x >= threshold, x * law[1], float("-inf"))
        j = first // BLOCK + tl.arange(0, per)
        mass = log2_sum_rows(tl.reshape(weight, (per, BLOCK)))
        tl.store(out[0] + row * NB + j, mass, mask=j < NB)
        score = weight + gumbel_span(at, first, _SPAN, FP64)
        best = tl.max(tl.reshape(score, (per, BLOCK)), axis=1).to(tl.float32)
        tl.store(out[1] + row * NB + j, best, mask=j < NB)


@triton.jit(do_not_specialize=["stride"])
def wide_kernel(
    logits, stride, num_ptr, slot_ptr, position_ptr, index_ptr, state, edits, out, found, V, NB, NG,
    token_stream, K1: tl.constexpr, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
    NBP: tl.constexpr, FP64: tl.constexpr, DRAFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, row of it); most have nothing to do. Leaves rows dense.

    The compiler must not know that a stride is a multiple of 16. It would load four neighbours a
    thread, and since it scatters single ones to the list, bring ranks, addresses and values of each
    span into another layout, through shared memory (22 barriers a span instead of 8).
    """
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    pid = tl.program_id(0)
    b, i = pid // K1, pid % K1
    if K1 > 1:
        if i > tl.load(num_ptr + b):
            return
    row = first_row(num_ptr, b, K1 > 1) + i
    if tl.load(found[2] + row) != UNDECIDED:
        return
    slot = tl.load(slot_ptr + b)
    scale = LOG2E / tl.load(state[1] + slot)
    k, top_p = tl.load(state[2] + slot), tl.load(state[3] + slot)
    top = tl.load(found[1] + row)
    threshold = min_p_floor(tl.load(state[4] + slot), top, scale)
    source, few = (logits, stride, row, V, edits), tl.minimum(NG, LIST)
    flat, counts = is_flat(state, slot, V), (k > 0) & (k < V)
    count = few * 0  # of min-p alone nothing is listed; with top-k the noise is flat
    mass = top * 0 - 1
    if counts:
        law = law_of(True, top, scale, threshold)
        kth, _ = _search(source, top, law, True, k.to(tl.float32), mass, True, few, out, found, NB,
                         NG, MASKS, ENTRIES)  # fmt: skip
        threshold = tl.maximum(threshold, kth)
    if top_p < 1:
        law = (top, scale, threshold)
        nucleus, count = _search(source, top, law, False, top_p, mass, not counts, few,
                                 out, found, NB, NG, MASKS, ENTRIES)  # fmt: skip
        threshold = tl.maximum(threshold, nucleus)
    law = (top, scale, threshold)
    if flat:
        at = flat_noise(state, slot, position_ptr, index_ptr, b, i, token_stream, DRAFT)
        _score(source, law, threshold, at, out, NB, MASKS, ENTRIES, FP64)
    else:
        if count > few:
            key = key_of(threshold)
            _sweep(source, law, key, key, few, out, NB, NG, MASKS, ENTRIES)
        _add_listed(row, law, threshold, out, NB, NG, NBP)
    tl.debug_barrier()
    tl.store(found[0] + row, threshold)
    tl.store(found[1] + row, log2_sum(load_masses(out[0], row, NB, NBP)))
    tl.store(found[2] + row, DENSE)
