"""Bookkeeping of a step over its slots, in C++; see `foretoken.ops.steps.Steps`.

At batch 1 a function takes 0.1 us in C++, and the call 20 times as long. So results are written to
memory that is reused, and tensors over it are cached by their sizes. `shift` and `join_drafts` are
inherited: only drafting pass by pass, in stock operators, needs them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from struct import Struct as Layout
from typing import Any

import numpy as np
import torch
from numpy import empty
from torch import Tensor, from_numpy

from foretoken.errors import IntegrityError
from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import address, struct
from foretoken.ops.backends.torch import steps as stock
from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, Round, SlotState, StepTokens
from foretoken.ops.types import AttentionBatch, Verdict

_MOST_KEPT = 256  # tensors are cached for so many different sizes
_INT64, _NUMPY_INT64 = torch.int64, np.dtype(np.int64)
# Write fields of a reused struct: `arguments.struct` takes 3 times as long.
_fill_2, _fill_5, _fill_6, _fill_8 = (Layout(f"{n}q").pack_into for n in (2, 5, 6, 8))
_SIZES, _OUTCOME = 8 * 5, 8 * 7  # offsets in `Step` of the fields of `pack` and of `advance`


class Steps(stock.Steps):
    """The functions on one `SlotState`, for one thread."""

    def __init__(self, state: SlotState) -> None:
        super().__init__(state)
        self._kept_table = struct(state, *state.token_SL.shape, state.block_SL.shape[1])
        self._table = address(self._kept_table)
        self._batches = _Batches()
        # `Counts`, `Drafts` and `Step` of the C++ side, and their addresses.
        self._counts = array("q", [*[0] * 5, self._table])
        self._drafts = array("q", [*[0] * 8, self._table])
        self._step = array("q", [*[0] * 13, self._table, self._batches.address])
        self._counts_at, self._drafts_at, self._step_at = (
            fields.buffer_info()[0] for fields in (self._counts, self._drafts, self._step)
        )
        self._known: StepTokens | None = None  # `Step` holds the addresses of its tensors
        self._counted: dict[int, tuple[Tensor, Tensor, int, int]] = {}
        native = library.load()
        self._count, self._write = native.foretoken_steps_count, native.foretoken_steps_write
        self._pack, self._advance = native.foretoken_steps_pack, native.foretoken_steps_advance
        self._begin_round = native.foretoken_steps_begin_round
        self._look_up = native.foretoken_steps_look_up

    def count_drafts(self, slot_B: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
        if not (slot_B.is_contiguous() and most_B.is_contiguous()):
            slot_B, most_B = slot_B.contiguous(), most_B.contiguous()
        requests = slot_B.numel()
        kept = self._counted.get(requests)
        if kept is None:
            num_B, position_B = _empty(requests), _empty(requests)
            kept = (num_B, position_B, num_B.data_ptr(), position_B.data_ptr())
            _keep(self._counted, requests, kept)
        num_B, position_B, num, position = kept
        _fill_5(self._counts, 0, slot_B.data_ptr(), most_B.data_ptr(), num, position, requests)
        self._count(self._counts_at)
        return num_B, position_B

    def write_drafts(
        self, asked: DraftRequests, num_B: Tensor, token_BK: Tensor, last_id: int
    ) -> None:
        slot_B, asked_B, position_B = asked.slot_B, asked.num_B, asked.position_B
        if num_B.numel() != asked_B.numel():
            raise IntegrityError(f"{num_B.tolist()} drafts, {asked_B.tolist()} asked for")
        if token_BK.dtype is not _INT64 or not (
            token_BK.is_contiguous() and num_B.is_contiguous() and slot_B.is_contiguous()
            and asked_B.is_contiguous() and position_B.is_contiguous()
        ):  # fmt: skip
            token_BK, num_B = token_BK.to(_INT64).contiguous(), num_B.contiguous()
            slot_B, asked_B, position_B = map(Tensor.contiguous, (slot_B, asked_B, position_B))
        _fill_8(
            self._drafts, 0, slot_B.data_ptr(), asked_B.data_ptr(), position_B.data_ptr(),
            num_B.data_ptr(), token_BK.data_ptr(), num_B.numel(), token_BK.shape[1], last_id,
        )  # fmt: skip
        if status := self._write(self._drafts_at):
            library.check(status, self._write)

    def pack(self, tokens: StepTokens, sizes: PackSizes, block_size: int) -> ForwardBatch:
        if tokens is not self._known:
            self._take(tokens)
        _fill_2(self._step, _SIZES, block_size, sizes.ahead)
        return self._batches.batch(self._pack, self._step_at, sizes.queries, block_size)

    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        if tokens is not self._known:
            self._take(tokens)
        token_BK1, accepted_B, finite_B = verdict
        if token_BK1.dtype is not _INT64 or not (
            token_BK1.is_contiguous() and accepted_B.is_contiguous() and finite_B.is_contiguous()
        ):
            token_BK1 = token_BK1.to(_INT64).contiguous()
            accepted_B, finite_B = accepted_B.contiguous(), finite_B.contiguous()
        deciding, width = token_BK1.shape
        size = tokens.slot_B.numel() + deciding * (width + 3)
        packet = from_numpy(empty(size, _NUMPY_INT64))  # a third less time than `torch.empty`
        _fill_6(
            self._step, _OUTCOME, token_BK1.data_ptr(), accepted_B.data_ptr(), finite_B.data_ptr(),
            packet.data_ptr(), deciding, width - 1,
        )  # fmt: skip
        if status := self._advance(self._step_at):
            library.check(status, self._advance)
        return packet

    def begin_round(self, asked: DraftRequests, known: int, max_len: int, block_size: int) -> Round:
        requests, most, batches = asked.slot_B.numel(), asked.most, _Batches()
        num_B, index_B1 = _empty(requests), _empty(requests + 1)
        place_3KB = _empty(3, most, requests)
        inputs = asked.slot_B, asked.num_B, asked.position_B
        numbers = (requests, most, known, max_len, block_size, self._table, batches.address)
        given = struct((*inputs, num_B, index_B1, place_3KB), *numbers)
        first = batches.batch(self._begin_round, address(given), known, block_size)
        return Round(num_B, first, index_B1, *place_3KB.unbind())

    def look_up(self, asked: DraftRequests, shortest: int, longest: int) -> tuple[Tensor, Tensor]:
        requests, most = asked.slot_B.numel(), asked.most
        num_B, token_BK = _empty(requests), _empty(requests, most)
        inputs = asked.slot_B, asked.num_B, asked.position_B
        given = struct((*inputs, num_B, token_BK), requests, most, 0, self._table)
        self._look_up(given, shortest, longest)
        return token_BK, num_B

    def _take(self, tokens: StepTokens) -> None:
        """Look up addresses; `advance` reuses those of `pack` if it gets the same object."""
        slot_B, num_tokens_B, of_B, num_D = tokens
        if not (
            slot_B.is_contiguous() and num_tokens_B.is_contiguous() and num_D.is_contiguous()
            and (of_B is None or of_B.is_contiguous())
        ):  # fmt: skip
            of_B = None if of_B is None else of_B.contiguous()
            slot_B, num_tokens_B = slot_B.contiguous(), num_tokens_B.contiguous()
            tokens = StepTokens(slot_B, num_tokens_B, of_B, num_D.contiguous())
        self._known = tokens  # if these are copies, the next call makes new ones
        _fill_5(
            self._step, 0, slot_B.data_ptr(), num_tokens_B.data_ptr(),
            0 if of_B is None else of_B.data_ptr(), tokens.num_D.data_ptr(), slot_B.numel(),
        )  # fmt: skip


class _Batches:
    """Memory of packed batches, and the tensors over it.

    address: of `Packed` of the C++ side
    """

    def __init__(self) -> None:
        # Address and capacity of the memory; sizes of the last batch: T, N, B, L.
        self._packed = array("q", bytes(8 * 6))
        self.address = self._packed.buffer_info()[0]
        self._kept: dict[bytes, tuple[Tensor, ...]] = {}

    def batch(
        self, pack: Callable[[int], int], given: int, queries: int, block_size: int
    ) -> ForwardBatch:
        """Pack a batch with a native function; it overwrites the last batch."""
        if status := pack(given):
            library.check(status, pack)
        parts = self._kept.get(self._packed.tobytes())
        if parts is None:
            tokens, rows, requests, columns = self._packed[2:]
            sizes = (tokens, tokens, rows, requests + 1, requests, requests * columns)
            if sum(sizes) > self._packed[1]:  # the memory was too small, nothing was written
                self._memory = _empty(2 * sum(sizes))
                self._packed[0], self._packed[1] = self._memory.data_ptr(), 2 * sum(sizes)
                self._kept.clear()
                return self.batch(pack, given, queries, block_size)
            *flat, block = self._memory[: sum(sizes)].split_with_sizes(sizes)
            parts = (*flat, block.view(requests, columns))
            _keep(self._kept, self._packed.tobytes(), parts)
        token_T, position_T, row_N, start_B1, length_B, block_BL = parts
        attention = AttentionBatch(start_B1, length_B, block_BL, block_size, queries, True)
        return ForwardBatch(token_T, position_T, row_N, attention)


def _keep(kept: dict[Any, Any], key: object, value: object) -> None:
    """Cache a value; a full cache is emptied first."""
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    kept[key] = value


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=_INT64)
