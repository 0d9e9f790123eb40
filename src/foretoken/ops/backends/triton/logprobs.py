"""Log-probabilities of given tokens and of the likeliest, in two launches; no copy of the logits.

The first measures every block of 1024, in programs of one warp as `scan.py` does: its sum of
exponentials, how many of its logits are above the given token's, the maxima of its groups of 64.
The second has a program per row. Let groups be ordered by their maxima, falling, the lowest first
among equals: the k likeliest tokens lie in the first k groups, whatever the ties, since each of
these holds a token that comes before all of a later group.

Processed logits are edited and cut on load; their thresholds are those that sampling finds, so that
rows with filters are read twice. Scratch takes 1.76 % of raw logits at fp32 size (V = 151 936);
with filters and edits it is that of sampling.

Tuples:
    out    = (sum_NJ of 2^((x - the block's maximum) scale), above_NJ, gmax_NG), float32
    result = (logprob_N, rank_N, top_logprob_NT, top_token_NT)
Shapes: N rows, V vocabulary, T likeliest tokens, NB blocks and NG groups of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.launch import Call
from foretoken.ops.backends.triton.noise import LN2, LOG2E
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    GROUP,
    key_of,
    let_next_start,
    load_at,
    load_span,
    value_of,
    wait_for_writes,
)
from foretoken.ops.backends.triton.sample import reduce_rows
from foretoken.ops.backends.triton.scan import BLOCKS_PER_PROGRAM, FEW_PROGRAMS
from foretoken.ops.types import Logprobs, Rows, Stream

_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _law(row, slot_ptr, state, found, PROCESSED: tl.constexpr, FILTERS: tl.constexpr):
    """(threshold, scale to log2) of a row."""
    threshold, scale = float("-inf"), LOG2E
    if PROCESSED:
        temperature = tl.load(state[1] + tl.load(slot_ptr + row))
        scale = LOG2E / tl.where(temperature == 0, 1.0, temperature)
        if FILTERS:
            threshold = tl.load(found[0] + row)
    return threshold, scale


@triton.jit
def _given(logits, stride, row, token_ptr, V, edits, MASKS: tl.constexpr, ENTRIES: tl.constexpr):
    """The edited logit of a row's given token."""
    token = tl.load(token_ptr + row + tl.arange(0, 1)).to(tl.int32)
    valid = (token >= 0) & (token < V)
    return tl.max(load_at(logits, stride, row, token, valid, edits, MASKS, ENTRIES), axis=0)


