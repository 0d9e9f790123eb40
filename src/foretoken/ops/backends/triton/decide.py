"""Verification after the scan: which drafts each request accepts, and the token after them.

`decide_kernel` (a program per request) settles all but what needs a pass over p and q together,
which it plans for `residual.py`: one row of each rejected request, or all rows under BLOCK. So
K + 1 rows are read, then p and q of one row for each rejected request.

Tuples as in `request.py`. Shapes: B requests, K most drafts, KP a power of 2 above it, N rows, V
vocabulary, NB blocks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton import rules
from foretoken.ops.backends.triton.draw import draw
from foretoken.ops.backends.triton.noise import LOG2E, uniform_at
from foretoken.ops.backends.triton.request import (
    ACCEPT,
    ALL_ROWS,
    BLOCK_RULE,
    DONE,
    ONE_ROW,
    SYNTHETIC_RULE,
    is_dense,
    law_after,
    log2_of,
    read_request,
    store_tokens,
)
from foretoken.ops.backends.triton.rows import load_at, log2_sum_rows


@triton.jit
def _row_lse(
    first, i, num, out, found, NB, FILTERS: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr
):
    """(lse, threshold) of a request's rows [KP]; lse is kept for what comes later."""
    row = first + i
    live = i <= num
    j = tl.arange(0, NBP)
    mass = tl.load(
        out[0] + row[:, None] * NB + j[None, :],
        mask=live[:, None] & (j < NB)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    lse = log2_sum_rows(mass)
    threshold = tl.full((KP,), float("-inf"), tl.float32)
    if FILTERS:
        compact = tl.load(found[2] + row, mask=live, other=-1) >= 0
        lse = tl.where(compact, tl.load(found[1] + row, mask=live, other=0.0), lse)
        threshold = tl.load(found[0] + row, mask=live, other=float("-inf"))
    tl.store(found[1] + row, lse, mask=live)
    return lse, threshold


@triton.jit
def _log_q(q, slot, i, token, known, real, scale):
    """log2 q(x_i): 0 of a one-hot q, -inf where q is nowhere or cannot give x_i."""
    log_q = tl.where(known, 0.0, float("-inf"))
    if real:
        inside = known & (token < q[3])
        raw = tl.load(q[0] + slot * q[1] + i * q[2] + token, mask=inside, other=float("-inf")).to(
            tl.float32
        )
        lse = (tl.load(q[5] + slot * q[6] + i, mask=known, other=0.0) * LOG2E).to(tl.float32)
        reached = raw >= tl.load(q[4] + slot * q[6] + i, mask=known, other=0.0)
        usable = inside & reached & (raw > float("-inf")) & (lse - lse == 0)
        log_q = tl.where(usable, raw * scale - lse, float("-inf"))
    return log_q


@triton.jit
def _plan(
    b,
    to,
    needed,
    i,
    row,
    slot,
    scale,
    threshold,
    lse,
    weight,
    token,
    request,
    q,
    work,
    K,
    ALL: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    """Write what the residual pass over some rows [KP] must know, at places `to` of the request.

    plan_BK4: row or -1, mode, token, where its q begins; plan_BK6: scale, threshold, lse, those of
    q, log2 w.
    """
    real = tl.full((), 0, tl.int32)
    if HAS_Q:
        drawn = tl.load(request[4] + b) != 0
        real = tl.where(drawn, 1, 0)
        q_at = slot * q[6] + i
        known = tl.where(drawn, needed, i < 0)
        q_threshold = tl.load(q[4] + q_at, mask=known, other=0.0)
        q_lse = tl.load(q[5] + q_at, mask=known, other=0.0) * LOG2E
    else:
        q_threshold, q_lse = lse * 0, lse * 0
    once = needed
    if ALL:
        once = i < K  # rows that are not needed say so
    whole = work[5] + (b * K + to) * 4
    tl.store(whole, tl.where(needed, row, -1), mask=once)
    tl.store(whole + 1, tl.zeros_like(row) + real + 1, mask=once)
    tl.store(whole + 2, token, mask=once)
    tl.store(whole + 3, tl.zeros_like(row) + slot * q[1] + i * q[2], mask=once)
    part = work[6] + (b * K + to) * 6
    tl.store(part, tl.zeros_like(lse) + scale, mask=once)
    tl.store(part + 1, threshold, mask=once)
    tl.store(part + 2, lse, mask=once)
    tl.store(part + 3, q_threshold, mask=once)
    tl.store(part + 4, q_lse.to(tl.float32), mask=once)
    tl.store(part + 5, weight, mask=once)


@triton.jit
def decide_kernel(
    logits, stride, request, state, edits, q, out, found, work, verdict, V, NB, K,
    RAGGED: tl.constexpr, MASKS: tl.constexpr, ENTRIES: tl.constexpr, FILTERS: tl.constexpr,
    HAS_Q: tl.constexpr, RATES: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr,
    FP64: tl.constexpr,
):  # fmt: skip
    """A program per request: rule and draw, unless the residual has to be summed over a row."""
    b = tl.program_id(0)
    first, num, slot, position, key, scale, greedy, coupled, flat, rule = read_request(
        b, request, state, V, RAGGED
    )
    i = tl.arange(0, KP)
    tl.store(work[1] + b, 0)
    lse, threshold = _row_lse(first, i, num, out, found, NB, FILTERS, KP, NBP)
    k = tl.full((), 0, tl.int32)
    pending = tl.full((), 0, tl.int32)
    if RAGGED:
        token = tl.load(request[3] + b * K + i, mask=i < num, other=-1).to(tl.int64)
        known = (token >= 0) & ((token < V) | (rule != SYNTHETIC_RULE))
        inside = known & (token < V)
        rows, id_ = first + tl.minimum(i, num), tl.where(inside, token, 0)
        x = load_at(logits, stride, rows, id_, inside, V, edits, MASKS, ENTRIES)
        usable = inside & (x >= threshold) & (x > float("-inf")) & (lse - lse == 0)
        log_p = tl.where(usable, x * scale - lse, float("-inf"))
        log_q = tl.where(known, 0.0, float("-inf"))
        if HAS_Q:
            real = (tl.load(request[4] + b) != 0) & (not greedy) & (not coupled)
            log_q = _log_q(q, slot, i, token, known, real, scale)
        zero = tl.full((), 0, tl.int32)
        at = (key, (position + i).to(tl.int32), i, zero + ACCEPT)
        u = uniform_at(at, i * 0, FP64)
        k = rules.standard(log_p, log_q, log2_of(u, FP64), i, num)
        if RATES:
            rate = tl.load(request[5] + i, mask=i < num, other=0.0)
            if rule == SYNTHETIC_RULE:
                k = rules.synthetic(rate, log_q, u.to(tl.float64), i, num)
        weight = tl.zeros((KP,), tl.float32)
        if rule == BLOCK_RULE:
            weight = rules.block_weights(log_p, log_q)
            k = rules.block_all(weight, log_q, log2_of(u, FP64), i, num)
            pending = tl.where(k < num, ALL_ROWS, DONE) + zero
        if (rule != SYNTHETIC_RULE) & (greedy | coupled):
            pending = zero
            k = zero
        tl.store(work[2] + b * K + i, log_p, mask=i < num)
        tl.store(work[3] + b * K + i, log_q, mask=i < num)
        tl.store(work[4] + b * (K + 1) + i + 1, weight, mask=i < num)
        tl.store(work[4] + b * (K + 1), 0.0)
        tl.debug_barrier()
        if pending == ALL_ROWS:
            before = tl.load(work[4] + b * (K + 1) + i, mask=i < num, other=0.0)
            needed = (i < num) & (log_q > float("-inf")) & (before > float("-inf"))
            summed = flat
            if HAS_Q:
                summed = flat | (tl.load(request[4] + b) != 0)
            needed = tl.where(summed, needed, i < 0)
            if FILTERS:
                needed = needed & (tl.load(found[2] + first + i, mask=i < num, other=0) < 0)
            _plan(b, i, needed, i, first + i, slot, scale, threshold, lse, before, token, request,
                  q, work, K, True, HAS_Q)  # fmt: skip
    settled = pending == ALL_ROWS
    drawn = tl.full((), -1, tl.int64)
    while not settled:
        law, stream, mode = law_after(b, k, slot, num, greedy, coupled, request, q, work, K, HAS_Q)
        row = first + k
        if ((mode == 2) | ((mode == 1) & flat)) & is_dense(found, row, FILTERS):
            pending = tl.full((), 0, tl.int32) + ONE_ROW
            settled = num >= 0
            here = i == k
            own = tl.load(request[3] + b * K + i, mask=here, other=-1).to(tl.int64)
            _plan(b, i * 0, here, i, first + i, slot, scale, threshold, lse, i * 0.0, own, request,
                  q, work, K, False, HAS_Q)  # fmt: skip
        else:
            at_ = (key, (position + k).to(tl.int32), tl.full((), 0, tl.int32))
            drawn = draw(logits, stride, row, V, edits, out, found, NB, scale, greedy, flat, law,
                         at_, stream, stream + 1, MASKS, ENTRIES, FILTERS, NBP, FP64)  # fmt: skip
            settled = num >= 0
            if (k < num) & (rule != SYNTHETIC_RULE) & (greedy | coupled):
                sound = tl.sum(((i == k) & (lse - lse == 0)).to(tl.int32), axis=0) > 0
                if (law[1] == drawn) & sound:
                    k += 1
                    settled = num < 0
    broken = tl.sum(((i <= k) & (lse - lse != 0)).to(tl.int32), axis=0) > 0
    store_tokens(b, k, drawn, not broken, num, request, verdict, K, KP)
    tl.store(work[0] + b, tl.where(broken & (pending == ONE_ROW), DONE, pending))
