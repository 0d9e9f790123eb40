"""The pass over p and q together: residual masses of the rows that `decide.py` planned.

The last program of a request to finish settles it: the block rule, and the draw. As a launch of its
own that end would be the fourth.

Tuples as in `request.py`. Shapes: B requests, K most drafts, KP a power of 2 above it, N rows, V
vocabulary, NB blocks of a row, C entries of a short list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton import rules
from foretoken.ops.backends.triton.draw import draw, residual_masses, weigh
from foretoken.ops.backends.triton.filters import CAPACITY
from foretoken.ops.backends.triton.noise import gumbel_span, uniform_at
from foretoken.ops.backends.triton.request import (
    ACCEPT,
    ALL_ROWS,
    DONE,
    ONE_ROW,
    RESIDUAL_TOKEN,
    law_after,
    log2_of,
    read_request,
    store_tokens,
)
from foretoken.ops.backends.triton.rows import BLOCK, first_row, is_flat, load_span, log2_sum


@triton.jit
def _compact_mass(row, count, threshold, scale, lse, found, law):
    """Sum of max(w p - q, 0) over a short list."""
    c = tl.arange(0, CAPACITY)
    x = tl.load(found[4] + row * CAPACITY + c, mask=c < count, other=float("-inf"))
    id_ = tl.load(found[3] + row * CAPACITY + c, mask=c < count, other=2147483647)
    return tl.exp2(log2_sum(weigh(x, id_, threshold, scale, lse, law)))


@triton.jit
def _block_rule(
    b,
    first,
    num,
    slot,
    position,
    key,
    scale,
    greedy,
    coupled,
    request,
    q,
    out,
    found,
    work,
    NB,
    K,
    FILTERS: tl.constexpr,
    HAS_Q: tl.constexpr,
    KP: tl.constexpr,
    NBP: tl.constexpr,
    FP64: tl.constexpr,
):
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
                for k in range(num):
                    count = tl.load(found[2] + first + k)
                    if count >= 0:
                        law, _, _ = law_after(
                            b, k, slot, num, greedy, coupled, request, q, work, K, HAS_Q
                        )
                        threshold = tl.load(found[0] + first + k)
                        lse = tl.load(found[1] + first + k)
                        own = _compact_mass(first + k, count, threshold, scale, lse, found, law)
                        mass = tl.where(i == k, own, mass)
    tl.store(work[2] + b * K + i, mass, mask=i < num)
    tl.debug_barrier()
    follows = i + 1 < num
    mass_next = tl.load(work[2] + b * K + i + 1, mask=follows, other=0.0)
    q_next = tl.load(work[3] + b * K + i + 1, mask=follows, other=float("-inf"))
    log_next = tl.load(work[4] + b * (K + 1) + i + 1, mask=i < num, other=float("-inf"))
    zero = tl.full((), 0, tl.int32)
    at = (key, (position + i).to(tl.int32), i, zero + ACCEPT)
    log_u = log2_of(uniform_at(at, i * 0, FP64), FP64)
    return rules.block(log_next, mass_next, q_next == float("-inf"), log_q, log_u, i, num)


@triton.jit
def _residual_part(
    logits,
    stride,
    row,
    part,
    b,
    r,
    V,
    NB,
    edits,
    q,
    out,
    at,
    flat,
    work,
    K,
    MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    FILTERS: tl.constexpr,
    PER: tl.constexpr,
    FP64: tl.constexpr,
):
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
    first, num, slot, position, key, scale, greedy, coupled, flat, _ = read_request(
        b, request, state, V, True
    )
    k = tl.load(verdict[1] + b).to(tl.int32)
    if pending == ALL_ROWS:
        k = _block_rule(b, first, num, slot, position, key, scale, greedy, coupled, request, q,
                        out, found, work, NB, K, FILTERS, HAS_Q, KP, NBP, FP64)  # fmt: skip
    law, stream, _ = law_after(b, k, slot, num, greedy, coupled, request, q, work, K, HAS_Q)
    at_ = (key, (position + k).to(tl.int32), zero)
    token = draw(logits, stride, first + k, V, edits, out, found, NB, scale, greedy, flat, law,
                 at_, stream, stream + 1, MASKS, ENTRIES, FILTERS, NBP, FP64)  # fmt: skip
    lse = tl.load(found[1] + first + i, mask=i <= k, other=0.0)
    finite = tl.sum((lse - lse != 0).to(tl.int32), axis=0) == 0
    store_tokens(b, k, token, finite, num, request, verdict, K, KP)
