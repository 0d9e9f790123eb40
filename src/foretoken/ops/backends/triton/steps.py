"""Bookkeeping of a step over its slots, a kernel or two each; see `foretoken.ops.steps.Steps`.

Sizes of batches are arguments, and whether one is 1 or a multiple of 16 is not compiled in, so that
a kernel is compiled once for all of them. Of K its power of 2 is.

One kernel packs what a pass computes, for a step and for the first pass of a round. A program takes
a request. How many tokens those before it have it sums up itself: that costs less than a kernel of
its own.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.compiled import launch, zero_if_noted
from foretoken.ops.backends.triton.launch import dependent, overlaps
from foretoken.ops.backends.triton.rows import wait_for_writes
from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, Round, SlotState, StepTokens
from foretoken.ops.types import AttentionBatch, Verdict

SPAN = tl.constexpr(1024)  # tokens, or columns of the block table, that a program moves at once
AT_ONCE = tl.constexpr(256)  # requests
TEXT = tl.constexpr(2048)  # tokens in which a program looks for a suffix

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
    token, which need not be computed.
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
    """Write the tokens and rows of request b; after the last request's also padding."""
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


@triton.jit(do_not_specialize=["B"])
def count_kernel(table: Table, slot_B, most_B, num_B, position_B, B, OVERLAP: tl.constexpr):
    """A program counts for AT_ONCE requests."""
    wait_for_writes(OVERLAP)
    b = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    slot = tl.load(slot_B + b, mask=b < B, other=0)
    length = tl.load(table.length_S + slot, mask=b < B, other=0)
    left = tl.load(table.limit_S + slot, mask=b < B, other=0) - length - 1
    num = tl.minimum(tl.load(most_B + b, mask=b < B, other=0), left)
    tl.store(num_B + b, tl.maximum(num, 0), mask=b < B)
    tl.store(position_B + b, length, mask=b < B)


