"""Bookkeeping of slots: one or two kernels per function. See `foretoken.ops.steps.Steps`.

Sizes of batches are arguments that Triton does not specialise on, so a kernel is compiled once for
all sizes. Only K, or K + 1, rounded up to a power of 2 is compiled in.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.compiled import launch, zero_if_recording
from foretoken.ops.backends.triton.launch import dependent, overlaps
from foretoken.ops.backends.triton.rows import wait_for_writes, zero_like
from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, Round, SlotState, StepTokens
from foretoken.ops.types import AttentionBatch, Verdict

LANES = tl.constexpr(1024)  # tokens, or columns of the block table, of one load and store
CHUNK = tl.constexpr(256)  # requests of one load
PART = tl.constexpr(2048)  # tokens of a text in which one program looks for a suffix

Span = namedtuple("Span", "slot start count rows")
"""Tokens start..start + count - 1 of a slot; the last `rows` of them need logits."""


class SlotTable(NamedTuple):
    """The tensors of `SlotState`; W, L: widths of `token_SL`, `block_SL`; spare: the last slot."""

    token_SL: Tensor
    block_SL: Tensor
    length_S: Tensor
    computed_S: Tensor
    limit_S: Tensor
    W: int
    L: int
    spare: int


class RoundTensors(NamedTuple):
    """A round of drafting: the tensors of `DraftRequests`, then those of `Round`; `place_3KB` has
    `position_KB`, `length_KB` and `index_KB`. known, max_len: see `Steps.begin_round`."""

    slot_B: Tensor
    num_B: Tensor
    position_B: Tensor
    kept_B: Tensor
    index_B1: Tensor
    place_3KB: Tensor
    known: int
    max_len: int


class Packed(NamedTuple):
    """The tensors of `ForwardBatch`."""

    token_T: Tensor
    position_T: Tensor
    row_N: Tensor
    start_B1: Tensor
    length_B: Tensor
    block_BL: Tensor
    block_size: int


class Lookup(NamedTuple):
    """Prompt lookup: tensors of `DraftRequests`, and `rank_BP`, the highest rank of the suffix's
    occurrences that end in each of P parts of the text; 0 without an occurrence."""

    slot_B: Tensor
    num_B: Tensor
    position_B: Tensor
    rank_BP: Tensor
    parts: int


@triton.jit(do_not_specialize=["B", "T", "N", "K", "stride"])
def pack_kernel(table: SlotTable, step: StepTokens, drafting: RoundTensors, out: Packed, B, T, N, K,
                stride, KP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Pack the tokens of a step, or of the first pass of a round of drafting.

    Programs: (request, LANES columns of the block table). The first program of a request also
    writes the request's tokens and rows, and counts the tokens of all earlier requests: a kernel
    for that would cost more.

    step, drafting: one of them is None. T, N: sizes of `token_T` and `row_N`.
    K, stride: for drafting, the number of passes and the distance of rows of `place_3KB`. Each
    pass has a place in the cache; places after the request's last draft are in the spare block.
    """
    wait_for_writes(OVERLAP)
    table, out = table, out  # a field of value 1 is a constant until then, see `records.py`
    if drafting is not None:
        drafting = drafting
    b, part = tl.program_id(0), tl.program_id(1)
    span = _span(table, step, drafting, b, b < B)
    length = span.start + span.count
    drafts, passes, spare_block = zero_like(span.count), 0, zero_like(span.slot)
    if drafting is not None:
        room = tl.maximum(drafting.max_len + 1 - tl.load(drafting.position_B + b), 0)
        drafts, passes = tl.minimum(tl.load(drafting.num_B + b), room), K
        spare_block = tl.load(table.block_SL + table.spare * table.L)
    num_own = tl.cdiv(length + drafts, out.block_size)
    num_read = tl.minimum(tl.cdiv(length + passes, out.block_size), table.L)
    column = part * LANES + tl.arange(0, LANES)
    block_p = table.block_SL + span.slot * table.L + column
    block = tl.load(block_p, mask=column < tl.minimum(num_own, num_read), other=spare_block)
    tl.store(out.block_BL + b.to(tl.int64) * table.L + column, block, mask=column < num_read)
    if part > 0:
        return
    if drafting is not None:
        i, last = tl.arange(0, KP), tl.minimum(drafting.max_len, table.L * out.block_size)
        end = tl.minimum(length + i, last)
        place, size = drafting.place_3KB + i * stride + b, K * stride
        tl.store(place, end - 1, mask=i < K)
        tl.store(place + size, end, mask=i < K)
        tl.store(place + 2 * size, i, mask=i < K)
        tl.store(drafting.kept_B + b, drafts)
        tl.store(drafting.index_B1 + b, b)
        if b == B - 1:
            tl.store(drafting.index_B1 + B, B)
    first_token, first_row = zero_like(span.count), zero_like(span.rows)
    for begin in range(0, b, CHUNK):
        requests = begin + tl.arange(0, CHUNK)
        earlier = _span(table, step, drafting, requests, requests < b)
        first_token += tl.sum(earlier.count, 0)
        first_row += tl.sum(earlier.rows, 0)
    _store_packed(table, out, b, span, first_token, first_row, B, T, N)


