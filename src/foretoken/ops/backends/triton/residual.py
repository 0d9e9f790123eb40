"""The pass over p and q together, and the draw of what `decide.py` planned.

Many programs sum a request's residual, and the last one to finish settles the request: the block
rule, and the draw. As a launch of its own that end would be the fourth. A request that has nothing
to sum is drawn by its first program, beside the others' pass.

Tuples as in `request.py`. Shapes: B requests, K most drafts, KP a power of 2 above it, N rows, V
vocabulary, NB blocks of a row, C entries of a short list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton import rules
from foretoken.ops.backends.triton.draw import draw, lots, residual_masses, weigh
from foretoken.ops.backends.triton.noise import (
    LOG2E,
    gumbel_span,
    uniform_at,
)
from foretoken.ops.backends.triton.request import (
    ACCEPT,
    ALL_ROWS,
    DONE,
    DRAW,
    FRACTION,
    HEAD,
    RESIDUAL_TOKEN,
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
    BLOCK,
    CAPACITY,
    CHUNK,
    is_flat,
    load_span,
    log2_sum,
    wait_for_writes,
)


@triton.jit
def _law_after(b, k, slot, num, request, q, work, K, HAS_Q: tl.constexpr):
    """Under BLOCK, the law of the token after k accepted drafts; see `draw`."""
    token = tl.full((), -1, tl.int64)
    log_q, weight = float("-inf"), 0.0
    real = False
    if k < num:
        token = tl.load(request[3] + b * K + k).to(tl.int64)
        log_q = tl.load(fraction_of(work, b, K) + K + k)
        weight = tl.load(fraction_of(work, b, K) + 2 * K + k)
        if HAS_Q:
            real = tl.load(request[4] + b) != 0
    mode = tl.where(log_q == float("-inf"), 0, tl.where(real, 2, 1)).to(tl.int64)
    q_at, q_threshold, q_lse = tl.full((), 0, tl.int64), 0.0, 0.0
    if HAS_Q:
        if mode == 2:
            q_at = slot * q[1] + k * q[2]
            q_threshold = tl.load(q[4] + slot * q[6] + k)
            q_lse = (tl.load(q[5] + slot * q[6] + k) * LOG2E).to(tl.float32)
    return mode, token, q_at, q_threshold, q_lse, weight


@triton.jit
def _compact_mass(row, count, scale, found, law):
    """Sum of max(w p - q, 0) over a short list."""
    c = tl.arange(0, CAPACITY)
    x = tl.load(found[4] + row * CAPACITY + c, mask=c < count, other=float("-inf"))
    id_ = tl.load(found[3] + row * CAPACITY + c, mask=c < count, other=2147483647)
    threshold, lse = tl.load(found[0] + row), tl.load(found[1] + row)
    return tl.exp2(log2_sum(weigh(x, id_, threshold, scale, lse, law)))


@triton.jit
def _block_rule(
    b, first, num, slot, position, key, scale, request, q, out, found, work, NB, K,
    FILTERS: tl.constexpr, HAS_Q: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr,
    FP64: tl.constexpr,
):  # fmt: skip
    """n_accept of the block rule, from the residual masses of all rows that have a q."""
    i = tl.arange(0, KP)
    logs = fraction_of(work, b, K) + i
    log_p = tl.load(logs, mask=i < num, other=float("-inf"))
    log_q = tl.load(logs + K, mask=i < num, other=float("-inf"))
    weight = tl.load(logs + 2 * K, mask=i <= num, other=float("-inf"))
    log_next = tl.load(logs + 2 * K + 1, mask=i < num, other=float("-inf"))
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
                for k in range(num):
                    count = tl.load(found[2] + first + k)
                    if count >= 0:
                        mode, token, q_at, q_threshold, q_lse, w = _law_after(
                            b, k, slot, num, request, q, work, K, HAS_Q
                        )
                        law = (mode, token, q[0] + q_at, q[3], q_threshold, q_lse, w)
                        own = _compact_mass(first + k, count, scale, found, law)
                        mass = tl.where(i == k, own, mass)
    lse = tl.load(found[1] + first + i, mask=i < num, other=0.0)
    mass_next = shifted(tl.where((i < num) & (lse - lse == 0), mass, 0.0), i, 1, KP)
    ends = shifted(((i < num) & (log_q > float("-inf"))).to(tl.float32), i, 1, KP) == 0
    zero = tl.full((), 0, tl.int32)
    at = (key, (position + i).to(tl.int32), i, zero + ACCEPT)
    log_u = log2_of(uniform_at(at, i * 0, FP64), FP64)
    return rules.block(log_next, mass_next, ends, log_q, log_u, i, num)


@triton.jit
def residual_part(
    logits, stride, row, part, V, NB, edits, out, at_, flat, scale, threshold, lse, law,
    MASKS: tl.constexpr, ENTRIES: tl.constexpr, FILTERS: tl.constexpr, PER: tl.constexpr,
    STORE: tl.constexpr, FP64: tl.constexpr,
):  # fmt: skip
    """(masses, best scores, logits) of PER blocks of the residual; `STORE` the first two."""
    width: tl.constexpr = PER * BLOCK
    start = part * width
    x = load_span(logits, stride, row, start, V, edits, width, MASKS, ENTRIES, "evict_first")
    off = start + tl.arange(0, width)
    j = part * PER + tl.arange(0, PER)
    mass = residual_masses(x, off, threshold, scale, lse, law, PER, BLOCK)
    best = mass
    if STORE:
        tl.store(out[0] + row * NB + j, mass, mask=j < NB)
    if FILTERS:
        if flat:
            at = (at_[0], at_[1], at_[2], tl.full((), 0, tl.int32) + RESIDUAL_TOKEN)
            score = weigh(x, off, threshold, scale, lse, law) + gumbel_span(at, start, width, FP64)
            best = tl.max(tl.reshape(score, (PER, BLOCK)), axis=1).to(tl.float32)
            if STORE:
                tl.store(out[1] + row * NB + j, best, mask=j < NB)
    return mass, best, x


@triton.jit
def residual_kernel(
    given, parts, rows,
    MASKS: tl.constexpr, ENTRIES: tl.constexpr, FILTERS: tl.constexpr, HAS_Q: tl.constexpr,
    KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr, PER: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, planned row of it, blocks). What a program needs comes from the plan.

    given: as of `decide_kernel`.

    Requests come in reverse: the rows that the scan read last may still be in the L2 cache. Rows 0
    come last: under BLOCK none but them can be skipped, where the rule, which needs the masses of
    the others alone, has accepted a draft.
    """
    logits, stride, request, state, edits, q, out, found, work, verdict, V, NB, K = given
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    part, item = pid % parts, pid // parts
    requests = tl.num_programs(0) // (parts * rows)
    r, b = item // requests, item % requests
    slot = tl.load(request[1] + b)
    key, greedy = tl.load(state[0] + slot), tl.load(state[1] + slot) == 0
    flat = is_flat(state, slot, V)
    wait_for_writes(OVERLAP)
    whole, fraction = whole_of(work, b, K), fraction_of(work, b, K)
    plan, numbers = whole + HEAD + r * WHOLE, fraction + 3 * K + 1 + r * FRACTION
    pending, row = tl.load(whole, cache_modifier=".cg"), tl.load(plan)
    mode, token, q_at = tl.load(plan + 1), tl.load(plan + 2), tl.load(plan + 3)
    position, k = tl.load(plan + 4), tl.load(verdict[1] + b).to(tl.int32)
    scale, threshold, lse = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    q_threshold, q_lse, w = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    if (pending == DONE) | ((pending != ALL_ROWS) & (r > 0)) | ((pending == DRAW) & (part > 0)):
        return
    i = tl.arange(0, KP)
    zero = tl.full((), 0, tl.int32)
    counter, expected, others = whole + 1, zero + parts, zero
    if pending == ALL_ROWS:
        planned = (tl.load(whole + HEAD + i * WHOLE, mask=i < rows, other=-1) >= 0).to(tl.int32)
        others = tl.sum(tl.where(i > 0, planned, 0), axis=0)
        if (row < 0) & ((tl.sum(planned, axis=0) > 0) | (part + r > 0)):
            return
        expected = others * parts
        if r == 0:
            counter, expected = whole + 2, parts + tl.minimum(others, 1)
    at_ = (key, position.to(tl.int32), zero)
    law = (mode, token, q[0] + q_at, q[3], q_threshold, q_lse, w)
    if (row >= 0) & (pending != DRAW):
        residual_part(logits, stride, row, part, V, NB, edits, out, at_, flat, scale, threshold,
                      lse, law, MASKS, ENTRIES, FILTERS, PER, True, FP64)  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") != expected - 1:
            return
    finite = pending != DONE
    if pending == ALL_ROWS:
        first, num, slot, position, key, scale, greedy, _, flat, _ = read_request(
            b, request, state, V, True, CHUNK
        )
        k = zero
        if (r > 0) | (others == 0):
            k = _block_rule(b, first, num, slot, position, key, scale, request, q, out, found, work,
                            NB, K, FILTERS, HAS_Q, KP, NBP, FP64)  # fmt: skip
            lse_ = tl.load(found[1] + first + i, mask=i <= k, other=0.0)
            finite = tl.sum((lse_ - lse_ != 0).to(tl.int32), axis=0) == 0
            store_prefix(b, k, finite, request, verdict, K, KP)
            if (k == 0) & (others > 0) & (tl.load(whole + HEAD) >= 0):
                tl.debug_barrier()
                if tl.atomic_add(whole + 2, 1, sem="acq_rel") != parts:
                    return  # the last program of row 0 will draw
            tl.store(whole, zero.to(tl.int64) + DONE)
        else:
            finite = tl.load(verdict[2] + b) != 0
        mode, token, q_at, q_threshold, q_lse, w = _law_after(
            b, k, slot, num, request, q, work, K, HAS_Q
        )
        row, position = first + k, position + k
    law = (mode, token, q[0] + q_at, q[3], q_threshold, q_lse, w)
    stream = tl.where(mode == 0, TARGET_TOKEN, RESIDUAL_TOKEN)
    at_ = (key, position.to(tl.int32), zero)
    drawn = draw(logits, stride, row, V, edits, out, found, NB, scale, greedy, flat, law, at_,
                 stream, stream + 1, lots(at_, stream + 1, NBP, FP64), MASKS, ENTRIES, FILTERS, NBP,
                 FP64)  # fmt: skip
    store_token(b, k, drawn, finite, verdict, K)
