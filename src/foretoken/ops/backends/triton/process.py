"""Processed logits, for tools and tests, and log-probabilities of given and of likeliest tokens.

Log-probabilities take two launches and no copy of the logits. The first measures every block of
1024, in programs of one warp like the scan's. The second has a program per row. Let groups of 64
be ordered by falling maxima, and equal ones by rising number. Then the k likeliest tokens lie in
the first k groups: each of these has a token that comes before all tokens of a later group.

Rows with filters are read twice: sampling's kernels find their thresholds first. Scratch takes
1.76 % of the size of float32 logits (V = 151 936); with filters or edits as much as in sampling.

Shapes: T likeliest tokens; all other letters as in `records.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.compiled import launch
from foretoken.ops.backends.triton.launch import Call, requests_of
from foretoken.ops.backends.triton.noise import LN2, LOG2E
from foretoken.ops.backends.triton.records import Batch

from foretoken.ops.backends.triton.rows import (  # isort: skip
    BLOCK, GROUP, GROUPS, key_of, let_next_start, load_at, load_span, value_of, wait_for_writes,
)  # fmt: skip
from foretoken.ops.backends.triton.sample import BLOCKS_PER_PROGRAM, FEW_PROGRAMS, reduce_rows
from foretoken.ops.types import Logprobs, Rows

_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def write_kernel(batch: Batch, out_NV):
    """Write processed logits. Programs: (row, block of it)."""
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows, filtered = batch.rows, batch.scratch.filtered
    pid = tl.program_id(0)
    row, first = (pid // rows.NB).to(tl.int64), pid % rows.NB * BLOCK
    temperature = tl.load(batch.slots.temperature_S + tl.load(batch.requests.slot_B + row))
    x = load_span(rows, row, first, BLOCK, "evict_first")
    if filtered is not None:
        x = tl.where(x < tl.load(filtered.threshold_N + row), float("-inf"), x)
    x = x / tl.where(temperature == 0, 1.0, temperature)
    off = first + tl.arange(0, BLOCK)
    tl.store(out_NV + row * rows.V + off, x, mask=off < rows.V)


def process_logits(rows: Rows) -> Tensor:
    """Edits -> temperature -> min_p -> top_k -> top_p: new float32 [N, V]. See `Backend`."""
    logits_NV, params, slot_N, edits = rows
    call = Call(logits_NV, params, requests_of(*[slot_N] * 4), edits)
    out_NV = torch.empty(logits_NV.shape, dtype=torch.float32, device=logits_NV.device)
    if len(out_NV):
        if params.has_filters:
            reduce_rows(call)
        programs = len(out_NV) * call.batch.rows.NB
        launch(write_kernel, (programs,), call.batch, out_NV, num_warps=4)
    return out_NV


class Measured(NamedTuple):
    """Measures of each block and group, from the first kernel; float32.

    sum_NJ:    sums of 2^((x - the block's maximum) scale)
    higher_NJ: how many logits are above that of the given token
    """

    sum_NJ: Tensor
    higher_NJ: Tensor
    group_top_NG: Tensor


@triton.jit
def _threshold_and_scale(batch: Batch, row):
    """(threshold, scale from logits to log2) of a row. Raw logits have threshold -inf and T = 1."""
    threshold, scale = float("-inf"), LOG2E
    if batch.slots is not None:
        temperature = tl.load(batch.slots.temperature_S + tl.load(batch.requests.slot_B + row))
        scale = LOG2E / tl.where(temperature == 0, 1.0, temperature)
        if batch.scratch.filtered is not None:
            threshold = tl.load(batch.scratch.filtered.threshold_N + row)
    return threshold, scale


@triton.jit
def _token_logit(batch: Batch, row, token_N):
    """The edited logit of a row's given token."""
    token = tl.load(token_N + row + tl.arange(0, 1)).to(tl.int32)
    valid = (token >= 0) & (token < batch.rows.V)
    return tl.max(load_at(batch.rows, row, token, valid), axis=0)


@triton.jit
def measure_kernel(batch: Batch, token_N, measured: Measured, parts, PER: tl.constexpr,
                   OVERLAP: tl.constexpr):  # fmt: skip
    """Fill `measured`. Programs: (row, PER blocks of it)."""
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows = batch.rows
    pid = tl.program_id(0)
    wait_for_writes(OVERLAP)
    if pid >= tl.num_programs(0) - FEW_PROGRAMS:  # earlier programs end before these
        let_next_start(OVERLAP)
    row = (pid // parts).to(tl.int64)
    threshold, scale = _threshold_and_scale(batch, row)
    token_logit = _token_logit(batch, row, token_N)
    token_logit = tl.where(token_logit < threshold, float("-inf"), token_logit)
    for n in tl.static_range(PER):
        j = pid % parts * PER + n
        if j < rows.NB:
            x = load_span(rows, row, j * BLOCK, BLOCK, "evict_first")
            x = tl.where(x < threshold, float("-inf"), x)
            top_G = tl.max(tl.reshape(x, (GROUPS, GROUP)), axis=1)
            top = tl.max(top_G, axis=0)
            base = tl.where(top == float("-inf"), 0.0, top)
            place = row * rows.NB + j
            tl.store(measured.sum_NJ + place, tl.sum(tl.exp2((x - base) * scale), axis=0))
            higher = tl.sum((x > token_logit).to(tl.int32), axis=0)
            tl.store(measured.higher_NJ + place, higher.to(tl.float32))
            group = j * GROUPS + tl.arange(0, GROUPS)
            place = measured.group_top_NG + row * rows.NG + group
            tl.store(place, top_G, mask=group < rows.NG)


@triton.jit
def _largest(x, id_, T, TP: tl.constexpr):
    """(values, ids) [TP] of the T largest of x; equal values by rising id.
    T iterations of two reductions take a tenth of a sort's instructions and compile time."""
    key, i = key_of(x), tl.arange(0, TP)
    largest, ids = tl.zeros((TP,), tl.uint32), tl.zeros((TP,), tl.int32)
    for t in range(T):
        top = tl.max(key, axis=0)
        top_id = tl.min(tl.where(key == top, id_, _NO_ID), axis=0)
        largest, ids = tl.where(i == t, top, largest), tl.where(i == t, top_id, ids)
        key = tl.where(id_ == top_id, 0, key)  # below the key of -inf
    return value_of(largest), ids


@triton.jit
def likeliest_kernel(batch: Batch, token_N, measured: Measured, result: Logprobs, T,
                     NBP: tl.constexpr, TP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Fill `result`, a program per row. TP: a power of 2, at least T; 0 if T is 0."""
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows = batch.rows
    row = tl.program_id(0).to(tl.int64)
    token_logit = _token_logit(batch, row, token_N)
    wait_for_writes(OVERLAP)
    threshold, scale = _threshold_and_scale(batch, row)
    token_logit = tl.where(token_logit < threshold, float("-inf"), token_logit)
    j, g = tl.arange(0, NBP), tl.arange(0, NBP * GROUPS)
    top_G = tl.load(measured.group_top_NG + row * rows.NG + g, mask=g < rows.NG,
                    other=float("-inf"), cache_modifier=".cg")  # fmt: skip
    top_J = tl.max(tl.reshape(top_G, (NBP, GROUPS)), axis=1)
    top = tl.max(top_J, axis=0)
    place, inside = row * rows.NB + j, j < rows.NB
    sum_J = tl.load(measured.sum_NJ + place, mask=inside, other=0.0, cache_modifier=".cg")
    higher_J = tl.load(measured.higher_NJ + place, mask=inside, other=0.0, cache_modifier=".cg")
    lse = tl.log2(tl.sum(sum_J * tl.exp2((top_J - top) * scale), axis=0))
    tl.store(result.logprob_N + row, ((token_logit - top) * scale - lse) * LN2)
    tl.store(result.rank_N + row, tl.sum(higher_J.to(tl.int64), axis=0) + 1)
    if TP > 0:
        _, group = _largest(top_G, g, T, TP)
        t = tl.arange(0, TP)
        off = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (TP * GROUP,))
        valid = tl.reshape(tl.broadcast_to((t < T)[:, None], (TP, GROUP)), (TP * GROUP,))
        x = load_at(rows, row, off, valid & (off < rows.V))
        x = tl.where(x < threshold, float("-inf"), x)
        x, token = _largest(x, tl.where(valid, off, _NO_ID), T, TP)
        logprob = ((x - top) * scale - lse) * LN2
        tl.store(result.top_logprob_NT + row * T + t, logprob, mask=t < T)
        token = tl.minimum(token, rows.V - 1)  # in a row of NaN, ids may be V or more
        tl.store(result.top_token_NT + row * T + t, token.to(tl.int64), mask=t < T)


def logprobs(rows: Rows | Tensor, token_N: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of raw logits, or of processed `Rows`; see `Backend.logprobs`.
    Two launches; more for thresholds of filters and for edits with entries."""
    # Raw logits have no slots: `token_N` takes the place of `slot_N`, which no kernel reads.
    fields = rows if isinstance(rows, Rows) else (rows, None, token_N, None)
    logits_NV, params, slot_N, edits = fields
    num_rows, device = len(logits_NV), logits_NV.device
    result = Logprobs(
        torch.empty(num_rows, device=device),
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, num_top, device=device),
        torch.empty(num_rows, num_top, dtype=torch.int64, device=device),
    )
    if not num_rows:
        return result
    call = Call(logits_NV, params, requests_of(*[slot_N] * 4), edits)
    scratch, blocks = call.batch.scratch, call.batch.rows.NB
    higher_NJ = torch.empty_like(scratch.mass_NJ) if scratch.best_NJ is None else scratch.best_NJ
    # Scratch memory is used again once the thresholds have been found.
    if scratch.filtered is None:
        group_top_NG = torch.empty(num_rows * call.batch.rows.NG, device=device)
    else:
        reduce_rows(call)
        group_top_NG = scratch.filtered.group_top_NG
    args = token_N.contiguous(), Measured(scratch.mass_NJ, higher_NJ, group_top_NG)
    per_program = 1 if num_rows * blocks <= FEW_PROGRAMS.value else BLOCKS_PER_PROGRAM
    parts = -(-blocks // per_program)
    call.launch(measure_kernel, num_rows * parts, *args, parts, per_program, num_warps=1)
    width = 1 << (num_top - 1).bit_length() if num_top else 0
    call.launch(likeliest_kernel, num_rows, *args, result, num_top, call.blocks_padded, width)
    return result