@triton.jit
def measure_kernel(
    logits, stride, token_ptr, slot_ptr, state, edits, found, out, V, NB, NG, parts,
    PROCESSED: tl.constexpr, MASKS: tl.constexpr, ENTRIES: tl.constexpr, FILTERS: tl.constexpr,
    PER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (row, PER blocks of it)."""
    pid = tl.program_id(0)
    wait_for_writes(OVERLAP)
    if pid >= tl.num_programs(0) - FEW_PROGRAMS:  # the others end before these do
        let_next_start(OVERLAP)
    row = (pid // parts).to(tl.int64)
    threshold, scale = _law(row, slot_ptr, state, found, PROCESSED, FILTERS)
    own = _given(logits, stride, row, token_ptr, V, edits, MASKS, ENTRIES)
    own = tl.where(own < threshold, float("-inf"), own)
    per_block: tl.constexpr = BLOCK // GROUP
    for k in tl.static_range(PER):
        j = pid % parts * PER + k
        if j < NB:
            x = load_span(
                logits, stride, row, j * BLOCK, V, edits, BLOCK, MASKS, ENTRIES, "evict_first"
            )
            x = tl.where(x < threshold, float("-inf"), x)
            top_G = tl.max(tl.reshape(x, (per_block, GROUP)), axis=1)
            top = tl.max(top_G, axis=0)
            base = tl.where(top == float("-inf"), 0.0, top)
            tl.store(out[0] + row * NB + j, tl.sum(tl.exp2((x - base) * scale), axis=0))
            above = tl.sum((x > own).to(tl.int32), axis=0)
            tl.store(out[1] + row * NB + j, above.to(tl.float32))
            group = j * per_block + tl.arange(0, per_block)
            tl.store(out[2] + row * NG + group, top_G, mask=group < NG)


@triton.jit
def _first(x, id_, T, TP: tl.constexpr):
    """(value, id) of the first T of a block, values falling, then ids rising; [TP].

    T rounds of two reductions: with bitonic sorts instead `likeliest_kernel` came to 17 300
    instructions for T = 64, compiled in 18 s, with this to 1 770 in 2 s.
    """
    key, i = key_of(x), tl.arange(0, TP)
    best, at = tl.zeros((TP,), tl.uint32), tl.zeros((TP,), tl.int32)
    for t in range(T):
        top = tl.max(key, axis=0)
        one = tl.min(tl.where(key == top, id_, _NO_ID), axis=0)
        best, at = tl.where(i == t, top, best), tl.where(i == t, one, at)
        key = tl.where(id_ == one, 0, key)  # below that of -inf
    return value_of(best), at


@triton.jit
def likeliest_kernel(
    logits, stride, token_ptr, slot_ptr, state, edits, found, out, result, V, NB, NG, T,
    PROCESSED: tl.constexpr, MASKS: tl.constexpr, ENTRIES: tl.constexpr, FILTERS: tl.constexpr,
    NBP: tl.constexpr, TP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: rows."""
    row = tl.program_id(0).to(tl.int64)
    own = _given(logits, stride, row, token_ptr, V, edits, MASKS, ENTRIES)
    wait_for_writes(OVERLAP)
    threshold, scale = _law(row, slot_ptr, state, found, PROCESSED, FILTERS)
    own = tl.where(own < threshold, float("-inf"), own)
    per_block: tl.constexpr = BLOCK // GROUP
    j, g = tl.arange(0, NBP), tl.arange(0, NBP * per_block)
    top_G = tl.load(out[2] + row * NG + g, mask=g < NG, other=float("-inf"), cache_modifier=".cg")
    top_J = tl.max(tl.reshape(top_G, (NBP, per_block)), axis=1)
    top = tl.max(top_J, axis=0)
    sum_J = tl.load(out[0] + row * NB + j, mask=j < NB, other=0.0, cache_modifier=".cg")
    above_J = tl.load(out[1] + row * NB + j, mask=j < NB, other=0.0, cache_modifier=".cg")
    lse = tl.log2(tl.sum(sum_J * tl.exp2((top_J - top) * scale), axis=0))
    tl.store(result[0] + row, ((own - top) * scale - lse) * LN2)
    tl.store(result[1] + row, tl.sum(above_J.to(tl.int64), axis=0) + 1)
    if TP > 0:
        _, group = _first(top_G, g, T, TP)
        t = tl.arange(0, TP)
        off = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (TP * GROUP,))
        valid = tl.reshape(tl.broadcast_to((t < T)[:, None], (TP, GROUP)), (TP * GROUP,))
        x = load_at(logits, stride, row, off, valid & (off < V), edits, MASKS, ENTRIES)
        x = tl.where(x < threshold, float("-inf"), x)
        x, token = _first(x, tl.where(valid, off, _NO_ID), T, TP)
        tl.store(result[2] + row * T + t, ((x - top) * scale - lse) * LN2, mask=t < T)
        token = tl.minimum(token, V - 1)  # of a row of NaN
        tl.store(result[3] + row * T + t, token.to(tl.int64), mask=t < T)


def logprobs(asked: Rows | Tensor, token_N: Tensor, num_top: int) -> Logprobs:
    """Of raw logits, or of processed `Rows`.

    See `Backend.logprobs`. Two launches, and those that find thresholds if `params.has_filters`.
    """
    # Raw logits have no slots: no kernel reads those that stand for them.
    given_rows = asked if isinstance(asked, Rows) else (asked, None, token_N, None)
    logits_NV, params, slot_N, edits = given_rows
    rows, device = len(logits_NV), logits_NV.device
    found = Logprobs(
        torch.empty(rows, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, num_top, device=device),
        torch.empty(rows, num_top, dtype=torch.int64, device=device),
    )
    if not rows:
        return found
    where = (slot_N,) * 4
    streams = (Stream.TARGET_TOKEN, Stream.TARGET_BLOCK)
    call = Call.of(logits_NV, params, where, edits, False, streams, dtypes=(token_N.dtype,))
    sizes, out = call.sizes, call.scratch.out
    if call.filters:
        reduce_rows(call)
    else:
        out = (out[0], torch.empty_like(out[0]), torch.empty(rows, sizes.groups, device=device))
    given = (
        logits_NV, call.stride, token_N.contiguous(), call.slot_B, call.state, call.edits,
        call.scratch.found, out,
    )  # fmt: skip
    bounds = (sizes.vocabulary, sizes.blocks, sizes.groups)
    special = (params is not None, call.masks, call.entries, call.filters)
    per = 1 if rows * sizes.blocks <= FEW_PROGRAMS.value else BLOCKS_PER_PROGRAM
    parts = -(-sizes.blocks // per)
    call.launch(measure_kernel, rows * parts, (*given, *bounds, parts), *special, per, num_warps=1)
    result = (found.logprob_N, found.rank_N, found.top_logprob_NT, found.top_token_NT)
    width = 1 << (num_top - 1).bit_length() if num_top else 0
    call.launch(
        likeliest_kernel, rows, (*given, result, *bounds, num_top), *special, sizes.blocks_padded,
        width, num_warps=4,
    )  # fmt: skip
    return found
