"""Gumbel-max sampling of raw logits on the device: a scan, filters if there are any, and a draw.

The scan and the draw are two launches: with the draw done by the last program of a row the pass
over 1024 rows took 152 us against 138 + 7 (H200, decision 010).

Shapes: N rows, V vocabulary, B requests, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.draw import draw
from foretoken.ops.backends.triton.filters import filter_kernel
from foretoken.ops.backends.triton.launch import (
    Scratch,
    Sizes,
    edits_tuple,
    may_be_flat,
    params_tuple,
)
from foretoken.ops.backends.triton.noise import LN2, LOG2E
from foretoken.ops.backends.triton.rows import first_row, is_flat, load_masses, log2_sum
from foretoken.ops.backends.triton.scan import BLOCKS_PER_PROGRAM, scan_kernel
from foretoken.ops.backends.triton.wide import wide_kernel
from foretoken.ops.checks import check_draft, check_sample
from foretoken.ops.types import DraftCache, Edits, SlotParams, Stream


_FEW_ROWS = 132  # below it a row has a multiprocessor to itself: more warps, less time for each


@triton.jit
def pick_kernel(
    logits, stride, slot_ptr, position_ptr, index_ptr, state, edits, out, found, cache, token_ptr,
    V, NB, token_stream, block_stream, MASKS: tl.constexpr, ENTRIES: tl.constexpr,
    FILTERS: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr, DRAFT: tl.constexpr,
    STORE: tl.constexpr,
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
    token = draw(
        logits, stride, row, V, edits, out, found, NB, scale, greedy, is_flat(state, slot, V), law,
        at_, token_stream, block_stream, MASKS, ENTRIES, FILTERS, NBP, FP64,
    )  # fmt: skip
    tl.store(token_ptr + row, token)
    if STORE:
        lse = log2_sum(load_masses(out[0], row, NB, NBP))
        threshold = float("-inf")
        if FILTERS:
            if tl.load(found[2] + row) >= 0:
                lse = tl.load(found[1] + row)
            threshold = tl.load(found[0] + row)
        to = slot * cache[6] + tl.load(cache[3] + row)
        tl.store(cache[4] + to, threshold)
        tl.store(cache[5] + to, lse.to(tl.float64) * LN2)


def sample(
    logits_NV: Tensor,
    params: SlotParams,
    slot_N: Tensor,
    position_N: Tensor,
    draft_index_N: Tensor,
    streams: tuple[Stream, Stream],
    *,
    edits: Edits | None = None,
    fp64_noise: bool = False,
) -> Tensor:
    """One token per row from softmax(logits), as the argmax of logits plus Gumbel noise.

    See `Backend.sample`. Two launches; two more if `params.has_filters`. Returns int64 [N].
    """
    check_sample(logits_NV, params, slot_N, position_N, draft_index_N, streams, edits)
    return _draw_rows(
        logits_NV, params, slot_N, position_N, draft_index_N, streams, edits, fp64_noise, None, False
    )


def draft(
    logits_BV: Tensor,
    params: SlotParams,
    slot_B: Tensor,
    position_B: Tensor,
    draft_index_B: Tensor,
    cache: DraftCache | None,
    *,
    fp64_noise: bool = False,
) -> Tensor:
    """A draft per row, and into `cache` what states its q again; see `Backend.draft`.

    The scan copies the raw row while it reads it; block masses are not kept, nothing reads them.
    """
    check_draft(logits_BV, params, slot_B, position_B, draft_index_B, cache)
    streams = (Stream.DRAFT_TOKEN, Stream.DRAFT_BLOCK)
    return _draw_rows(
        logits_BV, params, slot_B, position_B, draft_index_B, streams, None, fp64_noise, cache, True
    )


def _draw_rows(
    logits_NV: Tensor,
    params: SlotParams,
    slot_N: Tensor,
    position_N: Tensor,
    index_N: Tensor,
    streams: tuple[Stream, Stream],
    edits: Edits | None,
    fp64: bool,
    cache: DraftCache | None,
    draft: bool,
) -> Tensor:
    sizes = Sizes.of(logits_NV)
    token_N = torch.empty(sizes.rows, dtype=torch.int64, device=logits_NV.device)
    if not sizes.rows:
        return token_N
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    slot_N, position_N = slot_N.contiguous(), position_N.contiguous()
    index_N = index_N.contiguous()
    pointers, packed = params_tuple(params), edits_tuple(edits, sizes, slot_N)
    filters, flat = params.has_filters, may_be_flat(params)
    scratch = Scratch.of(sizes, logits_NV.device, filters, flat)
    stored = cache_tuple(cache, index_N, logits_NV)
    noise = (*streams, draft)
    reduce_rows(
        logits_NV, None, slot_N, position_N, index_N, pointers, packed, scratch, sizes, 1, filters,
        flat, fp64, noise, stored if cache is not None else None,
    )  # fmt: skip
    pick_kernel[(sizes.rows,)](
        logits_NV, logits_NV.stride(0), slot_N, position_N, index_N, pointers, packed[0],
        scratch.out, scratch.found, stored, token_N, sizes.vocabulary, sizes.blocks, int(streams[0]),
        int(streams[1]), packed[1], packed[2], filters, sizes.blocks_padded, fp64, draft,
        cache is not None, num_warps=8 if fp64 and sizes.rows < _FEW_ROWS else 4,
    )  # fmt: skip
    return token_N


def cache_tuple(cache: DraftCache | None, index_N: Tensor, unused: Tensor) -> tuple[Any, ...]:
    """The pointers of `pick_kernel: cache`."""
    if cache is None:
        return (unused, 0, 0, index_N, unused, unused, 0)
    raw = cache.logits_SKV
    return (
        raw, raw.stride(0), raw.stride(1), index_N, cache.threshold_SK, cache.lse_SK,
        cache.lse_SK.stride(0),
    )  # fmt: skip


def reduce_rows(
    logits_NV: Tensor,
    num_B: Tensor | None,
    slot_B: Tensor,
    position_B: Tensor,
    index_B: Tensor,
    params: tuple[Tensor, ...],
    edits: tuple[tuple[Any, ...], bool, bool],
    scratch: Scratch,
    sizes: Sizes,
    width: int,
    filters: bool,
    flat: bool,
    fp64: bool,
    noise: tuple[Any, ...],
    stored: tuple[Any, ...] | None,
) -> None:
    """Scan and filter the rows of requests that have up to `width` each.

    noise: (token stream, block stream, whether these are drafts) of flat draws of dense rows
    """
    num = slot_B if num_B is None else num_B
    requests = len(slot_B)
    programs = -(-sizes.blocks // BLOCKS_PER_PROGRAM)
    stride = logits_NV.stride(0)
    shared = (edits[1], edits[2])
    scan_kernel[(requests * width * programs,)](
        logits_NV, stride, num, slot_B, position_B, index_B, params, edits[0], scratch.out,
        cache_tuple(None, index_B, logits_NV) if stored is None else stored, sizes.vocabulary,
        sizes.blocks, sizes.groups, programs, int(noise[0]), width, *shared, filters, flat, fp64,
        stored is not None, noise[2], BLOCKS_PER_PROGRAM, num_warps=1,
    )  # fmt: skip
    if not filters:
        return
    filter_kernel[(requests * width,)](
        logits_NV, stride, num, slot_B, params, edits[0], scratch.out, scratch.found,
        sizes.vocabulary, sizes.blocks, sizes.groups, width, *shared, sizes.groups_padded,
        sizes.blocks_padded, num_warps=4 if requests * width < _FEW_ROWS else 2,
    )  # fmt: skip
    wide_kernel[(requests * width,)](
        logits_NV, stride, num, slot_B, position_B, index_B, params, edits[0], scratch.out,
        scratch.found, sizes.vocabulary, sizes.blocks, sizes.groups, int(noise[0]), width, *shared,
        sizes.blocks_padded, fp64, noise[2], num_warps=8, maxnreg=80,
    )  # fmt: skip