@triton.jit
def _span(table: SlotTable, step: StepTokens, drafting: RoundTensors, i, live):
    """The `Span` that request i computes, or a vector of spans; empty where not `live`.
    A request at its limit, or after `max_len`, is computed in the spare slot: the keys and values
    of its last token are not needed, and perhaps no block exists for them. d: the request's index
    among those that decide (`decider_B`), -1 if it does not decide."""
    if drafting is None:
        slot, d = _slot_or_spare(table, step.slot_B, i, live), i.to(tl.int64)
        if step.decider_B is not None:
            d = tl.load(step.decider_B + i, mask=live, other=-1)
        rows = tl.load(step.num_D + d, mask=live & (d >= 0), other=-1) + 1
        count = tl.load(step.num_tokens_B + i, mask=live, other=0) + tl.maximum(rows - 1, 0)
        return Span(slot, tl.load(table.computed_S + slot, mask=live, other=0), count, rows)
    else:
        slot = _slot_or_spare(table, drafting.slot_B, i, live)
        position = tl.load(drafting.position_B + i, mask=live, other=0)
        fits = (position <= drafting.max_len) & (slot < table.spare)
        length = tl.where(fits, position, 1)
        count = tl.where(live, tl.minimum(length, drafting.known), 0)
        return Span(tl.where(fits, slot, table.spare), length - count, count, live.to(tl.int64))


@triton.jit
def _slot_or_spare(table: SlotTable, slot_B, i, live):
    slot = tl.load(slot_B + i, mask=live, other=0)
    length = tl.load(table.length_S + slot, mask=live, other=0)
    limit = tl.load(table.limit_S + slot, mask=live, other=0)
    return tl.where(length < limit, slot, table.spare)


@triton.jit
def _store_packed(table: SlotTable, out: Packed, b, span, first_token, first_row, B, T, N):
    """Write the tokens and rows of request b; for the last request also the padding after them."""
    j, token_p = tl.arange(0, LANES), table.token_SL + span.slot * table.W + span.start
    for begin in range(0, span.count, LANES):
        i = begin + j
        token = tl.load(token_p + i, mask=i < span.count, other=0)
        tl.store(out.token_T + first_token + i, token, mask=i < span.count)
        tl.store(out.position_T + first_token + i, span.start + i, mask=i < span.count)
    end_token, end_row = first_token + span.count, first_row + span.rows
    tl.store(out.row_N + first_row + j, end_token - span.rows + j, mask=j < span.rows)
    tl.store(out.start_B1 + b, first_token)
    tl.store(out.length_B + b, span.start + span.count)
    if b == B - 1:
        tl.store(out.start_B1 + B, end_token)
        token = tl.load(table.token_SL + zero_like(span.slot) + table.spare * table.W)
        for begin in range(end_token, T, LANES):
            i = begin + j
            tl.store(out.token_T + i, token, mask=i < T)
            tl.store(out.position_T + i, 0, mask=i < T)
        for begin in range(end_row, N, LANES):
            tl.store(out.row_N + begin + j, 0, mask=begin + j < N)


