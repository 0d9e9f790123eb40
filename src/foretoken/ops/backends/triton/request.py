"""A request to verify: its state, what passes between the kernels, and what is written back.

Tuples:
    request = (num_B, slot_B, position_B, token_BK, real_q_B, rate_K)
    q       = (logits_SKV, slot stride, draft stride, V', threshold_SK, lse_SK, their slot stride)
    work    = (whole, fraction): int64 and float32 numbers, one stretch of each per request:
              whole    = pending, the programs that arrived, those of row 0 under BLOCK (HEAD
                         numbers), then WHOLE numbers per planned row:
                         row or -1, mode, token, where its q begins, position
              fraction = log_p_K, log_q_K, weight_K1 (logs in base 2, under BLOCK alone), then
                         FRACTION per planned row: scale, threshold, lse, those of q, log2 w
    verdict = (token_BK1, n_accept_B, finite_B)

Shapes: B requests, K most drafts, KP a power of 2 above it, N rows, V vocabulary, NB blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.noise import LOG2E, log2
from foretoken.ops.backends.triton.rows import first_row, is_flat

TARGET_TOKEN, RESIDUAL_TOKEN = tl.constexpr(0), tl.constexpr(2)  # the block stream is one above
ACCEPT = tl.constexpr(6)
BLOCK_RULE, COUPLED_RULE, SYNTHETIC_RULE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
HEAD, WHOLE, FRACTION = tl.constexpr(3), tl.constexpr(5), tl.constexpr(6)

# What is pending after the decision: nothing; a draw; one row's residual; the block rule itself.
DONE, DRAW, ONE_ROW, ALL_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def whole_of(work, b, K):
    """Where request b's whole numbers begin."""
    return work[0] + b.to(tl.int64) * (HEAD + WHOLE * K)


@triton.jit
def fraction_of(work, b, K):
    """Where request b's fractions begin."""
    return work[1] + b.to(tl.int64) * (1 + (3 + FRACTION) * K)


@triton.jit
def read_request(b, request, state, V, RAGGED: tl.constexpr, CHUNK: tl.constexpr):
    """(first row, number of drafts, slot, position, key, scale, greedy, coupled, flat, rule)."""
    slot = tl.load(request[1] + b)
    temperature = tl.load(state[1] + slot)
    rule = tl.load(state[5] + slot)
    greedy = temperature == 0
    num = tl.full((), 0, tl.int32)
    if RAGGED:
        num = tl.load(request[0] + b).to(tl.int32)
    return (
        first_row(request[0], b, RAGGED, CHUNK),
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
        return tl.minimum(log2(u), -1e-8)


@triton.jit
def shifted(x, i, by, KP: tl.constexpr):
    """x_{i + by} of a vector [KP], 0 where there is none."""
    j = tl.arange(0, KP)
    return tl.sum(tl.where(j[None, :] == i[:, None] + by, x[None, :], 0.0), axis=1)


@triton.jit
def store_prefix(b, k, finite, request, verdict, K, KP: tl.constexpr):
    """All of a verdict but the token after the k accepted drafts; behind that comes -1."""
    i = tl.arange(0, KP)
    draft = tl.load(request[3] + b * K + i, mask=(i < k) & (i < K), other=-1).to(tl.int64)
    row = tl.where(i < k, draft, -1)
    to = verdict[0] + b * (K + 1) + i
    tl.store(to, row.to(verdict[0].dtype.element_ty), mask=(i <= K) & (i != k))
    tl.store(verdict[1] + b, k.to(tl.int64))
    tl.store(verdict[2] + b, finite)


@triton.jit
def store_token(b, k, token, finite, verdict, K):
    """The token after k accepted drafts; -1 if what decides is not finite."""
    token = tl.where(finite, token, -1)
    tl.store(verdict[0] + b * (K + 1) + k, token.to(verdict[0].dtype.element_ty))
