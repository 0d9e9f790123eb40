"""Bookkeeping of a step over its slots, in C++; see `foretoken.ops.steps.Steps`.

At batch 1 a function takes 0.1 us in C++, and its call from Python 20 times as long. So results are
written to memory that is reused, and tensors that view this memory are cached by their sizes.
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

_MAX_CACHED = 256  # sizes for which tensors are cached
_INT64, _NUMPY_INT64 = torch.int64, np.dtype(np.int64)
# Functions that write 2, 5, 6 or 8 fields of a struct: a third of the time of making a new struct.
_fill_2, _fill_5, _fill_6, _fill_8 = (Layout(f"{n}q").pack_into for n in (2, 5, 6, 8))
# Offsets of the fields of the C struct `Step` that `pack` and `advance` write.
_PACK_OFFSET, _ADVANCE_OFFSET = 8 * 5, 8 * 7


class Steps(stock.Steps):
    """`ops.steps.Steps` in C++, for one `SlotState` and one thread.

    A method writes the addresses of its tensors, which are copied if not contiguous or not int64,
    to a C struct. `shift` and `join_drafts`, for drafting pass by pass, are inherited.
    """

    def __init__(self, state: SlotState) -> None:
        super().__init__(state)
        # The C struct `Table` of the slots, kept alive, and its address.
        self._state_struct = struct(state, *state.token_SL.shape, state.block_SL.shape[1])
        self._state_at = address(self._state_struct)
        self._batches = _Batches()
        # The C structs `Counts`, `Drafts` and `Step`, and their addresses.
        self._counts = array("q", [*[0] * 5, self._state_at])
        self._drafts = array("q", [*[0] * 8, self._state_at])
        self._step = array("q", [*[0] * 13, self._state_at, self._batches.address])
        self._counts_at, self._drafts_at, self._step_at = (
            fields.buffer_info()[0] for fields in (self._counts, self._drafts, self._step)
        )
        self._latest_tokens: StepTokens | None = None  # `_step` has their addresses
        # Results by number of requests: `num_B`, `position_B` and their addresses.
        self._count_results: dict[int, tuple[Tensor, Tensor, int, int]] = {}
        native = library.load()
        self._count, self._write = native.foretoken_steps_count, native.foretoken_steps_write
        self._pack, self._advance = native.foretoken_steps_pack, native.foretoken_steps_advance
        self._begin_round = native.foretoken_steps_begin_round
        self._look_up = native.foretoken_steps_look_up

    def count_drafts(self, slot_B: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
        if not (slot_B.is_contiguous() and most_B.is_contiguous()):
            slot_B, most_B = slot_B.contiguous(), most_B.contiguous()
        count = slot_B.numel()
        results = self._count_results.get(count)
        if results is None:
            num_B, position_B = _empty(count), _empty(count)
            results = (num_B, position_B, num_B.data_ptr(), position_B.data_ptr())
            _cache(self._count_results, count, results)
        num_B, position_B, num_at, position_at = results
        _fill_5(self._counts, 0, slot_B.data_ptr(), most_B.data_ptr(), num_at, position_at, count)
        self._count(self._counts_at)
        return num_B, position_B

    def write_drafts(
        self, requests: DraftRequests, num_B: Tensor, token_BK: Tensor, last_id: int
    ) -> None:
        slot_B, allowed_B, position_B = requests.slot_B, requests.num_B, requests.position_B
        if num_B.numel() != allowed_B.numel():
            requested = allowed_B.tolist()
            raise IntegrityError(f"{num_B.tolist()} drafts, but at most {requested} requested")
        if token_BK.dtype is not _INT64 or not (
            token_BK.is_contiguous() and num_B.is_contiguous() and slot_B.is_contiguous()
            and allowed_B.is_contiguous() and position_B.is_contiguous()
        ):  # fmt: skip
            token_BK, num_B = token_BK.to(_INT64).contiguous(), num_B.contiguous()
            slot_B, allowed_B, position_B = map(Tensor.contiguous, (slot_B, allowed_B, position_B))
        _fill_8(
            self._drafts, 0, slot_B.data_ptr(), allowed_B.data_ptr(), position_B.data_ptr(),
            num_B.data_ptr(), token_BK.data_ptr(), num_B.numel(), token_BK.shape[1], last_id,
        )  # fmt: skip
        if status := self._write(self._drafts_at):
            library.check(status, self._write)

    def pack(self, tokens: StepTokens, sizes: PackSizes, block_size: int) -> ForwardBatch:
        if tokens is not self._latest_tokens:
            self._set_tokens(tokens)
        _fill_2(self._step, _PACK_OFFSET, block_size, sizes.ahead)
        return self._batches.batch(self._pack, self._step_at, sizes.queries, block_size)

    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        if tokens is not self._latest_tokens:
            self._set_tokens(tokens)
        token_BK1, accepted_B, finite_B = verdict
        if token_BK1.dtype is not _INT64 or not (
            token_BK1.is_contiguous() and accepted_B.is_contiguous() and finite_B.is_contiguous()
        ):
            token_BK1 = token_BK1.to(_INT64).contiguous()
            accepted_B, finite_B = accepted_B.contiguous(), finite_B.contiguous()
        deciding, width = token_BK1.shape
        size = tokens.slot_B.numel() + deciding * (width + 3)
        outcome = from_numpy(empty(size, _NUMPY_INT64))  # a third less time than `torch.empty`
        _fill_6(
            self._step, _ADVANCE_OFFSET, token_BK1.data_ptr(), accepted_B.data_ptr(),
            finite_B.data_ptr(), outcome.data_ptr(), deciding, width - 1,
        )  # fmt: skip
        if status := self._advance(self._step_at):
            library.check(status, self._advance)
        return outcome

    def begin_round(
        self, requests: DraftRequests, known: int, max_len: int, block_size: int
    ) -> Round:
        count, most, batches = requests.slot_B.numel(), requests.most, _Batches()
        num_B, index_B1 = _empty(count), _empty(count + 1)
        place_3KB = _empty(3, most, count)  # `position_KB`, `length_KB`, `index_KB`
        inputs = requests.slot_B, requests.num_B, requests.position_B
        numbers = (count, most, known, max_len, block_size, self._state_at, batches.address)
        native = struct((*inputs, num_B, index_B1, place_3KB), *numbers)
        first = batches.batch(self._begin_round, address(native), known, block_size)
        return Round(num_B, first, index_B1, *place_3KB.unbind())

    def look_up(
        self, requests: DraftRequests, shortest: int, longest: int
    ) -> tuple[Tensor, Tensor]:
        count, most = requests.slot_B.numel(), requests.most
        num_B, token_BK = _empty(count), _empty(count, most)
        inputs = requests.slot_B, requests.num_B, requests.position_B
        native = struct((*inputs, num_B, token_BK), count, most, 0, self._state_at)
        self._look_up(native, shortest, longest)
        return token_BK, num_B

    def _set_tokens(self, tokens: StepTokens) -> None:
        """Write the addresses of `tokens` to `_step`, for `pack` and `advance` of one step."""
        slot_B, num_tokens_B, decider_B, num_D = tokens
        if not (
            slot_B.is_contiguous() and num_tokens_B.is_contiguous() and num_D.is_contiguous()
            and (decider_B is None or decider_B.is_contiguous())
        ):  # fmt: skip
            decider_B = None if decider_B is None else decider_B.contiguous()
            slot_B, num_tokens_B = slot_B.contiguous(), num_tokens_B.contiguous()
            tokens = StepTokens(slot_B, num_tokens_B, decider_B, num_D.contiguous())
        # A copy is not the caller's object, so that the next call copies again.
        self._latest_tokens = tokens
        _fill_5(
            self._step, 0, slot_B.data_ptr(), num_tokens_B.data_ptr(),
            0 if decider_B is None else decider_B.data_ptr(), tokens.num_D.data_ptr(),
            slot_B.numel(),
        )  # fmt: skip


class _Batches:
    """Reused memory of packed batches, the tensors that view it, and its C struct `Packed`."""

    def __init__(self) -> None:
        # `Packed`: address and capacity of the memory; then T, N, B and L of the latest batch.
        self._packed = array("q", bytes(8 * 6))
        self.address = self._packed.buffer_info()[0]
        self._views: dict[bytes, tuple[Tensor, ...]] = {}  # by the fields of `_packed`

    def batch(
        self, pack: Callable[[int], int], struct_at: int, queries: int, block_size: int
    ) -> ForwardBatch:
        """Pack a batch by `pack(struct_at)`, a native function; overwrites the previous batch."""
        if status := pack(struct_at):
            library.check(status, pack)
        views = self._views.get(self._packed.tobytes())
        if views is None:
            tokens, rows, requests, columns = self._packed[2:]
            sizes = (tokens, tokens, rows, requests + 1, requests, requests * columns)
            if sum(sizes) > self._packed[1]:  # the memory was too small: nothing was written
                self._memory = _empty(2 * sum(sizes))
                self._packed[0], self._packed[1] = self._memory.data_ptr(), 2 * sum(sizes)
                self._views.clear()
                return self.batch(pack, struct_at, queries, block_size)
            *flat, block = self._memory[: sum(sizes)].split_with_sizes(sizes)
            views = (*flat, block.view(requests, columns))
            _cache(self._views, self._packed.tobytes(), views)
        token_T, position_T, row_N, start_B1, length_B, block_BL = views
        attention = AttentionBatch(start_B1, length_B, block_BL, block_size, queries, True)
        return ForwardBatch(token_T, position_T, row_N, attention)


def _cache(cache: dict[Any, Any], key: object, value: object) -> None:
    """Add a value to a cache; a full cache is emptied first."""
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=_INT64)
