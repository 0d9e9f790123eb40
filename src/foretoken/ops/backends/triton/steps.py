"""Bookkeeping of a step over its slots, a kernel or two each; see `foretoken.ops.steps.Steps`.

A program takes a request. What it must know of those before it (how many tokens they compute) it
sums up itself: that costs less than a kernel of its own. Sizes of batches are no constants, so that
a kernel is compiled once for nearly all of them.

Shape suffixes as in `ops/steps.py`.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.ops.backends.triton.launch import launch
from foretoken.ops.backends.triton.records import Outcome
from foretoken.ops.backends.triton.rows import wait_for_writes
from foretoken.ops.steps import Packed, PackSizes, Round, RoundSizes, SlotState, StepTokens
from foretoken.ops.types import AttentionBatch, Verdict

SPAN = tl.constexpr(1024)  # tokens, or block-table columns, that a program handles at once
TEXT = tl.constexpr(2048)  # tokens in which a program looks for a suffix
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


class Asked(NamedTuple):
    """A round of drafting as asked for, and the parts of `Round`, rows of which lie apart."""

    slot_B: Tensor
    num_B: Tensor
    position_B: Tensor
    kept_B: Tensor
    index_B1: Tensor
    numbers_3KB: Tensor
    stride: int
    most: int
    known: int
    max_len: int


class Out(NamedTuple):
    """The tensors of `Packed`, and their sizes."""

    token_T: Tensor
    position_T: Tensor
    row_N: Tensor
    start_B1: Tensor
    length_B: Tensor
    block_BL: Tensor
    B: int
    T: int
    N: int
    block_size: int


class Wanted(NamedTuple):
    """Slots for which B drafts are counted, written or looked up."""

    slot_B: Tensor
    num_B: Tensor
    position_B: Tensor
    B: int


@triton.jit
def span_of(table: Table, step: StepTokens, asked: Asked, i, live):
    """What request i computes, or each of a vector; none where not live."""
    if step is not None:
        slot = tl.load(step.slot_B + i, mask=live, other=0)
        of = i.to(tl.int64)
        if step.of_B is not None:
            of = tl.load(step.of_B + i, mask=live, other=-1)
        want = tl.load(step.num_D + of, mask=live & (of >= 0), other=-1) + 1
        count = tl.load(step.num_tokens_B + i, mask=live, other=0) + tl.maximum(want - 1, 0)
        return Span(slot, tl.load(table.computed_S + slot, mask=live, other=0), count, want)
    else:
        slot = tl.load(asked.slot_B + i, mask=live, other=0)
        position = tl.load(asked.position_B + i, mask=live, other=0)
        fits = position <= asked.max_len
        known = tl.where(fits, position, 1)
        count = tl.minimum(known, asked.known)
        want = live.to(tl.int64)
        return Span(tl.where(fits, slot, table.spare), known - count, count, want)


@triton.jit
def pack_kernel(
    table: Table, step: StepTokens, asked: Asked, out: Out, KP: tl.constexpr, OVERLAP: tl.constexpr
):
    """Programs: (request, SPAN columns of the block table). The first of these do all the rest.

    step, asked: one of them is None.
    """
    wait_for_writes(OVERLAP)
    table, step, asked, out = table, step, asked, out  # see `records.py`
    b, part = tl.program_id(0), tl.program_id(1)
    span = span_of(table, step, asked, b, b < out.B)
    length = span.start + span.count
    column, trash = part * SPAN + tl.arange(0, SPAN), span.slot * 0
    if asked is not None:
        room = asked.max_len + 1 - tl.load(asked.position_B + b)
        kept = tl.minimum(tl.load(asked.num_B + b), tl.maximum(room, 0))
        last = tl.minimum(asked.max_len, table.L * out.block_size)
        owned = tl.cdiv(length + kept, out.block_size)
        reached = tl.cdiv(tl.minimum(length + asked.most, last), out.block_size)
        reached = tl.maximum(owned, reached)
        trash = tl.load(table.block_SL + table.spare * table.L)
    else:
        owned = tl.cdiv(length, out.block_size)
        reached = owned
    its_blocks = table.block_SL + span.slot * table.L + column
    block = tl.load(its_blocks, mask=column < tl.minimum(owned, table.L), other=trash)
    to = out.block_BL + b.to(tl.int64) * table.L + column
    tl.store(to, block, mask=column < tl.minimum(reached, table.L))
    if part > 0:
        return
    if asked is not None:
        i = tl.arange(0, KP)
        end = tl.minimum(length + i, last)
        at = asked.numbers_3KB + i * asked.stride + b
        passes = asked.most * asked.stride
        tl.store(at, end - 1, mask=i < asked.most)
        tl.store(at + passes, end, mask=i < asked.most)
        tl.store(at + 2 * passes, i, mask=i < asked.most)
        tl.store(asked.kept_B + b, kept)
        tl.store(asked.index_B1 + b, b)
        if b == out.B - 1:
            tl.store(asked.index_B1 + b + 1, b + 1)
    first_token, first_row = span.count * 0, span.want * 0
    for begin in range(0, b, AT_ONCE):
        i = begin + tl.arange(0, AT_ONCE)
        before = span_of(table, step, asked, i, i < b)
        first_token += tl.sum(before.count, 0)
        first_row += tl.sum(before.want, 0)
    _store_packed(table, out, b, span, first_token, first_row)


@triton.jit
def _store_packed(table: Table, out: Out, b, span, first_token, first_row):
    """Write the tokens and rows of request b, and those of padding behind the last request's."""
    tl.store(out.start_B1 + b, first_token)
    tl.store(out.length_B + b, span.start + span.count)
    j = tl.arange(0, SPAN)
    its_tokens = table.token_SL + span.slot * table.W + span.start
    for begin in range(0, span.count, SPAN):
        i = begin + j
        token = tl.load(its_tokens + i, mask=i < span.count, other=0)
        tl.store(out.token_T + first_token + i, token.to(tl.int64), mask=i < span.count)
        tl.store(out.position_T + first_token + i, span.start + i, mask=i < span.count)
    end_token, end_row = first_token + span.count, first_row + span.want
    tl.store(out.row_N + first_row + j, end_token - span.want + j, mask=j < span.want)
    if b == out.B - 1:
        tl.store(out.start_B1 + b + 1, end_token)
        spare_token = tl.load(table.token_SL + table.spare.to(tl.int64) * table.W)
        for begin in range(end_token, out.T, SPAN):
            padding = begin + j < out.T
            tl.store(out.token_T + begin + j, spare_token.to(tl.int64), mask=padding)
            tl.store(out.position_T + begin + j, 0, mask=padding)
        for begin in range(end_row, out.N, SPAN):
            tl.store(out.row_N + begin + j, 0, mask=begin + j < out.N)


