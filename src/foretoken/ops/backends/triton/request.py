"""A request to verify: its state, the law of the token that ends it, and what is written back.

Tuples:
    request = (num_B, slot_B, position_B, token_BK, real_q_B, rate_K)
    q       = (logits_SKV, slot stride, draft stride, V', threshold_SK, lse_SK, their slot stride)
    work    = (pending_B, arrived_B, log_p_BK, log_q_BK, weight_BK1, plan_BK4, plan_BK6): logs in
              base 2; the plans say which rows the residual pass reads, see `decide.py: _plan`
    verdict = (token_BK1, n_accept_B, finite_B)

Shapes: B requests, K most drafts, KP a power of 2 above it, N rows, V vocabulary, NB blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.noise import LOG2E
from foretoken.ops.backends.triton.rows import first_row, is_flat

TARGET_TOKEN, RESIDUAL_TOKEN = tl.constexpr(0), tl.constexpr(2)  # the block stream is one above
ACCEPT = tl.constexpr(6)
BLOCK_RULE, COUPLED_RULE, SYNTHETIC_RULE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
DONE, ONE_ROW, ALL_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def read_request(b, request, state, V, RAGGED: tl.constexpr):
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
def log2_of(u, FP64: tl.constexpr):
    """log2 of a uniform, below 0 whatever the hardware's rounding: u < 1 must stay so."""
    if FP64:
        return tl.log(u) * LOG2E
    else:
        return tl.minimum(tl.log2(u), -1e-8)


@triton.jit
def law_after(b, k, slot, num, greedy, coupled, request, q, work, K, HAS_Q: tl.constexpr):
    """The law of the token after k accepted drafts (see `draw`), and its streams."""
    token = tl.full((), -1, tl.int64)
    log_q, weight = float("-inf"), 0.0
    real = False
    if k < num:
        token = tl.load(request[3] + b * K + k).to(tl.int64)
        log_q = tl.load(work[3] + b * K + k)
        weight = tl.load(work[4] + b * (K + 1) + k)
        if HAS_Q:
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
def is_dense(found, row, FILTERS: tl.constexpr):
    """Whether a row has no short list of survivors; see `filters.py`."""
    if FILTERS:
        return tl.load(found[2] + row) < 0
    else:
        return row >= 0


@triton.jit
def store_tokens(b, k, token, finite, num, request, verdict, K, KP: tl.constexpr):
    """Accepted drafts, the token after them, then -1."""
    i = tl.arange(0, KP)
    draft = tl.load(request[3] + b * K + i, mask=(i < k) & (i < K), other=-1).to(tl.int64)
    row = tl.where(i < k, draft, tl.where((i == k) & finite, token, -1))
    to = verdict[0] + b * (K + 1) + i
    tl.store(to, row.to(verdict[0].dtype.element_ty), mask=i <= K)
    tl.store(verdict[1] + b, k.to(tl.int64))
    tl.store(verdict[2] + b, finite)
