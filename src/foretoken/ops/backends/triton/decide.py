"""Verification after the scan: which drafts are accepted, and the token after them.

`decide_kernel` (a program per request) settles all but what needs a pass over p and q together;
`residual_kernel` makes that pass, over one row of each rejected request, or all rows under BLOCK,
and the last program of a request to finish settles it. So K + 1 rows are read, then p and q of one
row for each rejected request.

Tuples:
    request = (num_B, slot_B, position_B, token_BK, real_q_B, rate_K)
    q       = (logits_SKV, slot stride, draft stride, V', threshold_SK, lse_SK, their slot stride)
    work    = (pending_B, arrived_B, log_p_BK, log_q_BK, weight_BK1, plan_BK4, plan_BK6): logs in
              base 2; the plans say which rows the residual pass reads, see `_plan`
    verdict = (token_BK1, n_accept_B, finite_B)

Shapes: B requests, K most drafts, KP a power of 2 above it, N rows, V vocabulary, NB blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton import rules
from foretoken.ops.backends.triton.draw import draw, residual_masses, weigh
from foretoken.ops.backends.triton.filters import CAPACITY
from foretoken.ops.backends.triton.noise import LN2, LOG2E, gumbel_span, uniform_at
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    first_row,
    is_flat,
    load_at,
    load_span,
    log2_sum,
    log2_sum_rows,
)

TARGET_TOKEN, TARGET_BLOCK = tl.constexpr(0), tl.constexpr(1)
RESIDUAL_TOKEN, RESIDUAL_BLOCK = tl.constexpr(2), tl.constexpr(3)
ACCEPT = tl.constexpr(6)
BLOCK_RULE, COUPLED_RULE, SYNTHETIC_RULE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
DONE, ONE_ROW, ALL_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _request(b, request, state, V, RAGGED: tl.constexpr):
    """(first row, number of drafts, slot, position, key, scale, greedy, coupled, flat, rule)."""
    slot = tl.load(request[1] + b)
    temperature = tl.load(state[1] + slot)
    rule = tl.load(state[5] + slot)
    greedy = temperature == 0
    num = tl.full((), 0, tl.int32)
    if RAGGED:
        num = tl.load(request[0] + b).to(tl.int32)
    return (
        first_row(request[0], b, RAGGED),
        num,
        slot,
        tl.load(request[2] + b),
        tl.load(state[0] + slot),
        LOG2E / tl.where(greedy, 1.0, temperature),
        greedy,
        rule == COUPLED_RULE,
        is_flat(state, slot, V),
        rule,
    )


@triton.jit
def _row_lse(first, i, num, out, found, NB, FILTERS: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr):  # noqa: E501
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
        raw = tl.load(
            q[0] + slot * q[1] + i * q[2] + token, mask=inside, other=float("-inf")
        ).to(tl.float32)
        lse = (tl.load(q[5] + slot * q[6] + i, mask=known, other=0.0) * LOG2E).to(tl.float32)
        reached = raw >= tl.load(q[4] + slot * q[6] + i, mask=known, other=0.0)
        usable = inside & reached & (raw > float("-inf")) & (lse - lse == 0)
        log_q = tl.where(usable, raw * scale - lse, float("-inf"))
    return log_q


@triton.jit
def _log2_of(u, FP64: tl.constexpr):
    """log2 of a uniform, below 0 whatever the hardware's rounding: u < 1 must stay so."""
    if FP64:
        return tl.log(u) * LOG2E
    else:
        return tl.minimum(tl.log2(u), -1e-8)


