"""Gumbel-max sampling of raw logits on the device: a scan, filters if there are any, and a draw.

The scan and the draw are two launches: with the draw done by the last program of a row the pass
over 1024 rows took 152 us against 137 + 7 (H200, decision 010).

Shapes: N rows, V vocabulary, B requests, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.draw import draw, lots
from foretoken.ops.backends.triton.filters import filter_kernel
from foretoken.ops.backends.triton.launch import Call, at_most_registers
from foretoken.ops.backends.triton.noise import LN2, LOG2E
from foretoken.ops.backends.triton.rows import (
    is_flat,
    load_masses,
    log2_sum,
    wait_for_writes,
)
from foretoken.ops.backends.triton.scan import BLOCKS_PER_PROGRAM, FEW_PROGRAMS, scan_kernel
from foretoken.ops.backends.triton.sweep import (
    GUESSING,
    PARTS,
    PROGRAMS,
    guess_kernel,
    sweep_kernel,
)
from foretoken.ops.backends.triton.wide import REGISTERS, WARPS, wide_kernel
from foretoken.ops.types import DraftCache, Noise, Rows

_MANY = 512  # rows above which programs of the filters have one warp


@triton.jit
def pick_kernel(
    logits, stride, slot_ptr, position_ptr, index_ptr, state, edits, out, found, cache, token_ptr,
    V, NB, token_stream, block_stream, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
    FILTERS: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr, DRAFT: tl.constexpr,
    STORE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program per row. DRAFT: slots under COUPLED (2) draw with TARGET noise at index 0.

    STORE: `cache` = (logits, slot stride, draft stride, draft_index_B, threshold_SK, lse_SK, their
    slot stride) gets what states q again.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(state[1] + slot)
    greedy = temperature == 0
    scale = LOG2E / tl.where(greedy, 1.0, temperature)
    index = tl.load(index_ptr + row).to(tl.int32)
    zero = tl.full((), 0, tl.int32)
    token_stream, block_stream = zero + token_stream, zero + block_stream
    if DRAFT:
        if tl.load(state[5] + slot) == 2:
            index, token_stream, block_stream = zero, zero, zero + 1
    at_ = (tl.load(state[0] + slot), tl.load(position_ptr + row).to(tl.int32), index)
    law = (0, 0, logits, 0, 0.0, 0.0, 0.0)
    flat, noise = is_flat(state, slot, V), lots(at_, block_stream, NBP, FP64)
    wait_for_writes(OVERLAP)
    token = draw(
        logits, stride, row, V, edits, out, found, NB, scale, greedy, flat, law, at_, token_stream,
        block_stream, noise, MASKS, ENTRIES, FILTERS, NBP, FP64,
    )  # fmt: skip
    tl.store(token_ptr + row, token)
    if STORE:
        lse = log2_sum(load_masses(out[0], row, NB, NBP))
        threshold = float("-inf")
        if FILTERS:
            if tl.load(found[2] + row) >= 0:
                lse = tl.load(found[1] + row)
            threshold = tl.load(found[0] + row)
        lse = tl.where(greedy, 0.0, lse)
        to = slot * cache[6] + tl.load(cache[3] + row)
        tl.store(cache[4] + to, threshold)
        tl.store(cache[5] + to, lse.to(tl.float64) * LN2)


def sample(rows: Rows, noise: Noise) -> Tensor:
    """One token per row from softmax(logits), as the argmax of logits plus Gumbel noise.

    See `Backend.sample`. Two launches; five more if `params.has_filters`. Returns int64 [N].
    """
    logits_NV, params, slot_N, edits = rows
    where = (slot_N, slot_N, noise.position_N, noise.draft_index_N)
    return _draw_rows(Call.of(logits_NV, params, where, edits, noise.fp64, noise.streams), None)


def draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
    """A draft per row, and into `cache` what states its q again; see `Backend.draft`.

    The scan copies the raw row while it reads it; block masses are not kept, nothing reads them.
    """
    logits_BV, params, slot_B, _ = rows
    where = (slot_B, slot_B, noise.position_N, noise.draft_index_N)
    return _draw_rows(Call.of(logits_BV, params, where, None, noise.fp64, noise.streams), cache)


def _draw_rows(call: Call, cache: DraftCache | None) -> Tensor:
    """A token per row, one row per request."""
    rows = call.logits_NV.shape[0]
    token_N = torch.empty(rows, dtype=torch.int64, device=call.logits_NV.device)
    if not rows:
        return token_N
    reduce_rows(call, cache)
    given = (
        call.logits_NV, call.stride, call.slot_B, call.position_B, call.index_B,
        call.state, call.edits, call.scratch.out, call.scratch.found, _cache_tuple(call, cache),
        token_N, call.sizes.vocabulary, call.sizes.blocks, *call.noise,
    )  # fmt: skip
    call.launch(
        pick_kernel, rows, given, call.masks, call.entries, call.filters,
        call.sizes.blocks_padded, call.fp64, call.drafts, cache is not None,
        num_warps=4,
    )  # fmt: skip
    return token_N


def _cache_tuple(call: Call, cache: DraftCache | None) -> tuple[Any, ...]:
    """The pointers of `pick_kernel: cache`."""
    if cache is None:
        return (call.index_B,)
    _, drafts, width = cache.logits_SKV.shape
    strides = drafts * width, width
    return (cache.logits_SKV, *strides, call.index_B, cache.threshold_SK, cache.lse_SK, drafts)


def reduce_rows(
    call: Call, cache: DraftCache | None = None, counter_B: Tensor | None = None
) -> None:
    """Scan the rows, and find thresholds; fill the cache, and set counters to 0, if given."""
    logits_NV, sizes, scratch = call.logits_NV, call.sizes, call.scratch
    rows, stride = call.slot_B.shape[0] * call.width, call.stride
    few = rows * sizes.blocks <= FEW_PROGRAMS.value
    per = 1 if few else BLOCKS_PER_PROGRAM
    programs = -(-sizes.blocks // per)
    where = (call.num_B, call.slot_B, call.position_B, call.index_B)
    edited = (call.masks, call.entries)
    given: tuple[Any, ...] = (
        logits_NV, stride, *where, call.state, call.edits, scratch.out, scratch.found,
        _cache_tuple(call, cache), call.num_B if counter_B is None else counter_B,
        sizes.vocabulary, sizes.blocks, sizes.groups, programs, call.noise[0],
    )  # fmt: skip
    call.launch(
        scan_kernel, rows * programs, given, call.width, *edited, call.filters, call.flat,
        call.fp64, cache is not None, counter_B is not None, call.drafts, per, few,
        num_warps=1, early=few,
    )  # fmt: skip
    if not call.filters:
        return
    given = (
        logits_NV, stride, call.num_B, call.slot_B, call.state, call.edits, scratch.out,
        scratch.found, sizes.vocabulary, sizes.blocks, sizes.groups,
    )  # fmt: skip
    call.launch(
        filter_kernel, rows, given, call.width, *edited, sizes.blocks_padded,
        num_warps=1 if rows > _MANY else 4,
    )  # fmt: skip
    _search_wide(call, rows, where)


def _search_wide(call: Call, rows: int, where: tuple[Tensor, ...]) -> None:
    """Thresholds and masses of the rows for which the filters' lists were too short."""
    sizes, scratch, edited = call.sizes, call.scratch, (call.masks, call.entries)
    source = (call.logits_NV, call.stride)
    bounds = (sizes.vocabulary, sizes.blocks, sizes.groups)
    given: tuple[Any, ...] = (*source, call.edits, *scratch, *bounds)
    call.launch(
        guess_kernel, min(GUESSING, rows), given, *edited, sizes.blocks_padded, num_warps=4,
    )  # fmt: skip
    for turn in range(2):
        parts = min(PARTS, sizes.blocks) if turn else sizes.blocks
        call.launch(
            sweep_kernel, min(PROGRAMS, rows * parts), (*given, parts), *edited, turn, num_warps=1,
        )  # fmt: skip
    given = (*source, *where, call.state, call.edits, *scratch, *bounds, call.noise[0])
    call.launch(
        wide_kernel, rows, given, call.width, *edited, sizes.blocks_padded, call.fp64,
        call.drafts, num_warps=WARPS, **at_most_registers(REGISTERS),
    )  # fmt: skip
