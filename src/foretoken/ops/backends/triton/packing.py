"""What a pass computes, packed: one kernel, for a step and for the first pass of a round.

A program takes a request. How many tokens those before it have it sums up itself: that costs less
than a kernel of its own.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.rows import wait_for_writes
from foretoken.ops.steps import StepTokens

SPAN = tl.constexpr(1024)  # tokens, or columns of the block table, that a program moves at once
AT_ONCE = tl.constexpr(256)  # requests

Span = namedtuple("Span", "slot start count want")
"""Tokens start..start + count - 1 of a slot; of the last `want` of them logits are wanted."""


class Table(NamedTuple):
    """The tensors of `SlotState`. W, L: their widths; spare: the last slot."""

    token_SL: Tensor
    block_SL: Tensor
    length_S: Tensor
    computed_S: Tensor
    limit_S: Tensor
    W: int
    L: int
    spare: int


class RoundPlan(NamedTuple):
    """A round of drafting: the numbers of `DraftRequests`, then those of `Round`.

    place_3KB: position, length, index
    """

    slot_B: Tensor
    num_B: Tensor
    position_B: Tensor
    kept_B: Tensor
    index_B1: Tensor
    place_3KB: Tensor
    known: int
    max_len: int


class Out(NamedTuple):
    """The tensors of `ForwardBatch`."""

    token_T: Tensor
    position_T: Tensor
    row_N: Tensor
    start_B1: Tensor
    length_B: Tensor
    block_BL: Tensor
    block_size: int


@triton.jit(do_not_specialize=["B", "T", "N", "most", "stride"])
def pack_kernel(
    table: Table, step: StepTokens, plan: RoundPlan, out: Out, B, T, N, most, stride,
    KP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, SPAN columns of the block table). The first of each do all the rest.

    step, plan: one of them is None.
    T, N: sizes of `token_T` and `row_N`.
    most, stride: of a plan, K and the distance of rows of `place_3KB`.
    """
    wait_for_writes(OVERLAP)
    table, out = table, out  # see `records.py`
    if plan is not None:
        plan = plan
    b, part = tl.program_id(0), tl.program_id(1)
    span = _span(table, step, plan, b, b < B)
    length = span.start + span.count
    drafts, passes, trash = span.count * 0, 0, span.slot * 0
    if plan is not None:
        room = tl.maximum(plan.max_len + 1 - tl.load(plan.position_B + b), 0)
        drafts, passes = tl.minimum(tl.load(plan.num_B + b), room), most
        trash = tl.load(table.block_SL + table.spare * table.L)
    owned = tl.cdiv(length + drafts, out.block_size)
    reached = tl.minimum(tl.cdiv(length + passes, out.block_size), table.L)
    column = part * SPAN + tl.arange(0, SPAN)
    its_blocks = table.block_SL + span.slot * table.L + column
    block = tl.load(its_blocks, mask=column < tl.minimum(owned, reached), other=trash)
    tl.store(out.block_BL + b.to(tl.int64) * table.L + column, block, mask=column < reached)
    if part > 0:
        return
    if plan is not None:
        i, last = tl.arange(0, KP), tl.minimum(plan.max_len, table.L * out.block_size)
        end = tl.minimum(length + i, last)
        place, size = plan.place_3KB + i * stride + b, most * stride
        tl.store(place, end - 1, mask=i < most)
        tl.store(place + size, end, mask=i < most)
        tl.store(place + 2 * size, i, mask=i < most)
        tl.store(plan.kept_B + b, drafts)
        tl.store(plan.index_B1 + b, b)
        if b == B - 1:
            tl.store(plan.index_B1 + B, B)
    first_token, first_row = span.count * 0, span.want * 0
    for begin in range(0, b, AT_ONCE):
        others = begin + tl.arange(0, AT_ONCE)
        before = _span(table, step, plan, others, others < b)
        first_token += tl.sum(before.count, 0)
        first_row += tl.sum(before.want, 0)
    _store_packed(table, out, b, span, first_token, first_row, B, T, N)


@triton.jit
def _span(table: Table, step: StepTokens, plan: RoundPlan, i, live):
    """What request i computes, or each of a vector; nothing where not live.

    One that may have no more tokens computes in the spare slot: there may be no block for its last
    token, which nobody needs computed.
    """
    if plan is None:
        slot, of = _going_on(table, step.slot_B, i, live), i.to(tl.int64)
        if step.of_B is not None:
            of = tl.load(step.of_B + i, mask=live, other=-1)
        want = tl.load(step.num_D + of, mask=live & (of >= 0), other=-1) + 1
        count = tl.load(step.num_tokens_B + i, mask=live, other=0) + tl.maximum(want - 1, 0)
        return Span(slot, tl.load(table.computed_S + slot, mask=live, other=0), count, want)
    else:
        slot = _going_on(table, plan.slot_B, i, live)
        position = tl.load(plan.position_B + i, mask=live, other=0)
        fits = (position <= plan.max_len) & (slot < table.spare)
        length = tl.where(fits, position, 1)
        count = tl.where(live, tl.minimum(length, plan.known), 0)
        return Span(tl.where(fits, slot, table.spare), length - count, count, live.to(tl.int64))


@triton.jit
def _going_on(table: Table, slot_B, i, live):
    """The slot of request i, or the spare."""
    slot = tl.load(slot_B + i, mask=live, other=0)
    length = tl.load(table.length_S + slot, mask=live, other=0)
    limit = tl.load(table.limit_S + slot, mask=live, other=0)
    return tl.where(length < limit, slot, table.spare)


@triton.jit
def _store_packed(table: Table, out: Out, b, span, first_token, first_row, B, T, N):
    """Write the tokens and rows of request b; behind the last request's also padding."""
    j, its_tokens = tl.arange(0, SPAN), table.token_SL + span.slot * table.W + span.start
    for begin in range(0, span.count, SPAN):
        i = begin + j
        token = tl.load(its_tokens + i, mask=i < span.count, other=0)
        tl.store(out.token_T + first_token + i, token, mask=i < span.count)
        tl.store(out.position_T + first_token + i, span.start + i, mask=i < span.count)
    end_token, end_row = first_token + span.count, first_row + span.want
    tl.store(out.row_N + first_row + j, end_token - span.want + j, mask=j < span.want)
    tl.store(out.start_B1 + b, first_token)
    tl.store(out.length_B + b, span.start + span.count)
    if b == B - 1:
        tl.store(out.start_B1 + B, end_token)
        token = tl.load(table.token_SL + span.slot * 0 + table.spare * table.W)
        for begin in range(end_token, T, SPAN):
            i = begin + j
            tl.store(out.token_T + i, token, mask=i < T)
            tl.store(out.position_T + i, 0, mask=i < T)
        for begin in range(end_row, N, SPAN):
            tl.store(out.row_N + begin + j, 0, mask=begin + j < N)