@triton.jit
def _law(b, k, slot, num, greedy, coupled, request, q, work, K, HAS_Q: tl.constexpr):
    """The law of the token after k accepted drafts (see `draw`), and its streams."""
    token = tl.full((), -1, tl.int64)
    log_q, weight = float("-inf"), 0.0
    real = False
    if k < num:
        token = tl.load(request[3] + b * K + k).to(tl.int64)
        log_q = tl.load(work[3] + b * K + k)
        weight = tl.load(work[4] + b * (K + 1) + k)
        real = tl.load(request[4] + b) != 0
    own = (log_q == float("-inf")) | greedy | coupled
    mode = tl.where(own, 0, tl.where(real, 2, 1)).to(tl.int32)
    q_row, q_threshold, q_lse = q[0], float("-inf"), 0.0
    if HAS_Q:
        if mode == 2:
            q_row = q[0] + slot * q[1] + k * q[2]
            q_threshold = tl.load(q[4] + slot * q[6] + k)
            q_lse = (tl.load(q[5] + slot * q[6] + k) * LOG2E).to(tl.float32)
    law = (mode, token, q_row, q[3], q_threshold, q_lse, weight)
    return law, tl.where(mode == 0, TARGET_TOKEN, RESIDUAL_TOKEN), mode


@triton.jit
def _is_dense(found, row, FILTERS: tl.constexpr):
    if FILTERS:
        return tl.load(found[2] + row) < 0
    else:
        return row >= 0


@triton.jit
def _store_tokens(b, k, token, finite, num, request, verdict, K, KP: tl.constexpr):
    """Accepted drafts, the token after them, then -1."""
    i = tl.arange(0, KP)
    draft = tl.load(request[3] + b * K + i, mask=(i < k) & (i < K), other=-1).to(tl.int64)
    row = tl.where(i < k, draft, tl.where((i == k) & finite, token, -1))
    to = verdict[0] + b * (K + 1) + i
    tl.store(to, row.to(verdict[0].dtype.element_ty), mask=i <= K)
    tl.store(verdict[1] + b, k.to(tl.int64))
    tl.store(verdict[2] + b, finite)


@triton.jit
def _plan(b, to, needed, i, row, slot, scale, threshold, lse, weight, token, request, q, work, K, ALL: tl.constexpr, HAS_Q: tl.constexpr):  # noqa: E501
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
    first, num, slot, position, key, scale, greedy, coupled, flat, rule = _request(
        b, request, state, V, RAGGED
    )
    i = tl.arange(0, KP)
    lse, threshold = _row_lse(first, i, num, out, found, NB, FILTERS, KP, NBP)
    k = tl.full((), 0, tl.int32)
    pending = tl.full((), 0, tl.int32)
    if RAGGED:
        token = tl.load(request[3] + b * K + i, mask=i < num, other=-1).to(tl.int64)
        known = token >= 0
        inside = known & (token < V)
        x = load_at(logits, stride, first + tl.minimum(i, num), tl.where(inside, token, 0), inside, V, edits,
                    MASKS, ENTRIES)  # fmt: skip
        usable = inside & (x >= threshold) & (x > float("-inf")) & (lse - lse == 0)
        log_p = tl.where(usable, x * scale - lse, float("-inf"))
        log_q = tl.where(known, 0.0, float("-inf"))
        if HAS_Q:
            real = (tl.load(request[4] + b) != 0) & (not greedy) & (not coupled)
            log_q = _log_q(q, slot, i, token, known, real, scale)
        zero = tl.full((), 0, tl.int32)
        at = (key, (position + i).to(tl.int32), i, zero + ACCEPT)
        u = uniform_at(at, i * 0, FP64)
        k = rules.standard(log_p, log_q, _log2_of(u, FP64), i, num)
        if RATES:
            rate = tl.load(request[5] + i, mask=i < num, other=0.0)
            if rule == SYNTHETIC_RULE:
                k = rules.synthetic(rate, log_q, u.to(tl.float64), i, num)
        weight = tl.zeros((KP,), tl.float32)
        if rule == BLOCK_RULE:
            weight = rules.block_weights(log_p, log_q)
            k = rules.block_all(weight, log_q, _log2_of(u, FP64), i, num)
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
        law, stream, mode = _law(b, k, slot, num, greedy, coupled, request, q, work, K, HAS_Q)
        row = first + k
        if ((mode == 2) | ((mode == 1) & flat)) & _is_dense(found, row, FILTERS):
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
    _store_tokens(b, k, drawn, not broken, num, request, verdict, K, KP)
    tl.store(work[0] + b, tl.where(broken & (pending == ONE_ROW), DONE, pending))


