"""Verification after the scan: how many drafts each request accepts, and what is left to do.

`decide_kernel` (a program per request) applies the rule and plans the rest for `residual.py`: the
draw of the next token, the residual of one row before it, or of all rows under BLOCK. So K + 1 rows
are read, then p and q of one row for each rejected request. Only what is decided by draws (T=0,
COUPLED), or leaves no residual to sum, is drawn here.

All but the masses is loaded before the scan has ended: the chain behind them is what costs time.

Tuples as in `request.py`. Shapes: B requests, K most drafts, KP a power of 2 above it, N rows, V
vocabulary, NB blocks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton import rules
from foretoken.ops.backends.triton.draw import draw, lots
from foretoken.ops.backends.triton.noise import LOG2E, uniform_at
from foretoken.ops.backends.triton.request import (
    ACCEPT,
    ALL_ROWS,
    BLOCK_RULE,
    DONE,
    DRAW,
    FRACTION,
    HEAD,
    ONE_ROW,
    RESIDUAL_TOKEN,
    SYNTHETIC_RULE,
    TARGET_TOKEN,
    WHOLE,
    fraction_of,
    log2_of,
    read_request,
    shifted,
    store_prefix,
    store_token,
    whole_of,
)
from foretoken.ops.backends.triton.rows import (
    CHUNK,
    let_next_start,
    load_at,
    log2_sum_rows,
    wait_for_writes,
)


@triton.jit
def _row_lse(
    first, i, num, out, found, NB, FILTERS: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr
):
    """(lse, threshold, whether it has a short list) of a request's rows [KP]; stores lse."""
    row = first + i
    live = i <= num
    j = tl.arange(0, NBP)
    mass = tl.load(
        out[0] + row[:, None] * NB + j[None, :],
        mask=live[:, None] & (j < NB)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    # A lane per row again: in the layout of the sum each thread would hold, and compute, all rows,
    # and everything that meets them, back to the noise, would follow (1 700 instructions for 340).
    lse = tl.gather(log2_sum_rows(mass), i, 0)
    threshold = tl.full((KP,), float("-inf"), tl.float32)
    compact = i < 0
    if FILTERS:
        compact = tl.load(found[2] + row, mask=live, other=-1) >= 0
        lse = tl.where(compact, tl.load(found[1] + row, mask=live, other=0.0), lse)
        threshold = tl.load(found[0] + row, mask=live, other=float("-inf"))
    tl.store(found[1] + row, lse, mask=live)
    return lse, threshold, compact


@triton.jit
def _read_q(q, slot, i, token, known, real, scale, HAS_Q: tl.constexpr):
    """(log2 q(x_i), threshold and lse of q); log2 q is 0 of a one-hot q, -inf if it lacks x_i."""
    log_q = tl.where(known, 0.0, float("-inf"))
    threshold, lse = tl.zeros_like(log_q), tl.zeros_like(log_q)
    if HAS_Q:
        at = slot * q[6] + i
        threshold = tl.load(q[4] + at, mask=known, other=0.0)
        lse = (tl.load(q[5] + at, mask=known, other=0.0) * LOG2E).to(tl.float32)
        if real:
            inside = known & (token < q[3])
            raw = tl.load(
                q[0] + slot * q[1] + i * q[2] + token, mask=inside, other=float("-inf")
            ).to(tl.float32)
            usable = inside & (raw >= threshold) & (raw > float("-inf")) & (lse - lse == 0)
            log_q = tl.where(usable, raw * scale - lse, float("-inf"))
    return log_q, threshold, lse


@triton.jit
def _plan(b, to, needed, whole, fraction, work, K, mask):
    """Write what the residual pass must know of some rows [KP], at places `to` of the request."""
    at = whole_of(work, b, K) + HEAD + to * WHOLE
    zero = to.to(tl.int64) * 0
    tl.store(at, tl.where(needed, zero + whole[0], -1), mask=mask)
    for n in tl.static_range(1, 5):
        tl.store(at + n, zero + whole[n], mask=mask)
    to_ = fraction_of(work, b, K) + 3 * K + 1 + to * FRACTION
    for n in tl.static_range(6):
        tl.store(to_ + n, zero.to(tl.float32) + fraction[n], mask=mask)


@triton.jit
def value_at(x, i, k):
    """x_k of a vector."""
    return tl.sum(tl.where(i == k, x, tl.zeros_like(x)), axis=0)


@triton.jit
def decision(
    b, given, RAGGED: tl.constexpr, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
    FILTERS: tl.constexpr, HAS_Q: tl.constexpr, RATES: tl.constexpr, LATER: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr,
    FP64: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The rule of one request: (request, rows, k, pending, mode, walks). CHUNK: see `first_row`.

    request = (first row, number of drafts, slot, position, key, scale, greedy, flat)
    rows    = (token, threshold, lse, those of q) [KP]
    walks   = whether drafts are compared with draws: k is 0 then, and nothing is pending
    mode    = of the law after k drafts, see `draw`
    """
    logits, stride, request, state, edits, q, out, found, work, _, V, NB, K = given
    first, num, slot, position, key, scale, greedy, coupled, flat, rule = read_request(
        b, request, state, V, RAGGED, CHUNK
    )
    i = tl.arange(0, KP)
    zero = tl.full((), 0, tl.int32)
    from_p = greedy | coupled  # there is no residual
    walks = from_p & (rule != SYNTHETIC_RULE)
    token, known, real = i.to(tl.int64) * 0 - 1, i < 0, num < 0
    x, log_q, q_threshold, q_lse, u = i * 0.0, i * 0.0, i * 0.0, i * 0.0, i * 0.0
    if RAGGED:
        token = tl.load(request[3] + b * K + i, mask=i < num, other=-1).to(tl.int64)
        known = (token >= 0) & ((token < V) | (rule != SYNTHETIC_RULE))
        inside = known & (token < V)
        rows, id_ = first + tl.minimum(i, num), tl.where(inside, token, 0)
        x = load_at(logits, stride, rows, id_, inside, edits, MASKS, ENTRIES)
        if HAS_Q:
            real = (tl.load(request[4] + b) != 0) & (from_p == 0)
        log_q, q_threshold, q_lse = _read_q(q, slot, i, token, known, real, scale, HAS_Q)
        u = uniform_at((key, (position + i).to(tl.int32), i, zero + ACCEPT), i * 0, FP64)
    wait_for_writes(OVERLAP)
    lse, threshold, compact = _row_lse(first, i, num, out, found, NB, FILTERS, KP, NBP)
    k, pending = zero, zero + DONE
    if RAGGED:
        usable = known & (token < V) & (x >= threshold) & (x > float("-inf")) & (lse - lse == 0)
        log_p = tl.where(usable, x * scale - lse, float("-inf"))
        log_u = log2_of(u, FP64)
        k = rules.standard(log_p, log_q, log_u, i, num)
        if RATES:
            rate = tl.load(request[5] + i, mask=i < num, other=0.0)
            if rule == SYNTHETIC_RULE:
                k = rules.synthetic(rate, log_q, u.to(tl.float64), i, num)
        if walks:
            k = zero
        if BLOCKS:
            if (rule == BLOCK_RULE) & (walks == 0):
                log_next = rules.block_weights(log_p, log_q)
                k = rules.block_all(log_next, log_q, log_u, i, num)
                if k < num:
                    pending = zero + ALL_ROWS
                    weight = shifted(log_next, i, -1, KP)
                    to = fraction_of(work, b, K) + i
                    tl.store(to, log_p, mask=i < num)
                    tl.store(to + K, log_q, mask=i < num)
                    tl.store(to + 2 * K, weight, mask=i < num)
                    tl.store(to + 2 * K + 1, log_next, mask=i < num)
                    summed = (i < num) & (log_q > float("-inf")) & (weight > float("-inf"))
                    summed = tl.where(flat | real, summed & (compact == 0), i < 0)
                    whole = (first + i, tl.where(real, 2, 1), token, slot * q[1] + i * q[2],
                             position + i)  # fmt: skip
                    _plan(b, i, summed, whole, (scale, threshold, lse, q_threshold, q_lse, weight),
                          work, K, i < K)  # fmt: skip
    here = i == k
    own = tl.max(tl.where(here & (i < num), log_q, float("-inf")), axis=0)
    mode = tl.where((own == float("-inf")) | from_p, 0, tl.where(real, 2, 1))
    broken = tl.sum(((i <= k) & (lse - lse != 0)).to(tl.int32), axis=0) > 0
    if LATER:
        if (pending == DONE) & (broken == 0) & (walks == 0):
            short = tl.sum((here & compact).to(tl.int32), axis=0) > 0
            summed = ((mode == 2) | ((mode == 1) & flat)) & (short == 0)
            pending = tl.where(summed, ONE_ROW, DRAW)
    request_ = (first, num, slot, position, key, scale, greedy, flat)
    return request_, (token, threshold, lse, q_threshold, q_lse), k, pending, mode, walks


@triton.jit
def draw_now(
    given, request, rows, k, mode, walks, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
    FILTERS: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr,
):  # fmt: skip
    """(k, token) where nothing has to be summed; `walks`: on, as long as drafts are drawn."""
    logits, stride, _, _, edits, _, out, found, _, _, V, NB, _ = given
    first, num, _, position, key, scale, greedy, flat = request
    i = tl.arange(0, KP)
    zero = tl.full((), 0, tl.int32)
    drawn = tl.full((), -1, tl.int64)
    unsettled = num >= 0
    while unsettled:
        own = value_at(rows[0], i, k)
        law = (mode, own, logits, 0, 0.0, 0.0, 0.0)
        stream = tl.where(mode == 0, TARGET_TOKEN, RESIDUAL_TOKEN)
        at_ = (key, (position + k).to(tl.int32), zero)
        drawn = draw(logits, stride, first + k, V, edits, out, found, NB, scale, greedy, flat, law,
                     at_, stream, stream + 1, lots(at_, stream + 1, NBP, FP64), MASKS, ENTRIES,
                     FILTERS, NBP, FP64)  # fmt: skip
        unsettled = num < 0
        if walks & (k < num):
            broken = value_at((rows[2] - rows[2] != 0).to(tl.int32), i, k) > 0
            if (own == drawn) & (broken == 0):
                k += 1
                unsettled = num >= 0
    return k, drawn


@triton.jit
def decide_kernel(
    given, RAGGED: tl.constexpr, MASKS: tl.constexpr, ENTRIES: tl.constexpr, FILTERS: tl.constexpr,
    HAS_Q: tl.constexpr, RATES: tl.constexpr, LATER: tl.constexpr, KP: tl.constexpr,
    NBP: tl.constexpr, FP64: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program per request. LATER: the residual pass follows, and draws what it can.

    given: (logits, stride, request, state, edits, q, out, found, work, verdict, V, NB, K)
    """
    let_next_start(OVERLAP)
    b = tl.program_id(0)
    request, rows, k, pending, mode, walks = decision(
        b,
        given,
        RAGGED,
        MASKS,
        ENTRIES,
        FILTERS,
        HAS_Q,
        RATES,
        LATER,
        True,
        CHUNK,
        KP,
        NBP,
        FP64,
        OVERLAP,
    )
    first, num, slot, position, _, scale, _, _ = request
    token, threshold, lse, q_threshold, q_lse = rows
    q, work, verdict, K = given[5], given[8], given[9], given[12]
    i = tl.arange(0, KP)
    if (pending == DRAW) | (pending == ONE_ROW):
        whole = (first + i, mode, token, slot * q[1] + i * q[2], position + i)
        _plan(b, i * 0, i == k, whole, (scale, threshold, lse, q_threshold, q_lse, 0.0), work, K,
              i == k)  # fmt: skip
    drawn = tl.full((), -1, tl.int64)
    draws = walks
    if not LATER:
        draws = num >= 0
    if draws & (pending == DONE):
        k, drawn = draw_now(given, request, rows, k, mode, walks, MASKS, ENTRIES, FILTERS, KP, NBP,
                            FP64)  # fmt: skip
    finite = tl.sum(((i <= k) & (lse - lse != 0)).to(tl.int32), axis=0) == 0
    store_prefix(b, k, finite, given[2], verdict, K, KP)
    if pending == DONE:
        store_token(b, k, drawn, finite, verdict, K)
    for n in tl.static_range(3):
        tl.store(whole_of(work, b, K) + n, (pending * (n == 0)).to(tl.int64))
