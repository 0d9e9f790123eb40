"""Thresholds of rows that a short list cannot decide: wide nuclei, large k, many ties.

One program per row starts from the results of one or two sweeps by `sweep.py`. If the threshold is
between a guess's keys and the list had room for all logits there, the threshold is found in the
list, and the listed logits that are kept complete the masses. That takes one pass for most rows of
151 936 normal logits, two for nearly all others. Otherwise the results bound the next guess, for
which the program sweeps the row. A list that overflowed is the sample for this guess (except a list
of `sweep.py`, which is in order of arrival). For a value so frequent that it would fill the list,
the guess [a, b) is this value's key alone: b is the next key. After GUESSES passes the range of
keys is halved instead, so that the search ends for every row.

A pass by one program is a chain of latencies, so a span is loaded while the span before it is used.
Flat noise needs one more pass, which writes masses and best scores as the scan does.

Weights are relative to the row's maximum. A block with underflowing weight has no part in any draw:
top-p drops it, min-p drops masses below 2^-126, and under flat noise the masses only say whether a
row is empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.draw import token_address
from foretoken.ops.backends.triton.filters import DENSE, UNDECIDED, min_p_floor
from foretoken.ops.backends.triton.noise import Address, gumbel_span, log2
from foretoken.ops.backends.triton.records import Batch, RawRows

from foretoken.ops.backends.triton.rows import (  # isort: skip
    BLOCK, FIXED, false_like, first_row, key_of, let_next_start, load_blocks, load_span, log2_sum,
    log2_sum_rows, read_settings, value_of, wait_for_writes, zero_like,
)  # fmt: skip

from foretoken.ops.backends.triton.sweep import (  # isort: skip
    GUESSES, LIST, LOWEST, MISSED_NOTE, SAMPLE, Bracket, Guess, Search, Swept, Weighting, bisect,
    guess_from, list_of, load_guess, load_sample, load_sweep, needed, notes_of, pack_stretch,
    room_for_list, search_for, unpack_stretch, weight_of,
)  # fmt: skip

WARPS = 4
REGISTERS = 168  # per thread: a multiprocessor then holds three programs of four warps
_LANES = tl.constexpr(32 * WARPS)
_SPAN = tl.constexpr(2048)  # logits of one load
_SPAN_BLOCKS = tl.constexpr(_SPAN.value // BLOCK.value)
_LISTED_CHUNK = tl.constexpr(8)  # listed logits that `_add_listed` adds to each block together


@triton.jit(do_not_specialize=["stride"])
def wide_kernel(batch: Batch, stride, token_stream, K1: tl.constexpr, NBP: tl.constexpr,
                FP64: tl.constexpr, DRAFT: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Programs: (request, row of it). Makes UNDECIDED rows DENSE; most rows are not UNDECIDED.
    The compiler must not know that the rows' stride is a multiple of 16: it would load four
    neighbours per thread, but store logits to the list one by one, and so move ranks, addresses and
    values of each span to another layout, through shared memory."""
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows, requests, filtered = batch.rows, batch.requests, batch.scratch.filtered
    rows = RawRows(rows.logits_NV, stride, rows.V, rows.NB, rows.NG, rows.mask, rows.entries)
    batch = Batch(rows, requests, batch.slots, batch.q, batch.scratch)
    pid = tl.program_id(0)
    b, i = pid // K1, pid % K1
    if K1 > 1:
        if i > tl.load(requests.num_B + b):
            return
    row = first_row(requests, b, K1 > 1) + i
    if tl.load(filtered.count_N + row) != UNDECIDED:
        return
    settings = read_settings(batch.slots, tl.load(requests.slot_B + b), rows.V)
    top = tl.load(batch.scratch.lse_N + row)  # the row's maximum, see `Scratch`
    threshold, room = min_p_floor(settings, top), room_for_list(rows)
    listed = zero_like(room)  # 0 with only min-p; not used with top-k (flat noise)
    if settings.counted:
        goal = settings.top_k.to(tl.float32)
        search = search_for(True, goal, top, settings.scale, threshold)
        kth, _ = _search(batch, row, search, True)
        threshold = tl.maximum(threshold, kth)
    if settings.top_p < 1:
        search = search_for(False, settings.top_p, top, settings.scale, threshold)
        nucleus, listed = _search(batch, row, search, not settings.counted)
        threshold = tl.maximum(threshold, nucleus)
    kept = Weighting(top, settings.scale, threshold)
    if settings.flat:
        address = token_address(requests, settings, b, i, token_stream, DRAFT)
        _write_scores(batch, row, kept, address, FP64)
    else:
        if listed > room:
            key = key_of(threshold)
            _sweep(batch, row, Guess(key, key), kept)
        _add_listed(batch, row, kept, NBP)
    tl.debug_barrier()
    tl.store(filtered.threshold_N + row, threshold)
    masses = load_blocks(batch.scratch.mass_NJ, row, rows.NB, NBP)
    tl.store(batch.scratch.lse_N + row, log2_sum(masses))
    tl.store(filtered.count_N + row, DENSE)


