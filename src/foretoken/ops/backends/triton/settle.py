"""Verification of few requests in one launch after the scan: a program takes one of their blocks.

Each program comes to the same decision by itself, draws the best token of its block, and the last
one of a request compares: one hand-over from kernel to kernel less, and no draw at the end. For
many requests that is wasted work: with such programs for the residual alone, 64 took 89 us instead
of 77. The block rule, which needs the masses of all rows first, goes through `residual.py`.

All programs of a request must decide alike, though others of it are further on: what one writes
before all have arrived is the very number that was there (`found[1]`), or is read by no decision.

Tuples as in `request.py`, but `work` = (counter_B, candidate): the programs that arrived, zeroed by
the scan, and of each block float64 (score, token). Shapes: as there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.decide import decision, draw_now, value_at
from foretoken.ops.backends.triton.draw import draw, lots, weigh
from foretoken.ops.backends.triton.noise import argmax_with, gumbel_at, noise_span
from foretoken.ops.backends.triton.request import (
    DRAW,
    ONE_ROW,
    RESIDUAL_TOKEN,
    TARGET_TOKEN,
    store_prefix,
    store_token,
)
from foretoken.ops.backends.triton.residual import residual_part
from foretoken.ops.backends.triton.rows import BLOCK

FEW = tl.constexpr(4)  # requests, a power of 2


@triton.jit
def _store_candidate(
    x, block, mass, best, at_, flat, threshold, scale, lse, law, to, FP64: tl.constexpr
):
    """The token of one block, and the score with which it competes for its row."""
    zero = tl.full((), 0, tl.int32)
    at = (at_[0], at_[1], at_[2], zero + RESIDUAL_TOKEN + 1)
    score = mass + gumbel_at(at, block + tl.arange(0, 1), FP64)
    score = tl.where(flat, best.to(tl.float64), score.to(tl.float64))
    at = (at_[0], at_[1], at_[2], zero + RESIDUAL_TOKEN)
    first = block * BLOCK
    weight = weigh(x, first + tl.arange(0, BLOCK), threshold, scale, lse, law)
    token = first + argmax_with(weight, noise_span(at, first, BLOCK, FP64), FP64)
    tl.store(to, tl.max(tl.where(mass > float("-inf"), score, float("-inf")), axis=0))
    tl.store(to + 1, token.to(tl.float64))


@triton.jit
def _better(score, token, other_score, other_token):
    """The larger score and its token, the lower one of equals."""
    first = (score > other_score) | ((score == other_score) & (token < other_token))
    return tl.where(first, score, other_score), tl.where(first, token, other_token)


@triton.jit
def _best_candidate(at, parts, NBP: tl.constexpr):
    """(token, whether no block has one) of a row's candidates."""
    j = tl.arange(0, NBP)
    score = tl.load(at + 2 * j, mask=j < parts, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(at + 2 * j + 1, mask=j < parts, other=0.0, cache_modifier=".cg")
    best, token = tl.reduce((score, token), 0, _better)
    return token.to(tl.int64), best == float("-inf")


@triton.jit
def settle_kernel(
    given, MASKS: tl.constexpr, ENTRIES: tl.constexpr, FILTERS: tl.constexpr, HAS_Q: tl.constexpr,
    RATES: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, block). `given` as of `decide_kernel`."""
    logits, stride, asked, _, edits, q, out, found, work, verdict, V, NB, K = given
    b, part = tl.program_id(0) // NB, tl.program_id(0) % NB
    request, rows, k, pending, mode, walks = decision(
        b,
        given,
        True,
        MASKS,
        ENTRIES,
        FILTERS,
        HAS_Q,
        RATES,
        True,
        False,
        FEW,
        KP,
        NBP,
        FP64,
        OVERLAP,
    )
    first, _, slot, position, key, scale, greedy, flat = request
    i = tl.arange(0, KP)
    row, zero = first + k, tl.full((), 0, tl.int32)
    threshold, lse = value_at(rows[1], i, k), value_at(rows[2], i, k)
    law = (mode, value_at(rows[0], i, k), q[0] + slot * q[1] + k * q[2], q[3],
           value_at(rows[3], i, k), value_at(rows[4], i, k), 0.0)  # fmt: skip
    at_ = (key, (position + k).to(tl.int32), zero)
    finite = tl.sum(((i <= k) & (rows[2] - rows[2] != 0)).to(tl.int32), axis=0) == 0
    if part == 0:
        if walks == 0:
            store_prefix(b, k, finite, asked, verdict, K, KP)
    drawn = tl.full((), -1, tl.int64)
    undrawn = (pending == ONE_ROW) | (pending == DRAW)
    if pending == ONE_ROW:
        mass, best, x = residual_part(logits, stride, row, part, V, NB, edits, out, at_, flat,
                                      scale, threshold, lse, law, MASKS, ENTRIES, FILTERS, 1,
                                      False, FP64)  # fmt: skip
        candidates = work[1] + b.to(tl.int64) * NB * 2
        _store_candidate(x, part, mass, best, at_, flat, threshold, scale, lse, law,
                         candidates + 2 * part, FP64)  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(work[0] + b, 1, sem="acq_rel") != NB - 1:
            return
        drawn, undrawn = _best_candidate(candidates, NB, NBP)
        if undrawn:  # tell `draw`; not before all have read the masses of p for their decision
            j = tl.arange(0, NBP)
            tl.store(out[0] + row * NB + j, float("-inf"), mask=j < NB)
            tl.debug_barrier()
    else:
        if part > 0:
            return
    if undrawn:
        stream = tl.where(mode == 0, TARGET_TOKEN, RESIDUAL_TOKEN)
        drawn = draw(logits, stride, row, V, edits, out, found, NB, scale, greedy, flat, law, at_,
                     stream, stream + 1, lots(at_, stream + 1, NBP, FP64), MASKS, ENTRIES, FILTERS,
                     NBP, FP64)  # fmt: skip
    if walks:
        k, drawn = draw_now(given, request, rows, k, mode, walks, MASKS, ENTRIES, FILTERS, KP, NBP,
                            FP64)  # fmt: skip
        finite = tl.sum(((i <= k) & (rows[2] - rows[2] != 0)).to(tl.int32), axis=0) == 0
        store_prefix(b, k, finite, asked, verdict, K, KP)
    store_token(b, k, drawn, finite, verdict, K)
