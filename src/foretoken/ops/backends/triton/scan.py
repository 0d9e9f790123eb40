"""The one pass over all logits: the mass of every block of 1024, and the maxima of groups of 64.

A program is one warp and takes two blocks: without barriers between warps the pass runs at the
speed of memory (decision 010).
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.draw import q_offset
from foretoken.ops.backends.triton.noise import TARGET_TOKEN, Address, gumbel_span
from foretoken.ops.backends.triton.records import Batch, Requests, block_top_NJ

from foretoken.ops.backends.triton.rows import (  # isort: skip
    BLOCK, GROUP, GROUPS, Settings, first_row, let_next_start, load_span, log2_sum, read_settings,
    wait_for_writes,
)  # fmt: skip
from foretoken.ops.backends.triton.rules import COUPLED

BLOCKS_PER_PROGRAM = 2
# About as many programs as a GPU holds. If a scan of one block per program needs no more, it takes
# one block per program. Otherwise only the last FEW_PROGRAMS programs let the next kernel start.
FEW_PROGRAMS = tl.constexpr(4096)


@triton.jit
def scan_kernel(
    batch: Batch, counter_B, parts, token_stream, K1: tl.constexpr,
    FLAT: tl.constexpr, FP64: tl.constexpr, DRAFT: tl.constexpr, PER: tl.constexpr,
    EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, row of it, PER blocks). Writes each block's `mass_NJ` and `best_NJ`.

    Rows with filters get maxima of groups and of blocks instead of best scores; with top-k they
    get no masses, which would be useless. The queue of `filters.py` is emptied.

    counter_B:    None, or set to 0 for `verify.py`
    token_stream: stream of flat noise. FLAT: slots without top-k can draw by flat noise
    DRAFT:        rows are drafts; their raw logits go to the draft cache, if there is one
    EARLY:        the scan can overlap the previous kernel, and every program lets the next start
    """
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows, scratch = batch.rows, batch.scratch
    pid = tl.program_id(0)
    if EARLY:
        wait_for_writes(OVERLAP)
    if EARLY | (pid >= tl.num_programs(0) - FEW_PROGRAMS):  # earlier programs end before these
        let_next_start(OVERLAP)  # after the wait: the next kernel reads what earlier ones wrote
    if scratch.filtered is not None:
        if pid == 0:
            tl.store(scratch.filtered.queue_N1, 0)
    part, item = pid % parts, pid // parts
    b, i = item // K1, item % K1
    if counter_B is not None:
        if (part == 0) & (i == 0):
            tl.store(counter_B + b, 0)
    if K1 > 1:
        if i > tl.load(batch.requests.num_B + b):
            return
    row = first_row(batch.requests, b, K1 > 1) + i
    settings = read_settings(batch.slots, tl.load(batch.requests.slot_B + b), rows.V)
    scored, filtered = settings.flat, False
    if scratch.filtered is not None:
        filtered = settings.filtered
        scored = scored & (not filtered)
    address = token_address(batch.requests, settings, b, i, token_stream, DRAFT)
    for n in tl.static_range(PER):
        j = part * PER + n
        if j < rows.NB:
            x = load_span(rows, row, j * BLOCK, BLOCK, "evict_first")
            if DRAFT:
                if batch.q is not None:
                    index = tl.load(batch.requests.index_B + b)
                    off = j * BLOCK + tl.arange(0, BLOCK)
                    q_row = batch.q.logits_SKV + q_offset(batch.q, settings.slot, index)
                    tl.store(q_row + off, x, mask=off < batch.q.V)
            if not (filtered & settings.counted):
                mass, best = _mass_and_best(x, j * BLOCK, settings, scored, address, FLAT, FP64)
                tl.store(scratch.mass_NJ + row * rows.NB + j, mass)
                if FLAT:
                    if scored:
                        tl.store(scratch.best_NJ + row * rows.NB + j, best)
            if scratch.filtered is not None:
                if filtered:
                    top_G = tl.max(tl.reshape(x, (GROUPS, GROUP)), axis=1)
                    group = j * GROUPS + tl.arange(0, GROUPS)
                    place = scratch.filtered.group_top_NG + row * rows.NG + group
                    tl.store(place, top_G, mask=group < rows.NG)
                    broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
                    top = tl.where(broken, float("nan"), tl.max(top_G, axis=0))
                    tl.store(block_top_NJ(scratch) + row * rows.NB + j, top)


@triton.jit
def _mass_and_best(x, first, settings: Settings, scored, address: Address, FLAT: tl.constexpr,
                   FP64: tl.constexpr):  # fmt: skip
    """(log2 of the sum of 2^(x scale), the best of x scale + noise if `scored`) of a block.

    At T=0 the first is the largest logit instead, or NaN if a logit is NaN.
    """
    best = tl.full((), float("-inf"), tl.float32)
    if settings.greedy:
        broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
        mass = tl.where(broken, float("nan"), tl.max(x, axis=0))
    else:
        scaled = x * settings.scale
        mass = log2_sum(scaled)
        if FLAT:
            if scored:
                score = scaled + gumbel_span(address, first, BLOCK, FP64)
                best = tl.max(score, axis=0).to(tl.float32)
    return mass, best


@triton.jit
def token_address(requests: Requests, settings: Settings, b, i, token_stream, DRAFT: tl.constexpr):
    """The `Address` of the noise by which row i of request b draws its token.

    DRAFT: rows are drafts. Under COUPLED they use the noise by which the target will draw.
    """
    index = tl.full((), 0, tl.int32)
    stream = index + token_stream
    if DRAFT:
        coupled = settings.rule == COUPLED
        index = tl.where(coupled, 0, tl.load(requests.index_B + b).to(tl.int32))
        stream = tl.where(coupled, TARGET_TOKEN, stream)
    return Address(settings.key, tl.load(requests.position_B + b) + i, index, stream)