@triton.jit(do_not_specialize=["K"])
def put_kernel(
    table: Table, slot_B, position_B, num_B, token_BK, K, last_id, KP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program writes the drafts of a request."""
    wait_for_writes(OVERLAP)
    table = table  # see `records.py`
    b, i = tl.program_id(0), tl.arange(0, KP)
    live = (i < K) & (i < tl.load(num_B + b))
    token = tl.load(token_BK + b * K + i, mask=live, other=0)
    its_drafts = table.token_SL + tl.load(slot_B + b) * table.W + tl.load(position_B + b)
    tl.store(its_drafts + i, tl.minimum(tl.maximum(token, 0), last_id), mask=live)


@triton.jit(do_not_specialize=["B", "K"])
def advance_kernel(
    table: Table, step: StepTokens, verdict: Verdict, packet, B, K, KP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes over the step of a request. The spare may have many; none changes it."""
    wait_for_writes(OVERLAP)
    table = table
    b, i = tl.program_id(0), tl.arange(0, KP)
    slot, num_tokens = tl.load(step.slot_B + b), tl.load(step.num_tokens_B + b)
    length, limit = tl.load(table.length_S + slot), tl.load(table.limit_S + slot)
    computed, of = tl.load(table.computed_S + slot), b.to(tl.int64)
    if step.of_B is not None:
        of = tl.load(step.of_B + b)
    tl.debug_barrier()  # no warp writes what another has yet to read
    goes_on, accepted = length < limit, length * 0
    tl.store(packet + b, computed)
    if of >= 0:
        accepted = tl.load(verdict.n_accept_B + of)
        finite = tl.load(verdict.finite_B + of).to(tl.int64)
        token = tl.load(verdict.token_BK1 + of * (K + 1) + i, mask=i <= K, other=-1)
        to = packet + B + of * (K + 4)
        tl.store(to, tl.load(step.num_D + of))
        tl.store(to + 1, accepted)
        tl.store(to + 2, finite)
        tl.store(to + 3 + i, token, mask=i <= K)
        end = length + accepted + finite
        its_tokens = table.token_SL + slot * table.W + length
        tl.store(its_tokens + i, token, mask=goes_on & (length + i < end))
        tl.store(table.length_S + slot, end, mask=goes_on)
        tl.store(table.limit_S + slot, end, mask=goes_on & (finite == 0))
    tl.store(table.computed_S + slot, computed + num_tokens + accepted, mask=goes_on)


@triton.jit(do_not_specialize=["B", "T"])
def shift_kernel(
    table: Table, slot_B, start_B1, length_B, token_T, row_B, B, T, OVERLAP: tl.constexpr
):  # fmt: skip
    """A program takes the rows of a request; the last one padding, too."""
    wait_for_writes(OVERLAP)
    table = table
    b = tl.program_id(0)
    slot, length = tl.load(slot_B + b), tl.load(length_B + b)
    start, end = tl.load(start_B1 + b), tl.load(start_B1 + b + 1)
    first = length - (end - start)
    last = tl.minimum(length - 1, tl.load(table.length_S + slot) - 2)
    tl.store(row_B + b, start + tl.maximum(last - first, 0))
    stop = tl.where(b == B - 1, T, end)
    for begin in range(start, stop, SPAN):
        t = begin + tl.arange(0, SPAN)
        after = tl.minimum(first + (t - start) + 1, table.W - 1)
        token = tl.load(table.token_SL + slot * table.W + after, mask=t < stop, other=0)
        tl.store(token_T + t, tl.maximum(token, 0), mask=t < stop)


@triton.jit(do_not_specialize=["B"])
def join_kernel(drafts, num_B, token_BK, B, K: tl.constexpr, OVERLAP: tl.constexpr):
    """A program joins the drafts of AT_ONCE requests. drafts: K of [B]."""
    wait_for_writes(OVERLAP)
    b = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    num = tl.load(num_B + b, mask=b < B, other=0)
    for i in tl.static_range(K):
        token = tl.load(drafts[i] + b, mask=b < B, other=-1)
        tl.store(token_BK + b * K + i, tl.where(i < num, token, -1), mask=b < B)


@triton.jit
def search_kernel(
    table: Table, slot_B, num_B, position_B, rank_BP, parts, shortest, longest,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, TEXT of its tokens). Each ranks the best occurrence that ends there.

    Ranks rise with the size of the suffix. Of one size come first those with all drafts after
    them, the latest above all; then the others, the earliest above all. 0: there is none.
    """
    wait_for_writes(OVERLAP)
    table = table
    b, part = tl.program_id(0), tl.program_id(1)
    num, last = tl.load(num_B + b), tl.load(position_B + b) - 1
    text, place = table.token_SL + tl.load(slot_B + b) * table.W, part * TEXT + tl.arange(0, TEXT)
    best = num * 0
    if (num > 0) & (part * TEXT < last):
        run, goes_on = place * 0, place < last
        for back in range(longest):
            goes_on &= place >= back
            token = tl.load(text + tl.maximum(last - back, 0))
            goes_on &= tl.load(text + place - back, mask=goes_on, other=-1) == token
            run += goes_on.to(tl.int32)
        within = tl.where(last - place >= num, table.W + place, table.W - 1 - place)
        rank = tl.where(run >= shortest, run.to(tl.int64) * (2 * table.W) + within, 0)
        best = tl.max(rank, 0)
    tl.store(rank_BP + b * parts + part, best)


@triton.jit(do_not_specialize=["K"])
def found_kernel(
    table: Table, slot_B, num_B, position_B, rank_BP, parts, token_BK, kept_B, K,
    KP: tl.constexpr, PP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program drafts what follows the occurrence of the highest rank."""
    wait_for_writes(OVERLAP)
    table = table
    b, i, part = tl.program_id(0), tl.arange(0, KP), tl.arange(0, PP)
    rank = tl.max(tl.load(rank_BP + b * parts + part, mask=part < parts, other=0), 0)
    within = rank % (2 * table.W)
    end = tl.where(within >= table.W, within - table.W, table.W - 1 - within) + 1
    num = tl.minimum(tl.load(num_B + b), tl.maximum(tl.load(position_B + b) - end, 0))
    num = tl.where(rank > 0, num, 0)
    text = table.token_SL + tl.load(slot_B + b) * table.W
    tl.store(token_BK + b * K + i, tl.load(text + end + i, mask=i < num, other=-1), mask=i < K)
    tl.store(kept_B + b, num)


class Steps:
    """The kernels' launches on one `SlotState`."""

    def __init__(self, state: SlotState) -> None:
        slots, width = state.token_SL.shape
        self._table = Table(*state, width, state.block_SL.shape[1], slots - 1)

    @zero_if_noted
    def count_drafts(self, slot_B: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
        """See `Steps.count_drafts`."""
        num_B, position_B = _empty(slot_B, len(slot_B)), _empty(slot_B, len(slot_B))
        given = (self._table, slot_B, most_B, num_B, position_B, len(slot_B))
        _launch(count_kernel, (_groups(slot_B),), slot_B.device, *given)
        return num_B, position_B

    def write_drafts(
        self, asked: DraftRequests, num_B: Tensor, token_BK: Tensor, last_id: int
    ) -> None:
        """See `Steps.write_drafts`."""
        (requests, most), token_BK = token_BK.shape, token_BK.contiguous()
        given = (self._table, asked.slot_B, asked.position_B, num_B, token_BK, most, last_id)
        _launch(put_kernel, (requests,), num_B.device, *given, triton.next_power_of_2(most))

    @zero_if_noted
    def pack(self, tokens: StepTokens, sizes: PackSizes, block_size: int) -> ForwardBatch:
        """See `Steps.pack`."""
        return self._pack(len(tokens.slot_B), (tokens, None), sizes, block_size)

    @zero_if_noted
    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        """See `Steps.advance`."""
        requests, (deciding, width) = len(tokens.slot_B), verdict.token_BK1.shape
        packet = _empty(tokens.slot_B, requests + deciding * (width + 3))
        verdict = Verdict(*map(Tensor.contiguous, verdict))
        given = (self._table, tokens, verdict, packet, requests, width - 1)
        widths = triton.next_power_of_2(width)
        _launch(advance_kernel, (requests,), packet.device, *given, widths)
        return packet

    @zero_if_noted
    def begin_round(self, asked: DraftRequests, known: int, max_len: int, block_size: int) -> Round:
        """See `Steps.begin_round`."""
        requests, like = len(asked.slot_B), asked.slot_B
        # Rows at multiples of 16 bytes: kernels are compiled anew for other addresses.
        place_3KB = _empty(like, 3, asked.most, requests + requests % 2)
        kept_B, index_B1 = _empty(like, requests), _empty(like, requests + 1)
        plan = RoundPlan(*asked[:3], kept_B, index_B1, place_3KB, known, max_len)
        sizes = PackSizes(known * requests, requests, known)
        first = self._pack(requests, (None, plan), sizes, block_size)
        return Round(kept_B, first, index_B1, *place_3KB[:, :, :requests])

    @zero_if_noted
    def shift(
        self, slot_B: Tensor, batch: AttentionBatch, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """See `Steps.shift`."""
        token_T, row_B = _empty(slot_B, num_tokens), torch.empty_like(slot_B)
        where = (slot_B, batch.query_start_B1, batch.length_B)
        given = (self._table, *where, token_T, row_B, len(slot_B), num_tokens)
        _launch(shift_kernel, (len(slot_B),), slot_B.device, *given)
        return token_T, row_B

    @zero_if_noted
    def join_drafts(self, drafts: Sequence[Tensor], num_B: Tensor) -> Tensor:
        """See `Steps.join_drafts`."""
        token_BK = _empty(num_B, len(num_B), len(drafts))
        given = (tuple(drafts), num_B, token_BK, len(num_B), len(drafts))
        _launch(join_kernel, (_groups(num_B),), num_B.device, *given)
        return token_BK

    @zero_if_noted
    def look_up(self, asked: DraftRequests, shortest: int, longest: int) -> tuple[Tensor, Tensor]:
        """See `Steps.look_up`."""
        like, (requests,), parts = asked.num_B, asked.num_B.shape, -(-self._table.W // TEXT.value)
        rank_BP, token_BK = _empty(like, requests, parts), _empty(like, requests, asked.most)
        kept_B, device = torch.empty_like(like), like.device
        given = (self._table, *asked[:3], rank_BP, parts)
        _launch(search_kernel, (requests, parts), device, *given, shortest, longest)
        widths = triton.next_power_of_2(asked.most), triton.next_power_of_2(parts)
        _launch(found_kernel, (requests,), device, *given, token_BK, kept_B, asked.most, *widths)
        return token_BK, kept_B

    def _pack(
        self, requests: int, asked: tuple[Any, Any], sizes: PackSizes, block_size: int
    ) -> ForwardBatch:
        """asked: `StepTokens` or `RoundPlan`, and None in the place of the other."""
        table, (step, plan) = self._table, asked
        like, columns = table.length_S, table.L
        out = Out(
            _empty(like, sizes.tokens), _empty(like, sizes.tokens), _empty(like, sizes.rows),
            _empty(like, requests + 1), _empty(like, requests), _empty(like, requests, columns),
            block_size,
        )  # fmt: skip
        _, most, stride = plan.place_3KB.shape if plan else (3, 1, 0)
        grid, numbers = (requests, -(-columns // SPAN.value)), (*sizes[:2], most, stride)
        given = (table, step, plan, out, requests, *numbers, triton.next_power_of_2(most))
        _launch(pack_kernel, grid, like.device, *given)
        where = (out.start_B1, out.length_B, out.block_BL, block_size)
        attention = AttentionBatch(*where, most_queries=sizes.queries, values_fit=True)
        return ForwardBatch(out.token_T, out.position_T, out.row_N, attention)


def _launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *given: Any) -> None:
    """Launch a kernel that waits before anything else."""
    overlap = overlaps(device)
    launch(kernel, grid, *given, OVERLAP=overlap, num_warps=4, **dependent(overlap))


def _groups(x_B: Tensor) -> int:
    groups: int = -(-len(x_B) // AT_ONCE.value)
    return groups


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=like.device)