@triton.jit(do_not_specialize=["B"])
def count_kernel(table: SlotTable, slot_B, most_B, num_B, position_B, B, OVERLAP: tl.constexpr):
    """A program computes, for CHUNK requests, how many drafts each may have at most, and where the
    first draft goes: after the known tokens."""
    wait_for_writes(OVERLAP)
    b = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    slot = tl.load(slot_B + b, mask=b < B, other=0)
    length = tl.load(table.length_S + slot, mask=b < B, other=0)
    room = tl.load(table.limit_S + slot, mask=b < B, other=0) - length - 1
    num = tl.minimum(tl.load(most_B + b, mask=b < B, other=0), room)
    tl.store(num_B + b, tl.maximum(num, 0), mask=b < B)
    tl.store(position_B + b, length, mask=b < B)


@triton.jit(do_not_specialize=["K"])
def write_drafts_kernel(table: SlotTable, slot_B, position_B, num_B, token_BK, K, last_id,
                        KP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """A program writes one request's drafts after its known tokens, as ids in 0..last_id."""
    wait_for_writes(OVERLAP)
    table = table  # makes values of fields that are 1, see `records.py`
    b, i = tl.program_id(0), tl.arange(0, KP)
    live = (i < K) & (i < tl.load(num_B + b))
    token = tl.load(token_BK + b * K + i, mask=live, other=0)
    draft_p = table.token_SL + tl.load(slot_B + b) * table.W + tl.load(position_B + b)
    tl.store(draft_p + i, tl.minimum(tl.maximum(token, 0), last_id), mask=live)


@triton.jit(do_not_specialize=["B", "K"])
def advance_kernel(table: SlotTable, step: StepTokens, verdict: Verdict, packet, B, K,
                   KP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """A program per request: see `Steps.advance`. The spare slot, at its limit, stays as it is."""
    wait_for_writes(OVERLAP)
    table = table
    b, i = tl.program_id(0), tl.arange(0, KP)
    slot, num_tokens = tl.load(step.slot_B + b), tl.load(step.num_tokens_B + b)
    length, limit = tl.load(table.length_S + slot), tl.load(table.limit_S + slot)
    computed, d = tl.load(table.computed_S + slot), b.to(tl.int64)
    if step.decider_B is not None:
        d = tl.load(step.decider_B + b)
    tl.debug_barrier()  # every warp has read the slot before one writes it
    active, accepted = length < limit, zero_like(length)
    tl.store(packet + b, computed)
    if d >= 0:  # request b is number d of those that decide
        accepted = tl.load(verdict.n_accept_B + d)
        finite = tl.load(verdict.finite_B + d).to(tl.int64)
        token = tl.load(verdict.token_BK1 + d * (K + 1) + i, mask=i <= K, other=-1)
        packet_p = packet + B + d * (K + 4)
        tl.store(packet_p, tl.load(step.num_D + d))
        tl.store(packet_p + 1, accepted)
        tl.store(packet_p + 2, finite)
        tl.store(packet_p + 3 + i, token, mask=i <= K)
        end = length + accepted + finite
        token_p = table.token_SL + slot * table.W + length
        tl.store(token_p + i, token, mask=active & (length + i < end))
        tl.store(table.length_S + slot, end, mask=active)
        tl.store(table.limit_S + slot, end, mask=active & (finite == 0))
    tl.store(table.computed_S + slot, computed + num_tokens + accepted, mask=active)


@triton.jit(do_not_specialize=["B", "T"])
def shift_kernel(table: SlotTable, slot_B, start_B1, length_B, token_T, row_B, B, T,
                 OVERLAP: tl.constexpr):  # fmt: skip
    """A program writes the token after each token of a request, and the request's last row (see
    `Steps.shift`). The last program also writes the padding."""
    wait_for_writes(OVERLAP)
    table = table
    b = tl.program_id(0)
    slot, length = tl.load(slot_B + b), tl.load(length_B + b)
    start, end = tl.load(start_B1 + b), tl.load(start_B1 + b + 1)
    first = length - (end - start)
    last = tl.minimum(length - 1, tl.load(table.length_S + slot) - 2)
    tl.store(row_B + b, start + tl.maximum(last - first, 0))
    stop = tl.where(b == B - 1, T, end)
    for begin in range(start, stop, LANES):
        t = begin + tl.arange(0, LANES)
        next_position = tl.minimum(first + (t - start) + 1, table.W - 1)
        token = tl.load(table.token_SL + slot * table.W + next_position, mask=t < stop, other=0)
        tl.store(token_T + t, tl.maximum(token, 0), mask=t < stop)


@triton.jit(do_not_specialize=["B"])
def join_kernel(drafts, num_B, token_BK, B, K: tl.constexpr, OVERLAP: tl.constexpr):
    """A program joins the drafts of CHUNK requests. drafts: K tensors [B]."""
    wait_for_writes(OVERLAP)
    b = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    num = tl.load(num_B + b, mask=b < B, other=0)
    for i in tl.static_range(K):
        token = tl.load(drafts[i] + b, mask=b < B, other=-1)
        tl.store(token_BK + b * K + i, tl.where(i < num, token, -1), mask=b < B)


@triton.jit
def search_kernel(table: SlotTable, lookup: Lookup, shortest, longest, OVERLAP: tl.constexpr):
    """Programs: (request, part of its text). A program writes the highest rank of the suffix's
    occurrences that end in the part. Longer occurrences rank higher. Of equal lengths, occurrences
    before enough tokens for all drafts rank above the rest; among the former later positions rank
    higher, among the rest earlier positions."""
    wait_for_writes(OVERLAP)
    table, lookup = table, lookup
    b, part = tl.program_id(0), tl.program_id(1)
    num, last = tl.load(lookup.num_B + b), tl.load(lookup.position_B + b) - 1
    text = table.token_SL + tl.load(lookup.slot_B + b) * table.W
    place = part * PART + tl.arange(0, PART)
    best = zero_like(num)
    if (num > 0) & (part * PART < last):
        length, matches = zero_like(place), place < last
        for back in range(longest):
            matches &= place >= back
            token = tl.load(text + tl.maximum(last - back, 0))
            matches &= tl.load(text + place - back, mask=matches, other=-1) == token
            length += matches.to(tl.int32)
        minor_rank = tl.where(last - place >= num, table.W + place, table.W - 1 - place)
        rank = tl.where(length >= shortest, length.to(tl.int64) * (2 * table.W) + minor_rank, 0)
        best = tl.max(rank, 0)
    tl.store(lookup.rank_BP + b * lookup.parts + part, best)


@triton.jit(do_not_specialize=["K"])
def copy_match_kernel(table: SlotTable, lookup: Lookup, token_BK, kept_B, K, KP: tl.constexpr,
                      PP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """A program drafts the tokens after a request's occurrence of the highest rank."""
    wait_for_writes(OVERLAP)
    table, lookup = table, lookup
    b, i, part = tl.program_id(0), tl.arange(0, KP), tl.arange(0, PP)
    rank_P = lookup.rank_BP + b * lookup.parts + part
    rank = tl.max(tl.load(rank_P, mask=part < lookup.parts, other=0), 0)
    minor_rank = rank % (2 * table.W)
    end = tl.where(minor_rank >= table.W, minor_rank - table.W, table.W - 1 - minor_rank) + 1
    num = tl.load(lookup.num_B + b)
    num = tl.minimum(num, tl.maximum(tl.load(lookup.position_B + b) - end, 0))
    num = tl.where(rank > 0, num, 0)
    text = table.token_SL + tl.load(lookup.slot_B + b) * table.W
    tl.store(token_BK + b * K + i, tl.load(text + end + i, mask=i < num, other=-1), mask=i < K)
    tl.store(kept_B + b, num)


class Steps:
    """The `foretoken.ops.steps.Steps` of this backend: launches of these kernels."""

    def __init__(self, state: SlotState) -> None:
        slots, width = state.token_SL.shape
        self._table = SlotTable(*state, width, state.block_SL.shape[1], slots - 1)
        self._overlap = overlaps(state.token_SL.device)

    @zero_if_recording
    def count_drafts(self, slot_B: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
        count = len(slot_B)
        num_B, position_B = _empty(slot_B, count), _empty(slot_B, count)
        args = (self._table, slot_B, most_B, num_B, position_B, count)
        self._launch(count_kernel, (triton.cdiv(count, CHUNK.value),), *args)
        return num_B, position_B

    def write_drafts(
        self, requests: DraftRequests, num_B: Tensor, token_BK: Tensor, last_id: int
    ) -> None:
        (count, width), token_BK = token_BK.shape, token_BK.contiguous()
        args = (self._table, requests.slot_B, requests.position_B, num_B, token_BK, width, last_id)
        self._launch(write_drafts_kernel, (count,), *args, triton.next_power_of_2(width))

    @zero_if_recording
    def pack(self, tokens: StepTokens, sizes: PackSizes, block_size: int) -> ForwardBatch:
        return self._pack(len(tokens.slot_B), tokens, None, sizes, block_size)

    @zero_if_recording
    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        count, (deciding, width) = len(tokens.slot_B), verdict.token_BK1.shape
        packet = _empty(tokens.slot_B, count + deciding * (width + 3))
        verdict = Verdict(*map(Tensor.contiguous, verdict))
        args = (self._table, tokens, verdict, packet, count, width - 1)
        self._launch(advance_kernel, (count,), *args, triton.next_power_of_2(width))
        return packet

    @zero_if_recording
    def begin_round(
        self, requests: DraftRequests, known: int, max_len: int, block_size: int
    ) -> Round:
        count, like = len(requests.slot_B), requests.slot_B
        # Rows at multiples of 16 bytes: for other addresses kernels are compiled again.
        place_3KB = _empty(like, 3, requests.most, count + count % 2)
        kept_B, index_B1 = _empty(like, count), _empty(like, count + 1)
        drafting = RoundTensors(
            requests.slot_B, requests.num_B, requests.position_B, kept_B, index_B1, place_3KB,
            known, max_len,
        )  # fmt: skip
        sizes = PackSizes(known * count, count, known)
        first_pass = self._pack(count, None, drafting, sizes, block_size)
        return Round(kept_B, first_pass, index_B1, *place_3KB[:, :, :count])

    @zero_if_recording
    def shift(
        self, slot_B: Tensor, batch: AttentionBatch, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        token_T, row_B = _empty(slot_B, num_tokens), torch.empty_like(slot_B)
        spans = (slot_B, batch.query_start_B1, batch.length_B)
        args = (self._table, *spans, token_T, row_B, len(slot_B), num_tokens)
        self._launch(shift_kernel, (len(slot_B),), *args)
        return token_T, row_B

    @zero_if_recording
    def join_drafts(self, drafts: Sequence[Tensor], num_B: Tensor) -> Tensor:
        count, width = len(num_B), len(drafts)
        token_BK, programs = _empty(num_B, count, width), triton.cdiv(count, CHUNK.value)
        self._launch(join_kernel, (programs,), tuple(drafts), num_B, token_BK, count, width)
        return token_BK

    @zero_if_recording
    def look_up(
        self, requests: DraftRequests, shortest: int, longest: int
    ) -> tuple[Tensor, Tensor]:
        like, count, parts = requests.num_B, len(requests.num_B), -(-self._table.W // PART.value)
        token_BK, kept_B = _empty(like, count, requests.most), torch.empty_like(like)
        rank_BP = _empty(like, count, parts)
        lookup = Lookup(requests.slot_B, requests.num_B, requests.position_B, rank_BP, parts)
        self._launch(search_kernel, (count, parts), self._table, lookup, shortest, longest)
        widths = triton.next_power_of_2(requests.most), triton.next_power_of_2(parts)
        args = (self._table, lookup, token_BK, kept_B, requests.most)
        self._launch(copy_match_kernel, (count,), *args, *widths)
        return token_BK, kept_B

    def _pack(
        self,
        count: int,
        step: StepTokens | None,
        drafting: RoundTensors | None,
        sizes: PackSizes,
        block_size: int,
    ) -> ForwardBatch:
        like, columns = self._table.length_S, self._table.L
        out = Packed(
            _empty(like, sizes.tokens), _empty(like, sizes.tokens), _empty(like, sizes.rows),
            _empty(like, count + 1), _empty(like, count), _empty(like, count, columns),
            block_size,
        )  # fmt: skip
        _, passes, stride = (3, 1, 0) if drafting is None else drafting.place_3KB.shape
        dims = count, sizes.tokens, sizes.rows, passes, stride, triton.next_power_of_2(passes)
        grid = (count, -(-columns // LANES.value))
        self._launch(pack_kernel, grid, self._table, step, drafting, out, *dims)
        paged = (out.start_B1, out.length_B, out.block_BL, block_size)
        attention = AttentionBatch(*paged, most_queries=sizes.queries, values_fit=True)
        return ForwardBatch(out.token_T, out.position_T, out.row_N, attention)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
        overlap = self._overlap  # each kernel waits before it does anything else
        launch(kernel, grid, *args, OVERLAP=overlap, num_warps=4, **dependent(overlap))


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=like.device)