@triton.jit
def count_kernel(table: Table, wanted: Wanted, most_B, OVERLAP: tl.constexpr):
    """K_b and position of AT_ONCE requests a program."""
    wait_for_writes(OVERLAP)
    b = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    live = b < wanted.B
    slot = tl.load(wanted.slot_B + b, mask=live, other=0)
    length = tl.load(table.length_S + slot, mask=live, other=0)
    left = tl.load(table.limit_S + slot, mask=live, other=0) - length - 1
    num = tl.minimum(tl.load(most_B + b, mask=live, other=0), left)
    tl.store(wanted.num_B + b, tl.maximum(num, 0), mask=live)
    tl.store(wanted.position_B + b, length, mask=live)


@triton.jit
def write_kernel(
    table: Table, wanted: Wanted, token_BK, K, last_id, KP: tl.constexpr, OVERLAP: tl.constexpr
):
    """A program writes the drafts of a request."""
    wait_for_writes(OVERLAP)
    table = table
    b, i = tl.program_id(0), tl.arange(0, KP)
    slot, position = tl.load(wanted.slot_B + b), tl.load(wanted.position_B + b)
    live = (i < K) & (i < tl.load(wanted.num_B + b))
    token = tl.load(token_BK + b * K + i, mask=live, other=0)
    token = tl.minimum(tl.maximum(token, 0), last_id).to(tl.int32)
    tl.store(table.token_SL + slot * table.W + position + i, token, mask=live)


