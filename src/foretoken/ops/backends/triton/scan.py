"""The one pass over all logits: the mass of every block of 1024, and the maxima of groups of 64.

One program of one warp takes two blocks: without a barrier between warps the pass runs at the speed
of memory (H200, 1024 x 151 936: float32 137 us and bfloat16 75, where reading alone takes 135 and
69; four warps a program took 164 and 105).

Shapes: B requests, N rows, V vocabulary, NB blocks and NG groups of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.noise import LOG2E, gumbel_span
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    GROUP,
    first_row,
    is_filtered,
    is_flat,
    let_next_start,
    load_span,
    log2_sum,
    wait_for_writes,
)

BLOCKS_PER_PROGRAM = 2
# About what runs at once on one GPU: up to here a program takes one block, and of more the last so
# many let the next kernel start.
FEW_PROGRAMS = tl.constexpr(4096)


@triton.jit
def block_value(
    x, scale, at, first, WIDTH: tl.constexpr, greedy, flat, FLAT: tl.constexpr, FP64: tl.constexpr
):
    """What is kept of a block: (mass, best score).

    mass: log2 of the sum of 2^(x scale), at T=0 the maximum. best: of flat noise, max(x scale + G).
    """
    best = tl.full((), float("-inf"), tl.float32)
    if greedy:
        top = tl.max(x, axis=0)
        broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
        mass = tl.where(broken, float("nan"), top)
    else:
        scaled = x * scale
        mass = log2_sum(scaled)
        if FLAT:
            if flat:
                score = scaled + gumbel_span(at, first, WIDTH, FP64)
                best = tl.max(score, axis=0).to(tl.float32)
    return mass, best


@triton.jit
def flat_noise(state, slot, position_ptr, index_ptr, b, i, token_stream, DRAFT: tl.constexpr):
    """The token stream of row i of request b; of drafts under COUPLED (2) it is the target's."""
    zero = tl.full((), 0, tl.int32)
    index = zero
    stream = zero + token_stream
    if DRAFT:
        index = tl.load(index_ptr + b).to(tl.int32)
        if tl.load(state[5] + slot) == 2:
            index, stream = zero, zero
    return (tl.load(state[0] + slot), (tl.load(position_ptr + b) + i).to(tl.int32), index, stream)


@triton.jit
def scan_kernel(
    logits, stride, num_ptr, slot_ptr, position_ptr, index_ptr, state, edits, out, found, cache,
    counter_ptr, V, NB, NG, programs, token_stream, K1: tl.constexpr, MASKS: tl.constexpr,
    ENTRIES: tl.constexpr, FILTERS: tl.constexpr, FLAT: tl.constexpr, FP64: tl.constexpr,
    STORE: tl.constexpr, COUNTS: tl.constexpr, DRAFT: tl.constexpr, PER: tl.constexpr,
    EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, row of it, PER blocks of it). `out` = (mass_NJ, best_NJ, gmax_NG).

    Rows with filters get maxima of groups and, in place of best scores, of blocks, and masses
    unless top-k makes them useless; the queue of `filters.py` is emptied. STORE copies raw rows
    into `cache` = (logits, slot stride, draft stride, draft_index_B, ...). COUNTS sets `counter_B`
    to 0.
    """
    pid = tl.program_id(0)
    if EARLY:
        wait_for_writes(OVERLAP)
    if EARLY | (pid >= tl.num_programs(0) - FEW_PROGRAMS):  # the others end before these do
        let_next_start(OVERLAP)  # after the wait: the next one reads what came before this one
    if FILTERS:
        if pid == 0:
            tl.store(found[5], 0)
    part, item = pid % programs, pid // programs
    b, i = item // K1, item % K1
    if COUNTS:
        if (part == 0) & (i == 0):
            tl.store(counter_ptr + b, 0)
    if K1 > 1:
        if i > tl.load(num_ptr + b):
            return
    row = first_row(num_ptr, b, K1 > 1) + i
    slot = tl.load(slot_ptr + b)
    temperature = tl.load(state[1] + slot)
    greedy = temperature == 0
    scale = LOG2E / tl.where(greedy, 1.0, temperature)
    scored = is_flat(state, slot, V)
    filtered, listed = False, False
    if FILTERS:
        filtered = is_filtered(state, slot, V)
        scored = scored & (not filtered)
        listed = filtered & (tl.load(state[2] + slot) > 0) & (tl.load(state[2] + slot) < V)
    at = flat_noise(state, slot, position_ptr, index_ptr, b, i, token_stream, DRAFT)
    for k in tl.static_range(PER):
        j = part * PER + k
        if j < NB:
            first = j * BLOCK
            x = load_span(
                logits, stride, row, first, V, edits, BLOCK, MASKS, ENTRIES, "evict_first"
            )
            if STORE:
                off = first + tl.arange(0, BLOCK)
                to = cache[0] + slot * cache[1] + tl.load(cache[3] + b) * cache[2]
                tl.store(to + off, x.to(cache[0].dtype.element_ty), mask=off < V)
            if not listed:
                mass, best = block_value(x, scale, at, first, BLOCK, greedy, scored, FLAT, FP64)
                tl.store(out[0] + row * NB + j, mass)
                if FLAT:
                    if scored:
                        tl.store(out[1] + row * NB + j, best)
            if FILTERS:
                if filtered:
                    top_G = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
                    group = j * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                    tl.store(out[2] + row * NG + group, top_G, mask=group < NG)
                    broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
                    top = tl.where(broken, float("nan"), tl.max(top_G, axis=0))
                    tl.store(out[1] + row * NB + j, top)
