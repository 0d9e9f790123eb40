"""The ops `sample` and `draft`: a scan, filters if there are any, and a draw by Gumbel noise.

The scan and the draw are two launches: if the last program of a row drew, the pass would take
longer (decision 010).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.draw import FROM_P, Target, draw
from foretoken.ops.backends.triton.filters import filter_kernel
from foretoken.ops.backends.triton.launch import Call, at_most_registers, requests_of
from foretoken.ops.backends.triton.noise import LN2, block_address, noise_span
from foretoken.ops.backends.triton.records import Batch
from foretoken.ops.backends.triton.rows import load_blocks, log2_sum, read_settings, wait_for_writes

from foretoken.ops.backends.triton.scan import (  # isort: skip
    BLOCKS_PER_PROGRAM, FEW_PROGRAMS, scan_kernel, token_address,
)  # fmt: skip
from foretoken.ops.backends.triton.sweep import (  # isort: skip
    GUESS_PROGRAMS, SECOND_PARTS, SWEEP_PROGRAMS, guess_kernel, sweep_kernel,
)  # fmt: skip
from foretoken.ops.backends.triton.wide import REGISTERS, WARPS, wide_kernel
from foretoken.ops.types import DraftCache, Noise, Rows

_MANY_ROWS = 512  # with more, programs of `filter_kernel` have one warp


@triton.jit
def pick_kernel(
    batch: Batch, token_N, token_stream, NBP: tl.constexpr, FP64: tl.constexpr,
    DRAFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program per row draws the row's token.

    DRAFT: rows are drafts; their thresholds and lse go to the draft cache, if there is one.
    """
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows, requests, scratch, q = batch.rows, batch.requests, batch.scratch, batch.q
    row = tl.program_id(0).to(tl.int64)
    settings = read_settings(batch.slots, tl.load(requests.slot_B + row), rows.V)
    address = token_address(requests, settings, row, 0, token_stream, DRAFT)
    block_noise = noise_span(block_address(address), 0, NBP, FP64)  # while the scan still runs
    target = Target(FROM_P, -1, 0, 0.0, 0.0, 0.0)
    wait_for_writes(OVERLAP)
    token = draw(batch, row, settings, target, address, block_noise, NBP, FP64)
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

    The scan copies raw rows to the cache as it reads them; block masses are not kept.
    """
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