@triton.jit
def advance_kernel(
    table: Table, step: StepTokens, verdict: Outcome, packet, B, K, KP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program takes over the step of a request; of the spare's many programs none writes."""
    wait_for_writes(OVERLAP)
    table = table
    b, i = tl.program_id(0), tl.arange(0, KP)
    slot = tl.load(step.slot_B + b)
    length, limit = tl.load(table.length_S + slot), tl.load(table.limit_S + slot)
    computed = tl.load(table.computed_S + slot)
    goes_on = length < limit
    tl.store(packet + b, computed)
    accepted, of = length * 0, b.to(tl.int64)
    if step.of_B is not None:
        of = tl.load(step.of_B + b)
    if of >= 0:
        accepted, finite = tl.load(verdict.n_accept_B + of), tl.load(verdict.finite_B + of)
        token = tl.load(verdict.token_BK1 + of * (K + 1) + i, mask=i <= K, other=-1)
        to = packet + B + of * (K + 4)
        tl.store(to, tl.load(step.num_D + of))
        tl.store(to + 1, accepted)
        tl.store(to + 2, finite.to(tl.int64))
        tl.store(to + 3 + i, token.to(tl.int64), mask=i <= K)
        emitted = accepted + finite.to(tl.int64)
        its_tokens = table.token_SL + slot * table.W + length
        tl.store(its_tokens + i, token.to(tl.int32), mask=goes_on & (i < emitted))
        tl.store(table.length_S + slot, length + emitted, mask=goes_on)
        tl.store(table.limit_S + slot, length + emitted, mask=goes_on & (finite == 0))
    num_tokens = tl.load(step.num_tokens_B + b)
    tl.store(table.computed_S + slot, computed + num_tokens + accepted, mask=goes_on)


@triton.jit
def join_kernel(drafts, num_B, token_BK, B, K: tl.constexpr, OVERLAP: tl.constexpr):
    """A program joins the drafts of AT_ONCE requests."""
    wait_for_writes(OVERLAP)
    b = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    num = tl.load(num_B + b, mask=b < B, other=0)
    for i in tl.static_range(K):
        token = tl.load(drafts[i] + b, mask=b < B, other=-1)
        tl.store(token_BK + b * K + i, tl.where(i < num, token, -1), mask=b < B)


@triton.jit
def search_kernel(
    table: Table, wanted: Wanted, rank_BP, parts, shortest, longest, OVERLAP: tl.constexpr
):
    """Programs: (request, TEXT of its tokens). Each ranks the best occurrence that ends there.

    Ranks rise with the size of the suffix; then come those with all drafts behind them, the latest
    first, then the others, the earliest first; 0 is none.
    """
    wait_for_writes(OVERLAP)
    table = table
    b, part = tl.program_id(0), tl.program_id(1)
    slot, num = tl.load(wanted.slot_B + b), tl.load(wanted.num_B + b)
    last = tl.load(wanted.position_B + b) - 1
    text, place = table.token_SL + slot * table.W, part * TEXT + tl.arange(0, TEXT)
    best = num * 0
    if (num > 0) & (part * TEXT < last):
        run, goes_on = place * 0, place < last  # an earlier occurrence
        for back in range(longest):
            goes_on &= place >= back
            token = tl.load(text + tl.maximum(last - back, 0))
            goes_on &= tl.load(text + place - back, mask=goes_on, other=-1) == token
            run += goes_on.to(tl.int32)
        within = tl.where(last - place >= num, table.W + place, table.W - 1 - place)
        rank = tl.where(run >= shortest, run.to(tl.int64) * (2 * table.W) + within, 0)
        best = tl.max(rank, 0)
    tl.store(rank_BP + b * parts + part, best)


@triton.jit
def found_kernel(
    table: Table, wanted: Wanted, rank_BP, parts, token_BK, kept_B, K, KP: tl.constexpr,
    PP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program drafts what follows the occurrence of the highest rank."""
    wait_for_writes(OVERLAP)
    table = table
    b, i, part = tl.program_id(0), tl.arange(0, KP), tl.arange(0, PP)
    slot, position = tl.load(wanted.slot_B + b), tl.load(wanted.position_B + b)
    rank = tl.max(tl.load(rank_BP + b * parts + part, mask=part < parts, other=0), 0)
    within = rank % (2 * table.W)
    end = tl.where(within >= table.W, within - table.W, table.W - 1 - within) + 1
    num = tl.minimum(tl.load(wanted.num_B + b), tl.maximum(position - end, 0))
    num = tl.where(rank > 0, num, 0)
    token = tl.load(table.token_SL + slot * table.W + end + i, mask=i < num, other=-1)
    tl.store(token_BK + b * K + i, token.to(tl.int64), mask=i < K)
    tl.store(kept_B + b, num)


def count_drafts(state: SlotState, slot_B: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
    """See `Steps.count_drafts`."""
    num_B, position_B = _empty(slot_B, 2, len(slot_B) + len(slot_B) % 2)[:, : len(slot_B)]
    wanted = Wanted(slot_B, num_B, position_B, len(slot_B))
    _run(count_kernel, slot_B, (_groups(slot_B), 1), (_table(state), wanted, most_B))
    return num_B, position_B


def write_drafts(
    state: SlotState,
    slot_B: Tensor,
    position_B: Tensor,
    num_B: Tensor,
    token_BK: Tensor,
    last_id: int,
) -> None:
    """See `Steps.write_drafts`."""
    requests, most = token_BK.shape
    wanted = Wanted(slot_B, num_B, position_B, requests)
    given = (_table(state), wanted, token_BK.contiguous(), most, last_id)
    _run(
        write_kernel,
        slot_B,
        (requests, 1),
        given,
        triton.next_power_of_2(most),
        variant=token_BK.dtype,
    )


def pack(state: SlotState, tokens: StepTokens, sizes: PackSizes, block_size: int) -> Packed:
    """See `Steps.pack`."""
    out = _out(state, len(tokens.slot_B), sizes, block_size)
    grid = (out.B, -(-out.block_BL.shape[1] // SPAN.value))
    given = (_table(state), tokens, None, out)
    _run(pack_kernel, tokens.slot_B, grid, given, 1, variant=tokens.of_B is None)
    return _packed(out, sizes)


def begin_round(
    state: SlotState,
    slot_B: Tensor,
    num_B: Tensor,
    position_B: Tensor,
    sizes: RoundSizes,
    block_size: int,
) -> Round:
    """See `Steps.begin_round`."""
    requests, most = len(slot_B), sizes.most
    pack_sizes = PackSizes(sizes.known * requests, requests, sizes.known)
    out = _out(state, requests, pack_sizes, block_size)
    # Rows at multiples of 16 bytes: others would have kernels of their own.
    numbers_3KB = _empty(slot_B, 3, most, requests + requests % 2)
    kept_B, index_B1 = _empty(slot_B, requests), _empty(slot_B, requests + 1)
    asked = Asked(
        slot_B, num_B, position_B, kept_B, index_B1, numbers_3KB, numbers_3KB.shape[2], *sizes
    )
    grid = (requests, -(-out.block_BL.shape[1] // SPAN.value))
    given = (_table(state), None, asked, out)
    _run(pack_kernel, slot_B, grid, given, triton.next_power_of_2(most), variant="round")
    position_KB, length_KB, index_KB = numbers_3KB[:, :, :requests]
    return Round(kept_B, _packed(out, pack_sizes), index_B1, position_KB, length_KB, index_KB)


def advance(state: SlotState, tokens: StepTokens, verdict: Verdict) -> Tensor:
    """See `Steps.advance`."""
    requests, (deciding, width) = len(tokens.slot_B), verdict.token_BK1.shape
    packet = _empty(tokens.slot_B, requests + deciding * (width + 3))
    outcome = Outcome(*map(Tensor.contiguous, verdict))
    given = (_table(state), tokens, outcome, packet, requests, width - 1)
    variant = (tokens.of_B is None, verdict.token_BK1.dtype)
    _run(
        advance_kernel, packet, (requests, 1), given, triton.next_power_of_2(width), variant=variant
    )
    return packet


def join_drafts(drafts: Sequence[Tensor], num_B: Tensor) -> Tensor:
    """See `Steps.join_drafts`."""
    token_BK = _empty(num_B, len(num_B), len(drafts))
    given = (tuple(drafts), num_B, token_BK, len(num_B))
    _run(join_kernel, num_B, (_groups(num_B), 1), given, len(drafts))
    return token_BK


def look_up(
    state: SlotState,
    slot_B: Tensor,
    num_B: Tensor,
    position_B: Tensor,
    most: int,
    sizes: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """See `Steps.look_up`."""
    requests, parts = len(slot_B), -(-state.token_SL.shape[1] // TEXT.value)
    rank_BP, token_BK = _empty(slot_B, requests, parts), _empty(slot_B, requests, most)
    kept_B, table = _empty(slot_B, requests), _table(state)
    wanted = Wanted(slot_B, num_B, position_B, requests)
    _run(search_kernel, slot_B, (requests, parts), (table, wanted, rank_BP, parts, *sizes))
    given = (table, wanted, rank_BP, parts, token_BK, kept_B, most)
    widths = triton.next_power_of_2(most), triton.next_power_of_2(parts)
    _run(found_kernel, slot_B, (requests, 1), given, *widths)
    return token_BK, kept_B


def _run(
    kernel: Any,
    like: Tensor,
    grid: tuple[int, int],
    given: tuple[Any, ...],
    *constants: Any,
    variant: Any = None,
) -> None:
    launch(kernel, (*grid, 1), like.device, given, *constants, variant=variant)


def _groups(x_B: Tensor) -> int:
    return -(-len(x_B) // AT_ONCE.value)


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=like.device)


def _table(state: SlotState) -> Table:
    slots, width = state.token_SL.shape
    return Table(*state, width, state.block_SL.shape[1], slots - 1)


def _out(state: SlotState, requests: int, sizes: PackSizes, block_size: int) -> Out:
    """Memory for a batch; T and N as in `sizes`."""
    like, tokens, rows = state.length_S, sizes.tokens, sizes.rows
    return Out(
        _empty(like, tokens), _empty(like, tokens), _empty(like, rows), _empty(like, requests + 1),
        _empty(like, requests), _empty(like, requests, state.block_SL.shape[1]), requests, tokens,
        rows, block_size,
    )  # fmt: skip


def _packed(out: Out, sizes: PackSizes) -> Packed:
    attention = AttentionBatch(
        out.start_B1,
        out.length_B,
        out.block_BL,
        out.block_size,
        most_queries=sizes.queries,
        values_fit=True,
    )
    return Packed(out.token_T, out.position_T, out.row_N, attention)