@triton.jit
def _compact_mass(row, count, threshold, scale, lse, found, law):
    """Sum of max(w p - q, 0) over a short list."""
    c = tl.arange(0, CAPACITY)
    x = tl.load(found[4] + row * CAPACITY + c, mask=c < count, other=float("-inf"))
    id_ = tl.load(found[3] + row * CAPACITY + c, mask=c < count, other=2147483647)
    return tl.exp2(log2_sum(weigh(x, id_, threshold, scale, lse, law)))


@triton.jit
def _block_rule(b, first, num, slot, position, key, scale, greedy, coupled, request, q, out, found, work, NB, K, FILTERS: tl.constexpr, HAS_Q: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr):  # noqa: E501
    """n_accept of the block rule, from the residual masses of all rows that have a q."""
    i = tl.arange(0, KP)
    log_p = tl.load(work[2] + b * K + i, mask=i < num, other=float("-inf"))
    log_q = tl.load(work[3] + b * K + i, mask=i < num, other=float("-inf"))
    weight = tl.load(work[4] + b * (K + 1) + i, mask=i <= num, other=float("-inf"))
    mass = tl.exp2(weight) * (1 - tl.exp2(log_p))  # one-hot q
    if HAS_Q:
        if tl.load(request[4] + b) != 0:
            row = first + i
            j = tl.arange(0, NBP)
            part = tl.load(
                out[0] + row[:, None] * NB + j[None, :],
                mask=(i < num)[:, None] & (j < NB)[None, :],
                other=float("-inf"),
                cache_modifier=".cg",
            )
            mass = tl.where(weight > float("-inf"), tl.sum(tl.exp2(part), axis=1), 0.0)
            if FILTERS:
                for k in range(0, num):
                    count = tl.load(found[2] + first + k)
                    if count >= 0:
                        law, _, _ = _law(
                            b, k, slot, num, greedy, coupled, request, q, work, K, HAS_Q
                        )
                        threshold = tl.load(found[0] + first + k)
                        lse = tl.load(found[1] + first + k)
                        own = _compact_mass(
                            first + k, count, threshold, scale, lse, found, law
                        )
                        mass = tl.where(i == k, own, mass)
    tl.store(work[2] + b * K + i, mass, mask=i < num)
    tl.debug_barrier()
    follows = i + 1 < num
    mass_next = tl.load(work[2] + b * K + i + 1, mask=follows, other=0.0)
    q_next = tl.load(work[3] + b * K + i + 1, mask=follows, other=float("-inf"))
    log_next = tl.load(work[4] + b * (K + 1) + i + 1, mask=i < num, other=float("-inf"))
    zero = tl.full((), 0, tl.int32)
    at = (key, (position + i).to(tl.int32), i, zero + ACCEPT)
    log_u = _log2_of(uniform_at(at, i * 0, FP64), FP64)
    return rules.block(
        log_next, mass_next, q_next == float("-inf"), log_q, log_u, i, num
    )