@triton.jit
def _load_span(rows: RawRows, row, first):
    """Logits first..first + _SPAN - 1; those of the row's last span if `first` is after it."""
    last = (rows.V - 1) // _SPAN * _SPAN
    return load_span(rows, row, tl.minimum(first, last), _SPAN, "evict_last")


@triton.jit
def _sweep(batch: Batch, row, guess: Guess, weighting: Weighting):
    """One pass over a row; returns `Swept`.
    Writes the logits between the guess's keys to the list, block by block until the list is full.
    For each block, `mass_NJ` gets W(x >= b), the weight of the block's logits from the guess's key
    b on, and `best_NJ` gets the block's stretch of the list (`sweep.py: pack_stretch`)."""
    rows, scratch, room = batch.rows, batch.scratch, room_for_list(batch.rows)
    lowest, highest = value_of(guess.a), value_of(guess.b)
    shape: tl.constexpr = (_SPAN_BLOCKS, BLOCK // _LANES, _LANES)
    whole = tl.zeros((_SPAN_BLOCKS, _LANES), tl.float32)
    from_a = tl.zeros((_SPAN_BLOCKS, _LANES), tl.float32)
    from_b = tl.zeros((_SPAN_BLOCKS, _LANES), tl.float32)
    count = tl.full((), 0, tl.int32)
    list_ = list_of(batch, row)
    tl.debug_barrier()  # perhaps the list was the sample, and is still being read
    next_span = _load_span(rows, row, 0)
    for first in range(0, rows.V, _SPAN):
        span = next_span
        x = tl.reshape(span, shape)
        next_span = _load_span(rows, row, first + _SPAN)
        weight = weight_of(x, weighting)
        whole += tl.sum(weight, axis=1)
        from_a += tl.sum(tl.where(x >= lowest, weight, 0.0), axis=1)
        span_from_b = tl.sum(tl.where(x >= highest, weight, 0.0), axis=1)
        from_b += span_from_b
        listed = (x >= lowest).to(tl.int32) - (x >= highest).to(tl.int32)
        per_lane = tl.sum(listed, axis=1)
        per_block = tl.sum(per_lane, axis=1)
        start = count + tl.cumsum(per_block, axis=0) - per_block
        stretch = pack_stretch(start, per_block, room)
        lane_start = start[:, None] + tl.cumsum(per_lane, axis=1) - per_lane
        rank = tl.reshape(lane_start[:, None, :] + tl.cumsum(listed, axis=1) - 1, (_SPAN,))
        # 1-dimensional: a 3-dimensional store would change the layout of all operands
        tl.store(list_ + rank, span, mask=(tl.reshape(listed, (_SPAN,)) > 0) & (rank < room))
        count += tl.sum(per_block, axis=0)
        above = tl.sum(span_from_b, axis=1)
        for n in tl.static_range(_SPAN_BLOCKS):
            j = first // BLOCK + n
            if j < rows.NB:
                is_n = tl.arange(0, _SPAN_BLOCKS) == n
                place = row * rows.NB + j
                tl.store(scratch.mass_NJ + place, tl.sum(tl.where(is_n, above, 0.0), axis=0))
                tl.store(scratch.best_NJ + place, tl.sum(tl.where(is_n, stretch, 0.0), axis=0))
    tl.debug_barrier()
    whole, from_a, from_b = tl.sum(whole, axis=0), tl.sum(from_a, axis=0), tl.sum(from_b, axis=0)
    return Swept(tl.sum(whole, axis=0), tl.sum(from_a, axis=0), tl.sum(from_b, axis=0), count)


@triton.jit
def _search(batch: Batch, row, search: Search, swept_before):
    """Returns the largest t such that W(x >= t) reaches the weight needed, and the number of logits
    that the last pass listed. If this number exceeds the list's room, the list and the masses do
    not belong to t. swept_before: whether `sweep.py` made the first sweeps."""
    rows, filtered, room = batch.rows, batch.scratch.filtered, room_for_list(batch.rows)
    weighting, list_ = search.weighting, list_of(batch, row)
    # The threshold's key is in [low, high). w_low: W(x >= low), -1 until it is known; w_high:
    # W(x >= high).
    low, high = tl.full((), LOWEST, tl.uint32), key_of(search.top) + 1
    mass = zero_like(search.top) - 1  # W of the row
    w_low, w_high, need = mass, zero_like(mass), zero_like(mass)
    # inside: whether the `num_listed` logits of the last pass are all logits in [low, high).
    # count: `num_listed` if so; else more than the list's room, so that the search continues.
    count, passes = room + 1, zero_like(room)
    inside, num_listed, sweeps = false_like(passes), zero_like(room), passes
    if swept_before:
        sweeps = 1 + tl.load(notes_of(filtered, row) + MISSED_NOTE).to(tl.int32)
    while (count > room) & (high - low > 1):
        guess = Guess(low, low + ((high - low) >> 1))
        if passes < sweeps:
            guess, swept = load_guess(filtered, row, passes), load_sweep(filtered, row, passes)
        else:
            if passes < GUESSES:
                unit = tl.maximum(rows.V / SAMPLE, 1.0)
                if inside & (passes > sweeps):  # the list overflowed and is the sample
                    i = tl.arange(0, SAMPLE)
                    x = tl.load(list_ + i, mask=i < room, other=float("-inf"), cache_modifier=".cg")
                    unit = num_listed / tl.minimum(room, SAMPLE).to(tl.float32)
                else:
                    x = load_sample(rows, row, passes)
                    if inside:
                        in_bracket = (x >= value_of(low)) & (x < value_of(high))
                        sampled = tl.sum(in_bracket.to(tl.float32), axis=0)
                        unit = num_listed / tl.maximum(sampled, 1.0)
                if w_low < 0:
                    w_low = unit * tl.sum(weight_of(x, weighting), axis=0)
                    mass = w_low
                bracket = Bracket(low, high, w_low, w_high)
                guess = guess_from(x, unit, bracket, needed(search, mass), room, weighting)
            swept = _sweep(batch, row, guess, weighting)
        mass, from_a, from_b, count = swept.whole, swept.from_a, swept.from_b, swept.listed
        need = needed(search, mass)
        w_low = tl.where(low == LOWEST, mass, w_low)
        passes += 1
        inside = (from_a >= need) & (from_b < need)
        if from_a < need:
            high, w_high = guess.a, from_a
        else:
            low, w_low = guess.a, from_a
            if from_b < need:
                high, w_high = guess.b, from_b
            else:
                low, w_low = guess.b, from_b
        num_listed = count
        count = tl.where(inside, count, room + 1)
    if count <= room:
        i = tl.arange(0, LIST)
        x = tl.load(list_ + i, mask=i < count, other=float("-inf"), cache_modifier=".cg")
        weight = tl.where(i < count, weight_of(x, weighting), 0.0)
        weight = (weight * FIXED).to(tl.int64)  # the sum is exact in any order
        need_listed = tl.maximum(((need - w_high) * FIXED).to(tl.int64), 1)
        low = bisect(key_of(x), weight, low, high, need_listed, 1)
    return value_of(low), count


@triton.jit
def _add_listed(batch: Batch, row, weighting: Weighting, NBP: tl.constexpr):
    """Write log2 masses: the last sweep's W(x >= b), and the listed logits that are kept."""
    NB, scratch, j = batch.rows.NB, batch.scratch, tl.arange(0, NBP)
    mass = tl.load(scratch.mass_NJ + row * NB + j, mask=j < NB, other=0.0)
    stretch = tl.load(scratch.best_NJ + row * NB + j, mask=j < NB, other=0.0)
    start, length = unpack_stretch(stretch)
    list_ = list_of(batch, row)
    for c in range(0, tl.max(length, axis=0), _LISTED_CHUNK):
        i = (c + tl.arange(0, _LISTED_CHUNK))[None, :]
        mask = i < length[:, None]
        place = list_ + start[:, None] + i
        x = tl.load(place, mask=mask, other=float("-inf"), cache_modifier=".cg")
        mass += tl.sum(weight_of(x, weighting), axis=1)
    mass = weighting.maximum * weighting.scale + log2(mass)
    tl.store(scratch.mass_NJ + row * NB + j, mass, mask=j < NB)


@triton.jit
def _write_scores(batch: Batch, row, weighting: Weighting, address: Address, FP64: tl.constexpr):
    """Write masses, and best scores under flat noise, of the logits that are kept."""
    rows, scratch = batch.rows, batch.scratch
    next_span = _load_span(rows, row, 0)
    for first in range(0, rows.V, _SPAN):
        x = next_span
        next_span = _load_span(rows, row, first + _SPAN)
        weight = tl.where(x >= weighting.floor, x * weighting.scale, float("-inf"))
        j = first // BLOCK + tl.arange(0, _SPAN_BLOCKS)
        mass = log2_sum_rows(tl.reshape(weight, (_SPAN_BLOCKS, BLOCK)))
        tl.store(scratch.mass_NJ + row * rows.NB + j, mass, mask=j < rows.NB)
        score = weight + gumbel_span(address, first, _SPAN, FP64)
        best = tl.max(tl.reshape(score, (_SPAN_BLOCKS, BLOCK)), axis=1).to(tl.float32)
        tl.store(scratch.best_NJ + row * rows.NB + j, best, mask=j < rows.NB)
