"""The ops `sample` and `draft`: a scan, filters if there are any, and a draw by Gumbel noise.

The scan is the one pass over all logits: the mass of every block of 1024, and the maxima of groups
of 64. A program of the scan is one warp with one or two blocks: without barriers between warps the
pass runs at the speed of memory. If the last program of a row drew, the pass would take longer, so
the draw is a launch of its own (decision 010).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.draw import FROM_P, Source, draw, q_offset, token_address
from foretoken.ops.backends.triton.filters import filter_kernel
from foretoken.ops.backends.triton.launch import Call, at_most_registers, requests_of
from foretoken.ops.backends.triton.noise import LN2, Address, block_address, gumbel_span, noise_span
from foretoken.ops.backends.triton.records import Batch

from foretoken.ops.backends.triton.rows import (  # isort: skip
    BLOCK, GROUP, GROUPS, Settings, first_row, let_next_start, load_blocks, load_span, log2_sum,
    read_settings, wait_for_writes,
)  # fmt: skip

from foretoken.ops.backends.triton.sweep import (  # isort: skip
    GUESS_PROGRAMS, SECOND_PARTS, SWEEP_PROGRAMS, guess_kernel, sweep_kernel,
)  # fmt: skip
from foretoken.ops.backends.triton.wide import REGISTERS, WARPS, wide_kernel
from foretoken.ops.types import DraftCache, Noise, Rows

BLOCKS_PER_PROGRAM = 2
# About as many programs as a GPU holds. A scan of up to so many blocks has one program per block.
# In a larger scan only the last FEW_PROGRAMS programs let the next kernel start.
FEW_PROGRAMS = tl.constexpr(4096)
_MANY_ROWS = 512  # with more rows, programs of `filter_kernel` have one warp


@triton.jit
def scan_kernel(batch: Batch, counter_B, parts, token_stream, K1: tl.constexpr, FLAT: tl.constexpr,
                FP64: tl.constexpr, DRAFT: tl.constexpr, PER: tl.constexpr, EARLY: tl.constexpr,
                OVERLAP: tl.constexpr):  # fmt: skip
    """Programs: (request, row of it, PER blocks). Writes `mass_NJ`, and `best_NJ` under flat noise.

    Rows with filters get maxima of groups and of blocks instead of best scores; with top-k they
    get no masses, which would be useless. The queue of `filters.py` is emptied.

    counter_B:    None, or set to 0 for `verify.py`
    token_stream: stream of flat noise. FLAT: slots without top-k can draw by flat noise
    DRAFT:        rows are drafts; their edited logits go to the draft cache, if there is one
    EARLY:        the scan can overlap the previous kernel, and every program lets the next start
    """
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows, scratch = batch.rows, batch.scratch
    pid = tl.program_id(0)
    if EARLY:
        wait_for_writes(OVERLAP)
    if EARLY | (pid >= tl.num_programs(0) - FEW_PROGRAMS):  # earlier programs end before these
        let_next_start(OVERLAP)  # after the wait: the next kernel reads results of earlier kernels
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
    has_score, filtered = settings.flat, False
    if scratch.filtered is not None:
        filtered = settings.filtered
        has_score = has_score & (not filtered)
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
                mass, best = _mass_and_best(x, j * BLOCK, settings, has_score, address, FLAT, FP64)
                tl.store(scratch.mass_NJ + row * rows.NB + j, mass)
                if FLAT:
                    if has_score:
                        tl.store(scratch.best_NJ + row * rows.NB + j, best)
            if scratch.filtered is not None:
                if filtered:
                    top_G = tl.max(tl.reshape(x, (GROUPS, GROUP)), axis=1)
                    group = j * GROUPS + tl.arange(0, GROUPS)
                    place = scratch.filtered.group_top_NG + row * rows.NG + group
                    tl.store(place, top_G, mask=group < rows.NG)
                    has_nan = tl.sum((x != x).to(tl.int32), axis=0) > 0
                    top = tl.where(has_nan, float("nan"), tl.max(top_G, axis=0))
                    tl.store(scratch.best_NJ + row * rows.NB + j, top)


@triton.jit
def _mass_and_best(x, first, settings: Settings, has_score, address: Address, FLAT: tl.constexpr,
                   FP64: tl.constexpr):  # fmt: skip
    """(log2 of the sum of 2^(scale x), the largest scale x + noise if `has_score`) of a block.
    At T=0 the first value is the largest logit instead, or NaN if a logit is NaN."""
    best = tl.full((), float("-inf"), tl.float32)
    if settings.greedy:
        has_nan = tl.sum((x != x).to(tl.int32), axis=0) > 0
        mass = tl.where(has_nan, float("nan"), tl.max(x, axis=0))
    else:
        scaled = x * settings.scale
        mass = log2_sum(scaled)
        if FLAT:
            if has_score:
                score = scaled + gumbel_span(address, first, BLOCK, FP64)
                best = tl.max(score, axis=0).to(tl.float32)
    return mass, best


@triton.jit
def pick_kernel(batch: Batch, token_N, token_stream, NBP: tl.constexpr, FP64: tl.constexpr,
                DRAFT: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """A program per row draws the row's token.
    DRAFT: rows are drafts; their thresholds and lse go to the draft cache, if there is one."""
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows, requests, scratch, q = batch.rows, batch.requests, batch.scratch, batch.q
    row = tl.program_id(0).to(tl.int64)
    settings = read_settings(batch.slots, tl.load(requests.slot_B + row), rows.V)
    address = token_address(requests, settings, row, 0, token_stream, DRAFT)
    block_noise = noise_span(block_address(address), 0, NBP, FP64)  # while the scan still runs
    source = Source(FROM_P, -1, 0, 0.0, 0.0, 0.0)
    wait_for_writes(OVERLAP)
    token = draw(batch, row, settings, source, address, block_noise, NBP, FP64)
    tl.store(token_N + row, token)
    if q is not None:
        lse = log2_sum(load_blocks(scratch.mass_NJ, row, rows.NB, NBP))
        threshold = float("-inf")
        if scratch.filtered is not None:
            if tl.load(scratch.filtered.count_N + row) >= 0:
                lse = tl.load(scratch.lse_N + row)
            threshold = tl.load(scratch.filtered.threshold_N + row)
        lse = tl.where(settings.greedy, 0.0, lse)
        place = settings.slot * q.K + tl.load(requests.index_B + row)
        tl.store(q.threshold_SK + place, threshold)
        tl.store(q.lse_SK + place, lse.to(tl.float64) * LN2)


def sample(rows: Rows, noise: Noise) -> Tensor:
    """One token per row, int64 [N]: see `Backend.sample`. Two launches, seven with filters."""
    return draft(rows, noise, None)


def draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
    """A draft per row; stores each draft's q in `cache`, if given. See `Backend.draft`.
    The scan copies the rows to the cache as it reads them; block masses are not kept."""
    logits_NV, params, slot_N, edits = rows
    requests = requests_of(slot_N, slot_N, noise.position_N, noise.draft_index_N)
    call = Call(logits_NV, params, requests, edits, cache, noise.fp64, noise.streams[0])
    token_N = torch.empty(len(logits_NV), dtype=torch.int64, device=logits_NV.device)
    if len(token_N):
        reduce_rows(call)
        call.launch(
            pick_kernel, len(token_N), token_N, call.stream, call.blocks_padded, call.fp64,
            call.drafts,
        )  # fmt: skip
    return token_N


def reduce_rows(call: Call, counter_B: Tensor | None = None) -> None:
    """Scan the rows and find the thresholds of filters; set `counter_B` to 0, if given."""
    batch, blocks = call.batch, call.batch.rows.NB
    rows = len(batch.requests.slot_B) * call.width
    few = rows * blocks <= FEW_PROGRAMS.value
    blocks_per_program = 1 if few else BLOCKS_PER_PROGRAM
    parts = -(-blocks // blocks_per_program)
    call.launch(
        scan_kernel, rows * parts, counter_B, parts, call.stream, call.width, call.flat,
        call.fp64, call.drafts, blocks_per_program, few, num_warps=1, early=few,
    )  # fmt: skip
    if batch.scratch.filtered is None:
        return
    warps = 1 if rows > _MANY_ROWS else 4
    call.launch(filter_kernel, rows, call.width, call.blocks_padded, num_warps=warps)
    # Find thresholds and masses of rows that have too many logits for a short list.
    call.launch(guess_kernel, min(GUESS_PROGRAMS, rows), call.blocks_padded)
    for sweep in range(2):
        parts = min(SECOND_PARTS, blocks) if sweep else blocks
        call.launch(sweep_kernel, min(SWEEP_PROGRAMS, rows * parts), parts, sweep, num_warps=1)
    call.launch(
        wide_kernel, rows, batch.rows.stride, call.stream, call.width, call.blocks_padded,
        call.fp64, call.drafts, num_warps=WARPS, **at_most_registers(REGISTERS),
    )  # fmt: skip
