"""Thresholds of rows that a short list cannot decide: wide nuclei, large k, many ties.

The largest t whose weight W(x >= t) reaches `need` is bracketed by whole passes over the row, two
candidates each: from a sample of the row at first, then by interpolation, and after three passes by
halving, so that it ends. Once the bracket holds few logits they are listed and decided exactly.
Eight rounds of four bits took 290 us each (H200, 320 x 151 936, normal logits, a nucleus of 95 %).

Shapes: B requests, N rows, V vocabulary, NB blocks, NG groups of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.filters import (
    DENSE,
    UNDECIDED,
    key_of,
    largest_key_by_bits,
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

_SPAN = tl.constexpr(2048)
_SAMPLE = tl.constexpr(2048)
_LIST = tl.constexpr(1024)
LOWEST = tl.constexpr(0x00800000)  # the key of the lowest finite float


@triton.jit
def _weight(x, top, scale, floor, MASS: tl.constexpr):
    """What an element counts: its mass relative to the row's maximum, or 1."""
    if MASS:
        return tl.where(x >= floor, tl.exp2((x - top) * scale), 0.0)
    else:
        return tl.where(x > float("-inf"), 1.0, 0.0)


@triton.jit
def _measure(
    logits,
    stride,
    row,
    V,
    edits,
    top,
    scale,
    floor,
    a,
    b,
    MASS: tl.constexpr,
    MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """W and number of the logits >= either of two values, in one pass."""
    wa = tl.zeros((_SPAN,), tl.float32)
    wb = tl.zeros((_SPAN,), tl.float32)
    na = tl.zeros((_SPAN,), tl.int32)
    nb = tl.zeros((_SPAN,), tl.int32)
    for first in range(0, V, _SPAN):
        x = load_span(logits, stride, row, first, V, edits, _SPAN, MASKS, ENTRIES, "evict_last")
        weight = _weight(x, top, scale, floor, MASS)
        wa += tl.where(x >= a, weight, 0.0)
        wb += tl.where(x >= b, weight, 0.0)
        na += (x >= a).to(tl.int32)
        nb += (x >= b).to(tl.int32)
    return tl.sum(wa, axis=0), tl.sum(wb, axis=0), tl.sum(na, axis=0), tl.sum(nb, axis=0)


@triton.jit
def _guess(
    logits,
    stride,
    row,
    V,
    edits,
    top,
    scale,
    floor,
    need,
    total,
    MASS: tl.constexpr,
    MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Keys on either side of the threshold, as far as logits spread over the row can tell."""
    i = tl.arange(0, _SAMPLE)
    step = tl.maximum(V // _SAMPLE, 1)
    x = load_at(logits, stride, row, i * step, i * step < V, V, edits, MASKS, ENTRIES)
    weight = _weight(x, top, scale, floor, MASS)
    sampled = tl.sum(weight, axis=0)
    wanted = sampled * need / total
    spread = 2.0 * tl.sqrt(tl.sum(weight * weight, axis=0) * (1 - need / total))
    key = key_of(x)
    a = largest_key_by_bits(key, weight, tl.maximum(wanted - spread, 1e-30))
    b = largest_key_by_bits(key, weight, tl.minimum(wanted + spread, sampled))
    return a, b


@triton.jit
def _tighter(low, high, w_low, w_high, n_low, n_high, key, w, n, need):
    """The bracket low <= threshold < high after learning W and the number at one more key."""
    if (key > low) & (key < high):
        if w >= need:
            low, w_low, n_low = key, w, n
        else:
            high, w_high, n_high = key, w, n
    return low, high, w_low, w_high, n_low, n_high


@triton.jit
def _listed(
    logits,
    stride,
    row,
    V,
    edits,
    low,
    high,
    top,
    scale,
    floor,
    need,
    room,
    MASS: tl.constexpr,
    MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The threshold among the few logits whose keys are in [low, high)."""
    count = tl.full((), 0, tl.int32)
    for first in range(0, V, _SPAN):
        x = load_span(logits, stride, row, first, V, edits, _SPAN, MASKS, ENTRIES, "evict_last")
        key = key_of(x)
        chosen = (key >= low) & (key < high)
        found = tl.sum(chosen.to(tl.int32), axis=0)
        if found > 0:
            rank = count + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            tl.store(room + rank, x, mask=chosen & (rank < _LIST))
            count += found
    tl.debug_barrier()
    i = tl.arange(0, _LIST)
    x = tl.load(room + i, mask=i < count, other=float("-inf"))
    weight = tl.where(i < count, _weight(x, top, scale, floor, MASS), 0.0)
    return largest_key_by_bits(tl.where(i < count, key_of(x), 0), weight, need)


@triton.jit
def _search(
    logits,
    stride,
    row,
    V,
    edits,
    top,
    scale,
    floor,
    need,
    total,
    room,
    NG,
    MASS: tl.constexpr,
    MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The largest value t such that W(x >= t) reaches `need`; `total` is W of the whole row."""
    low, high = tl.full((), LOWEST, tl.uint32), key_of(top) + 1
    w_low, w_high = total, total * 0
    n_low, n_high = V + tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    a, b = _guess(logits, stride, row, V, edits, top, scale, floor, need, total, MASS, MASKS,
                  ENTRIES)  # fmt: skip
    passes = tl.full((), 0, tl.int32)
    few = tl.minimum(_LIST, NG)
    while (n_low - n_high > few) & (high - low > 1):
        wa, wb, na, nb = _measure(
            logits, stride, row, V, edits, top, scale, floor, value_of(a), value_of(b), MASS, MASKS,
            ENTRIES,
        )  # fmt: skip
        low, high, w_low, w_high, n_low, n_high = _tighter(
            low, high, w_low, w_high, n_low, n_high, a, wa, na, need
        )
        low, high, w_low, w_high, n_low, n_high = _tighter(
            low, high, w_low, w_high, n_low, n_high, b, wb, nb, need
        )
        lowest, width = value_of(low), value_of(high) - value_of(low)
        share = (w_low - need) / tl.maximum(w_low - w_high, 1e-30)
        about = 0.3 * few / tl.maximum(n_low - n_high, 1).to(tl.float32)
        a = key_of(lowest + width * tl.minimum(share + about, 1.0))
        b = key_of(lowest + width * tl.maximum(share - about, 0.0))
        passes += 1
        if passes > 3:  # far from a straight line: halve the bracket's keys too
            b = low + (high - low) // 2
    key = low
    if high - low > 1:
        key = _listed(logits, stride, row, V, edits, low, high, top, scale, floor, need - w_high,
                      room, MASS, MASKS, ENTRIES)  # fmt: skip
        key = tl.maximum(key, low)
    return value_of(key)


@triton.jit
def _mass_above(
    logits,
    stride,
    row,
    V,
    edits,
    top,
    scale,
    floor,
    MASS: tl.constexpr,
    MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """W of the whole row."""
    weight = tl.zeros((_SPAN,), tl.float32)
    for first in range(0, V, _SPAN):
        x = load_span(logits, stride, row, first, V, edits, _SPAN, MASKS, ENTRIES, "evict_last")
        weight += _weight(x, top, scale, floor, MASS)
    return tl.sum(weight, axis=0)


@triton.jit
def wide_kernel(
    logits, stride, num_ptr, slot_ptr, position_ptr, index_ptr, state, edits, out, found, V, NB, NG,
    token_stream, K1: tl.constexpr, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
    NBP: tl.constexpr, FP64: tl.constexpr, DRAFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, row of it); most have nothing to do. Leaves rows dense."""
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
    room = out[2] + row * NG
    top = tl.load(found[1] + row)
    floor = min_p_floor(tl.load(state[4] + slot), top, scale)
    bounded = (k > 0) & (k < V)
    if bounded:
        total = _mass_above(logits, stride, row, V, edits, top, scale, floor, False, MASKS, ENTRIES)
        kth = _search(logits, stride, row, V, edits, top, scale, floor, k.to(tl.float32), total,
                      room, NG, False, MASKS, ENTRIES)  # fmt: skip
        floor = tl.maximum(floor, kth)
    if top_p < 1:
        if bounded | (floor > float("-inf")):
            total = _mass_above(
                logits, stride, row, V, edits, top, scale, floor, True, MASKS, ENTRIES
            )
        else:
            total = tl.exp2(log2_sum(load_masses(out[0], row, NB, NBP)) - top * scale)
        nucleus = _search(logits, stride, row, V, edits, top, scale, floor, top_p * total, total,
                          room, NG, True, MASKS, ENTRIES)  # fmt: skip
        floor = tl.maximum(floor, nucleus)
    at = flat_noise(state, slot, position_ptr, index_ptr, b, i, token_stream, DRAFT)
    flat = is_flat(state, slot, V)
    per: tl.constexpr = _SPAN // BLOCK
    for first in range(0, V, _SPAN):
        x = load_span(logits, stride, row, first, V, edits, _SPAN, MASKS, ENTRIES, "evict_last")
        weight = tl.where(x >= floor, x * scale, float("-inf"))
        j = first // BLOCK + tl.arange(0, per)
        mass = log2_sum_rows(tl.reshape(weight, (per, BLOCK)))
        tl.store(out[0] + row * NB + j, mass, mask=j < NB)
        if flat:
            score = weight + gumbel_span(at, first, _SPAN, FP64)
            best = tl.max(tl.reshape(score, (per, BLOCK)), axis=1).to(tl.float32)
            tl.store(out[1] + row * NB + j, best, mask=j < NB)
    tl.debug_barrier()
    tl.store(found[0] + row, floor)
    tl.store(found[1] + row, log2_sum(load_masses(out[0], row, NB, NBP)))
    tl.store(found[2] + row, DENSE)