@triton.jit
def _residual_part(logits, stride, row, part, b, r, V, NB, edits, q, out, at, flat, work, K, MASKS: tl.constexpr, ENTRIES: tl.constexpr, FILTERS: tl.constexpr, PER: tl.constexpr, FP64: tl.constexpr):  # noqa: E501
    """Residual masses of PER blocks; with flat noise the best scores too."""
    whole, fraction = work[5] + (b * K + r) * 4, work[6] + (b * K + r) * 6
    law = (
        tl.load(whole + 1).to(tl.int32),
        tl.load(whole + 2),
        q[0] + tl.load(whole + 3),
        q[3],
        tl.load(fraction + 3),
        tl.load(fraction + 4),
        tl.load(fraction + 5),
    )
    width: tl.constexpr = PER * BLOCK
    scale, threshold, lse = tl.load(fraction), tl.load(fraction + 1), tl.load(fraction + 2)
    start = part * width
    x = load_span(logits, stride, row, start, V, edits, width, MASKS, ENTRIES, "evict_first")
    off = start + tl.arange(0, width)
    j = part * PER + tl.arange(0, PER)
    mass = residual_masses(x, off, threshold, scale, lse, law, PER, BLOCK)
    tl.store(out[0] + row * NB + j, mass, mask=j < NB)
    if FILTERS:
        if flat:
            weight = weigh(x, off, threshold, scale, lse, law)
            score = weight + gumbel_span(at, start, width, FP64)
            best = tl.max(tl.reshape(score, (PER, BLOCK)), axis=1).to(tl.float32)
            tl.store(out[1] + row * NB + j, best, mask=j < NB)


@triton.jit
def residual_kernel(
    logits, stride, request, state, edits, q, out, found, work, verdict, V, NB, K, parts, rows,
    MASKS: tl.constexpr, ENTRIES: tl.constexpr, FILTERS: tl.constexpr, HAS_Q: tl.constexpr,
    KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Programs: (request, planned row of it, blocks): residual masses; a request's last one draws.

    Requests come in reverse: the rows that the scan read last may still be in the L2 cache.
    """
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    part, item = pid % parts, pid // parts
    b, r = item // rows, item % rows
    pending = tl.load(work[0] + b)
    row = tl.load(work[5] + (b * K + r) * 4)
    if (pending == DONE) | ((pending == ONE_ROW) & (r > 0)):
        return
    i = tl.arange(0, KP)
    expected = tl.full((), 1, tl.int32)
    if pending == ALL_ROWS:
        planned = tl.load(work[5] + (b * K + i) * 4, mask=i < rows, other=-1)
        expected = tl.sum((planned >= 0).to(tl.int32), axis=0)
    if (row < 0) & ((expected > 0) | (part + r > 0)):
        return
    zero = tl.full((), 0, tl.int32)
    if row >= 0:
        flat_noise, summed_flat = (zero, zero, zero, zero), False
        if FILTERS:
            own = tl.load(request[1] + b)
            summed_flat = is_flat(state, own, V)
            position = tl.load(request[2] + b) + row - first_row(request[0], b, True)
            flat_noise = (tl.load(state[0] + own), position.to(tl.int32), zero,
                          zero + RESIDUAL_TOKEN)  # fmt: skip
        _residual_part(logits, stride, row, part, b, r, V, NB, edits, q, out, flat_noise,
                       summed_flat, work, K, MASKS, ENTRIES, FILTERS, PER, FP64)  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(work[1] + b, 1, sem="acq_rel") != expected * parts - 1:
            return
        tl.store(work[1] + b, 0)
    first, num, slot, position, key, scale, greedy, coupled, flat, rule = _request(
        b, request, state, V, True
    )
    k = tl.load(verdict[1] + b).to(tl.int32)
    if pending == ALL_ROWS:
        k = _block_rule(b, first, num, slot, position, key, scale, greedy, coupled, request, q,
                        out, found, work, NB, K, FILTERS, HAS_Q, KP, NBP, FP64)  # fmt: skip
    law, stream, mode = _law(b, k, slot, num, greedy, coupled, request, q, work, K, HAS_Q)
    at_ = (key, (position + k).to(tl.int32), zero)
    token = draw(logits, stride, first + k, V, edits, out, found, NB, scale, greedy, flat, law,
                 at_, stream, stream + 1, MASKS, ENTRIES, FILTERS, NBP, FP64)  # fmt: skip
    lse = tl.load(found[1] + first + i, mask=i <= k, other=0.0)
    finite = tl.sum((lse - lse != 0).to(tl.int32), axis=0) == 0
    _store_tokens(b, k, token, finite, num, request, verdict, K, KP)
