"""Thresholds of rows that a short list cannot decide: wide nuclei, large k, many ties.

A program has a row to itself, so that each pass over it is a chain of latencies: what counts is the
number of passes, and that a span is loaded while the one before it is worked on. The largest t
whose weight W(x >= t) reaches `need` is sought so:

1. `_guess`: two keys a < b with the threshold between them, from a sample of the row, as narrow as
   its spread allows and no further apart than the list has room.
2. `_sweep`: one pass measures W at a and at b, lists what lies between them, and writes each
   block's mass of what is at least b, kept whatever the threshold turns out to be.
3. If the guess was right, the threshold is found in the list, and what the list adds to the masses
   is added. That is one pass for most rows of 151 936 normal logits, two for nearly all others.
   Else what was learned bounds the next guess; a list that overflowed is its sample. A value that
   would fill the list by itself is bracketed alone (b is the next key). After _GUESSES the keys
   between the bounds are halved, so that it ends whatever the row.

Flat noise takes a pass of its own, which writes masses and best scores as the scan does.

Weights are relative to the row's maximum, and so are the masses until they are complete: a block
that underflows next to it has no part in any draw, since top-p drops it, min-p drops what is below
2^-126, and under flat noise the masses say no more than whether a row is empty.

Shapes: N rows, V vocabulary, NB blocks, NG groups of a row (the room of the list).
Tuples: source = (logits, stride, row, V, edits), law = (maximum, scale, floor).
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.filters import (
    DENSE,
    UNDECIDED,
    key_of,
    min_p_floor,
    value_of,
)
from foretoken.ops.backends.triton.noise import LOG2E, gumbel_span
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    first_row,
    is_flat,
    let_next_start,
    load_at,
    load_masses,
    load_span,
    log2_sum,
    log2_sum_rows,
    wait_for_writes,
)
from foretoken.ops.backends.triton.scan import flat_noise

WARPS = 4
REGISTERS = 168  # per thread: three programs of four warps fit a multiprocessor
_LANES = tl.constexpr(32 * WARPS)
_SPAN = tl.constexpr(2048)
_SAMPLE = tl.constexpr(4096)
_CHUNK = tl.constexpr(8)  # neighbours in the sample: memory is read by sectors
_LIST = tl.constexpr(4096)  # most entries of a list, if NG is larger
_SPREAD = tl.constexpr(3.0)  # standard deviations on either side of a guess
_FILL = tl.constexpr(0.9)  # of the list's room, by the sample, between two guesses
_GUESSES = tl.constexpr(6)
_LISTED_AT_ONCE = tl.constexpr(8)
LOWEST = tl.constexpr(0x00800000)  # the key of the lowest finite float


@triton.jit
def _weight(x, law, MASS: tl.constexpr):
    """What an element counts: its mass relative to the row's maximum, or 1."""
    if MASS:
        return tl.where(x >= law[2], tl.exp2((x - law[0]) * law[1]), 0.0)
    else:
        return tl.where(x > float("-inf"), 1.0, 0.0)


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
def _bisect(key, weight, low, high, need, step):
    """The largest t in [low, high) such that the weight of keys >= t reaches `need`, else low.

    To less than `step` below it: 1 is exact.
    """
    while high - low > step:
        middle = low + ((high - low) >> 1)
        if tl.sum(tl.where(key >= middle, weight, 0.0), axis=0) >= need:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _sample(source, MASKS: tl.constexpr, ENTRIES: tl.constexpr):
    """_SAMPLE logits in chunks spread over the row; -inf if it has fewer."""
    logits, stride, row, V, edits = source
    i = tl.arange(0, _SAMPLE)
    apart = tl.maximum(V // (_SAMPLE // _CHUNK), _CHUNK)
    off = i // _CHUNK * apart + i % _CHUNK
    return load_at(logits, stride, row, off, off < V, V, edits, MASKS, ENTRIES)


@triton.jit
def _guess(x, unit, low, high, w_low, w_high, need, few, law, MASS: tl.constexpr):
    """Keys a < b in [low, high], the threshold probably between them, from a sample x of the row.

    W(low) = w_low and W(high) = w_high are known, so that W(t) can be summed from either end: of
    the sample above t, or of that below it. The best mix of both weighs them by their variances: a
    few heavy logits, sampled or not, do not blur a threshold far below them. unit: logits that a
    sampled one stands for.
    """
    a, b = low, high
    key = key_of(x)
    weight = tl.where((key >= low) & (key < high), _weight(x, law, MASS), 0.0)
    sampled = tl.sum(weight, axis=0)
    if sampled > 0:
        one = tl.where(weight > 0, 1.0, 0.0)
        first = tl.min(tl.where(weight > 0, key, high), axis=0)
        last = tl.max(tl.where(weight > 0, key, low), axis=0) + 1
        step = tl.maximum((last - first) >> 18, 1)
        mass = w_low - w_high
        t = _bisect(key, weight, first, last, sampled * (need - w_high) / mass, step)
        above = tl.sum(tl.where(key >= t, weight * weight, 0.0), axis=0)
        below = tl.sum(weight * weight, axis=0) - above
        both = tl.maximum(above + below, 1e-37)
        wanted = (need - w_high) / unit + above / both * (sampled - mass / unit)
        t = _bisect(key, weight, first, last, wanted, step)
        t = tl.min(tl.where((weight > 0) & (key >= t), key, last), axis=0)
        near = tl.maximum(_weight(value_of(t), law, MASS), 1e-18)
        ties = tl.sum(tl.where(key == t, one, 0.0), axis=0)
        count = tl.sum(tl.where(key > t, one, 0.0), axis=0)
        aside = tl.sqrt(above * tl.maximum(below, 0.0) / both / (near * near) + 1) * _SPREAD
        most = (few * _FILL / unit - ties) / 2
        aside = tl.minimum(aside, most)
        if most < 0:
            a, b = t, t + 1
        else:
            if count + ties + aside < tl.sum(one, axis=0):
                a = _bisect(key, one, first, last, count + ties + aside, step)
            if count - aside >= 1:
                b = tl.minimum(_bisect(key, one, first, last, count - aside, step) + step, high)
    return a, b


@triton.jit
def _sweep(
    source, law, a, b, few, out, NB, NG, MASS: tl.constexpr, MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """One pass: (W of the row, W(x >= a), W(x >= b), number of logits in [a, b)).

    Leaves the first `few` of those in the room, by rising id, their number per block as the block's
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
        x = tl.reshape(ahead, shape)
        ahead = _span(source, first + _SPAN, MASKS, ENTRIES)
        weight = _weight(x, law, MASS)
        w_all += tl.sum(weight, axis=1)
        w_a += tl.sum(tl.where(x >= lowest, weight, 0.0), axis=1)
        sure = tl.sum(tl.where(x >= highest, weight, 0.0), axis=1)
        w_b += sure
        listed = (x >= lowest).to(tl.int32) - (x >= highest).to(tl.int32)
        mine = tl.sum(listed, axis=1)
        number = tl.sum(mine, axis=1)
        start = count + tl.cumsum(number, axis=0) - number
        before = start[:, None] + tl.cumsum(mine, axis=1) - mine
        rank = before[:, None, :] + tl.cumsum(listed, axis=1) - 1
        tl.store(room + rank, x, mask=(listed > 0) & (rank < few))
        count += tl.sum(number, axis=0)
        mass = tl.sum(sure, axis=1)
        for p in tl.static_range(per):
            j = first // BLOCK + p
            if j < NB:
                own = tl.arange(0, per) == p
                to = row * NB + j
                tl.store(out[1] + to, tl.sum(tl.where(own, number, 0), axis=0).to(tl.float32))
                if MASS:
                    tl.store(out[0] + to, tl.sum(tl.where(own, mass, 0.0), axis=0))
    tl.debug_barrier()
    return _all(w_all), _all(w_a), _all(w_b), count


@triton.jit
def _search(
    source, law, goal, mass, few, out, NB, NG, MASS: tl.constexpr, MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """(the largest t such that W(x >= t) reaches `goal`, the number listed by the last sweep).

    goal: of MASS a share of W of the whole row, which is `mass` (below 0: not known yet). If more
    than `few` were listed, the list and the masses are not those of t.
    """
    low, high = tl.full((), LOWEST, tl.uint32), key_of(law[0]) + 1
    w_low, w_high, need = mass, mass * 0, mass * 0
    count, passes = few + 1, few * 0
    inside = passes > 0
    while (count > few) & (high - low > 1):
        a, b = low, low + ((high - low) >> 1)
        if passes < _GUESSES:
            unit = tl.maximum(source[3] / _SAMPLE, 1.0)
            if inside:
                i = tl.arange(0, _SAMPLE)
                x = tl.load(out[2] + source[2] * NG + i, mask=i < few, other=float("-inf"),
                            cache_modifier=".cg")  # fmt: skip
                unit = count / tl.minimum(few, _SAMPLE).to(tl.float32)
            else:
                x = _sample(source, MASKS, ENTRIES)
            if w_low < 0:
                w_low = unit * tl.sum(_weight(x, law, MASS), axis=0)
                mass = w_low
            need = tl.maximum(goal * mass, 1e-30) if MASS else goal
            a, b = _guess(x, unit, low, high, w_low, w_high, need, few, law, MASS)
        mass, w_a, w_b, count = _sweep(source, law, a, b, few, out, NB, NG, MASS, MASKS, ENTRIES)
        need = tl.maximum(goal * mass, 1e-30) if MASS else goal
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
        count = tl.where(inside, count, few + 1)
    if count <= few:
        i = tl.arange(0, _LIST)
        room = out[2] + source[2] * NG
        x = tl.load(room + i, mask=i < count, other=float("-inf"), cache_modifier=".cg")
        weight = tl.where(i < count, _weight(x, law, MASS), 0.0)
        low = _bisect(key_of(x), weight, low, high, need - w_high, 1)
    return value_of(low), count


@triton.jit
def _add_listed(row, law, threshold, out, NB, NG, NBP: tl.constexpr):
    """Complete the masses that a sweep wrote by the listed logits >= threshold, in log2."""
    j = tl.arange(0, NBP)
    mass = tl.load(out[0] + row * NB + j, mask=j < NB, other=0.0)
    number = tl.load(out[1] + row * NB + j, mask=j < NB, other=0.0).to(tl.int32)
    start = tl.cumsum(number, axis=0) - number
    for c in range(0, tl.max(number, axis=0), _LISTED_AT_ONCE):
        i = (c + tl.arange(0, _LISTED_AT_ONCE))[None, :]
        at = out[2] + row * NG + start[:, None] + i
        use = i < number[:, None]
        x = tl.load(at, mask=use, other=float("-inf"), cache_modifier=".cg")
        mass += tl.sum(tl.where(x >= threshold, tl.exp2((x - law[0]) * law[1]), 0.0), axis=1)
    tl.store(out[0] + row * NB + j, law[0] * law[1] + tl.log2(mass), mask=j < NB)


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
    source, few = (logits, stride, row, V, edits), tl.minimum(NG, _LIST)
    count = few + 1
    mass = top * 0 - 1
    if (k > 0) & (k < V):
        kth, _ = _search(source, (top, scale, threshold), k.to(tl.float32), mass, few, out, NB, NG,
                         False, MASKS, ENTRIES)  # fmt: skip
        threshold = tl.maximum(threshold, kth)
    if top_p < 1:
        if threshold == float("-inf"):
            mass = tl.exp2(log2_sum(load_masses(out[0], row, NB, NBP)) - top * scale)
        nucleus, count = _search(source, (top, scale, threshold), top_p, mass, few, out, NB, NG,
                                 True, MASKS, ENTRIES)  # fmt: skip
        threshold = tl.maximum(threshold, nucleus)
    law = (top, scale, threshold)
    if is_flat(state, slot, V):
        at = flat_noise(state, slot, position_ptr, index_ptr, b, i, token_stream, DRAFT)
        _score(source, law, threshold, at, out, NB, MASKS, ENTRIES, FP64)
    else:
        if count > few:
            key = key_of(threshold)
            _sweep(source, law, key, key, few, out, NB, NG, True, MASKS, ENTRIES)
        _add_listed(row, law, threshold, out, NB, NG, NBP)
    tl.debug_barrier()
    tl.store(found[0] + row, threshold)
    tl.store(found[1] + row, log2_sum(load_masses(out[0], row, NB, NBP)))
    tl.store(found[2] + row, DENSE)
