"""The state of requests by slot: one table of tensors, on any device.

A slot is a request's permanent index from admission to release. Rows are never reordered: a batch
gathers the rows that it needs.

The scheduler's view of a request may be a step late; lengths here are the truth. Other parts that
keep state by slot (mainly drafters) register here, so that one `release` reaches all state and one
check finds leaks. In each step the runner calls `apply`, `begin`, `count_drafts`, `write_drafts`,
`pack` and `advance`, in this order.

The table has one slot more than there may be requests: the spare, which pads captured steps. It has
one token and may have no more; all its blocks are the cache's last block, which no request gets. A
request that may have no more tokens (its limit is reached, or its logits were not finite) may still
be in a step: then the spare is computed instead, and no outcome is kept.

Shape suffixes: S slots, L tokens or blocks of a slot, A admissions, B requests, D requests that
decide (the step draws tokens for them), K drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.errors import IntegrityError
from foretoken.ops import DraftBlock, SlotParams, Verdict
from foretoken.ops.pinned import Staging, to_device
from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, SlotState, Steps, StepTokens
from foretoken.sampling.noise_key import to_int64
from foretoken.slots.step import Admission, StepInput, StepPlan, StepRequests, StepShape

_log = logging.getLogger(__name__)

Array = NDArray[Any]

LEAST_TOP_P = 2.0**-149
"""The smallest float32 above 0, to which smaller `top_p` are raised: 0 is out of range. Any such
value keeps only the likeliest token."""


class SlotSizes(NamedTuple):
    """The sizes of a table.

    num_slots: most requests that run at the same time.
    max_tokens, max_drafts: most tokens and drafts of a request.
    num_blocks: columns of a block table.
    spare_block: the cache block of the spare slot.
    """

    num_slots: int
    max_tokens: int
    max_drafts: int
    num_blocks: int
    spare_block: int


class SlotOwner(Protocol):
    """An object that keeps state by slot outside of the table."""

    def release(self, slot: int) -> None:
        """Forget the request in this slot: it ended, or was preempted."""

    def held_slots(self) -> Iterable[int]:
        """Slots with state."""


class SlotTable:
    """State by slot.

    Args:
        steps_of: `Backend.steps`: makes the functions that read and change the state in a step.
        on_host: whether the state may be read as soon as a step was launched; True only on a CPU.

    Attributes:
        state: tokens, blocks and lengths.
        params: sampling parameters; their tensors are never replaced. `has_filters` and `rules`
            describe the requests that have slots, and are known without reading the device.
        drafter_S: int64, the number of each request's drafter.
        drafters: the numbers in `drafter_S` of the requests that have slots.
        admitted: by slot, the admission of the request.
    """

    def __init__(
        self,
        sizes: SlotSizes,
        device: torch.device,
        steps_of: Callable[[SlotState], Steps],
        *,
        on_host: bool,
    ) -> None:
        self.device, self.on_host = device, on_host
        self.num_slots = self.spare = sizes.num_slots
        self._spare_block = sizes.spare_block
        count, width = sizes.num_slots + 1, sizes.max_tokens + sizes.max_drafts + 1

        def column(fill: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((count,), fill, dtype=dtype, device=device)

        blocks = (count, sizes.num_blocks)
        self.state = SlotState(
            # The last column of tokens is never read.
            torch.zeros(count, width, dtype=torch.int32, device=device),
            torch.full(blocks, sizes.spare_block, dtype=torch.int64, device=device),
            length_S=column(1), computed_S=column(0), limit_S=column(1),
        )  # fmt: skip
        self.steps = steps_of(self.state)
        self.drafter_S = column(0)
        self.params = SlotParams(
            key_S=column(0), temperature_S=column(1, torch.float32), top_k_S=column(0),
            top_p_S=column(1, torch.float32), min_p_S=column(0, torch.float32), rule_S=column(0),
            has_filters=False, rules=frozenset(),
            values_fit=True,  # `SamplingParams` has checked them
        )  # fmt: skip
        self.drafters = frozenset[int]()
        self.admitted: dict[int, Admission] = {}
        self._inputs: dict[int, Tensor] = {}  # of captured steps, by padded size
        # Weak, because drafters refer to this table: after `gc.freeze` (`engine/build.py`) a cycle
        # of references would never be freed.
        self._owners = WeakValueDictionary[str, SlotOwner]()
        if on_host:
            views = (column.numpy() for column in self.state)
            self.token_SL, self.block_SL, self.length_S, self.computed_S, self.limit_S = views

    # Numpy views of `state`, only if `on_host`.
    token_SL: Array
    block_SL: Array
    length_S: Array
    computed_S: Array
    limit_S: Array

    @staticmethod
    def bytes_per_slot(max_tokens: int, block_size: int) -> int:
        return 4 * max_tokens + 8 * -(-max_tokens // block_size)

    def text(self, slot: int, first: int = 0) -> Array:
        """Known tokens of a slot from index `first` on, int32; only if `on_host`."""
        return self.token_SL[slot, first : self.length_S[slot]]

    def have_ended(self, slots: Sequence[int]) -> bool:
        """Whether none of these requests may have more tokens; always False unless `on_host`."""
        return self.on_host and all(self.length_S[s] >= self.limit_S[s] for s in slots)

    def register(self, name: str, owner: SlotOwner) -> None:
        """Let `owner` take part in releases and checks; the table keeps only a weak reference."""
        self._owners[name] = owner

    def apply(self, plan: StepPlan) -> None:
        """Write a plan's releases, admissions and new blocks."""
        for slot in plan.released:
            self._release(slot)
        for admission in plan.admissions:
            self._release(admission.slot)
        self.admitted |= {admission.slot: admission for admission in plan.admissions}
        if plan.released or plan.admissions:
            self._set_flags()
        if plan.admissions:
            self._write_admissions(plan.admissions)
        if plan.new_blocks:
            self._write_blocks(plan.new_blocks)

    def _set_flags(self) -> None:
        requests = self.admitted.values()
        has_filters = any(request.params.filters_logits for request in requests)
        rules = frozenset(request.rule for request in requests)
        self.params = replace(self.params, has_filters=has_filters, rules=rules)
        self.drafters = frozenset(request.drafter for request in requests)

    def _release(self, slot: int) -> None:
        """Forget the request in a slot. Exceptions of owners are only logged."""
        self.admitted.pop(slot, None)
        for name, owner in self._owners.items():
            try:
                owner.release(slot)
            except Exception:
                _log.exception("`%s` could not release its state of slot %d.", name, slot)

    def _write_admissions(self, admissions: Sequence[Admission]) -> None:
        """Write the state of requests that get a slot, in three copies to the device: one of all
        integers, one of all floats, one of all tokens."""
        params, state = self.params, self.state
        integers = [
            (params.key_S, [to_int64(a.key) for a in admissions]),
            # A `top_k` above V, as 2**31, is off.
            (params.top_k_S, [min(max(a.params.top_k, 0), 2**31) for a in admissions]),
            (params.rule_S, [int(a.rule) for a in admissions]),
            (self.drafter_S, [a.drafter for a in admissions]),
            (state.length_S, [len(a.token_ids) for a in admissions]),
            (state.computed_S, [a.num_computed for a in admissions]),
            (state.limit_S, [a.limit for a in admissions]),
        ]
        floats = [
            (params.temperature_S, [a.params.temperature for a in admissions]),
            (params.top_p_S, [max(a.params.top_p, LEAST_TOP_P) for a in admissions]),
            (params.min_p_S, [a.params.min_p for a in admissions]),
        ]
        slots = [a.slot for a in admissions]
        rows: Array = np.array([slots, *(values for _, values in integers)], dtype=np.int64)
        slot_A, *columns = self._send(rows)
        columns += self._send(np.array([values for _, values in floats], dtype=np.float32))
        for (column_S, _), value_A in zip([*integers, *floats], columns, strict=True):
            column_S[slot_A] = value_A
        texts = [a.token_ids for a in admissions]
        token_AL: Array = np.zeros((len(texts), max(map(len, texts))), dtype=np.int32)
        for row, ids in zip(token_AL, texts, strict=True):
            row[: len(ids)] = ids
        state.token_SL[slot_A, : token_AL.shape[1]] = self._send(token_AL)
        state.block_SL.index_fill_(0, slot_A, self._spare_block)  # drop the former request's blocks

    def _write_blocks(self, new_blocks: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Write `StepPlan.new_blocks` into block tables; a later entry replaces an earlier one."""
        width = self.state.block_SL.shape[1]
        block_at = {
            slot * width + column: block
            for slot, first, block_ids in new_blocks
            for column, block in enumerate(block_ids, first)
        }
        places, blocks = self._send(np.array([[*block_at], [*block_at.values()]], dtype=np.int64))
        self.state.block_SL.view(-1)[places] = blocks

    def draws_at_random(self, slots: Iterable[int]) -> bool:
        return any(self.admitted[slot].params.temperature > 0 for slot in slots)

    def begin(self, step: StepInput, shape: StepShape | None = None) -> StepRequests:
        """A step's requests as tensors. The flags of `shape`, the shape of a captured or replayed
        step, replace those of the requests."""
        params, drafters = self.params, self.drafters
        if shape is None:
            most_drafts, samples = max(step.max_drafts_B), self.draws_at_random(step.slot_B)
        else:
            most_drafts, samples, drafters = shape.most_drafts, shape.samples, shape.drafters
            params = replace(params, has_filters=shape.has_filters, rules=shape.rules)
        slot_B, num_tokens_B, max_drafts_B = self._send_numbers(step, shape)
        slot_D, max_drafts_D, decider_B = slot_B, max_drafts_B, None
        if not all(step.decides_B):
            deciding: Array = np.array([step.slot_B, step.max_drafts_B], dtype=np.int64)
            # Indexing by a list yields column order; kernels need contiguous rows.
            deciding = np.ascontiguousarray(deciding[:, list(step.decides_B)])
            # An even number of columns aligns rows to 16 bytes. Kernels are compiled again for each
            # other alignment.
            padded = np.pad(deciding, ((0, 0), (0, deciding.shape[1] % 2)))
            slot_D, max_drafts_D = self._send(padded)[:, : deciding.shape[1]].unbind()
            decider_B = self._send(np.array(step.decider_B, dtype=np.int64))
        return StepRequests(
            step, params, drafters, slot_B, num_tokens_B, slot_D, max_drafts_D, decider_B,
            most_drafts, samples, shape,
        )  # fmt: skip

    def _send_numbers(self, step: StepInput, shape: StepShape | None) -> Iterable[Tensor]:
        """Slots, known tokens and most drafts on the device, padded to the size of the shape. All
        steps of one captured size share one tensor, because graphs read fixed addresses."""
        count = len(step.slot_B)
        if shape is None and self.device.type == "cpu":
            return [torch.from_numpy(np.array(column, dtype=np.int64)) for column in step[:3]]
        size = count if shape is None else shape.size
        staging = Staging((3, size + size % 2), torch.int64, self.device)
        numbers = staging.host.numpy()
        numbers[:, :count] = step[:3]
        numbers[0, count:], numbers[1, count:], numbers[2, count:] = self.spare, 1, 0
        if shape is None:
            on_device = staging.host.to(self.device, non_blocking=True)
        else:
            if size not in self._inputs:
                self._inputs[size] = torch.empty_like(staging.host, device=self.device)
            on_device = self._inputs[size].copy_(staging.host, non_blocking=True)
        staging.give_back()
        return on_device[:, :size].unbind()

    def count_drafts(self, requests: StepRequests) -> DraftRequests:
        """How many drafts each deciding request may have, and the position of the first draft."""
        slot_D = requests.slot_D
        num_D, position_D = self.steps.count_drafts(slot_D, requests.max_drafts_D)
        return DraftRequests(
            slot_D, num_D, position_D, requests.most_drafts, requests.params, requests.samples,
            requests.drafters,
        )  # fmt: skip

    def write_drafts(self, requests: DraftRequests, drafts: DraftBlock, last_id: int) -> None:
        """Write drafts after the known tokens; ids above `last_id` become `last_id`."""
        self.steps.write_drafts(requests, drafts.num_B, drafts.token_BK, last_id)

    def pack(
        self, requests: StepRequests, tokens: StepTokens, most: int, block_size: int
    ) -> ForwardBatch:
        """The target's batch: the requests' next known tokens, and drafts of deciding requests.

        First come `most` + 1 rows of logits for each deciding request, then a row for each token
        of prompts whose log-probabilities are wanted. `most`: the most drafts of any request.
        """
        step = requests.step
        size_B, size_D = len(requests.slot_B), len(requests.slot_D)
        num_padded = size_B - len(step.slot_B)  # padding computes one token each
        num_tokens = sum(step.num_tokens_B) + num_padded
        counts = [n + most * d for n, d in zip(step.num_tokens_B, step.decides_B, strict=True)]
        num_rows, queries = size_D * (most + 1), max(counts, default=1 + most)
        sizes = PackSizes(num_tokens + size_D * most, num_rows, queries)
        batch = self.steps.pack(tokens, sizes, block_size)
        prompts = step.reported_prompts_B
        if not prompts:
            return batch
        start_B1, num_deciding_rows = batch.attention.query_start_B1, len(batch.logit_row_N)
        offsets = [torch.arange(step.num_tokens_B[b], device=self.device) for b in prompts]
        prompt_rows = [start_B1[b] + offset for b, offset in zip(prompts, offsets, strict=True)]
        row_N = torch.cat([batch.logit_row_N, *prompt_rows])
        if len(row_N) == len(batch.token_T):
            # T rows would mean all tokens in order (`ForwardBatch`): add a row that is never read.
            row_N = torch.cat([row_N, row_N[:1]])
        return batch._replace(logit_row_N=row_N, num_deciding=num_deciding_rows)

    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        """Write the outcome of a step to the slots; see `Steps.advance` for the result."""
        return self.steps.advance(tokens, verdict)

    def check_integrity(self, live: set[int]) -> None:
        """Raise `IntegrityError` if the table or an owner has state of a slot not in `live`."""
        slots_by_owner = {name: owner.held_slots() for name, owner in self._owners.items()}
        for name, slots in ({"requests": self.admitted.keys()} | slots_by_owner).items():
            if leaked := set(slots) - live:
                raise IntegrityError(f"`{name}` has state of slots that are free: {sorted(leaked)}")

    def _send(self, array: Array) -> Tensor:
        return to_device(array, self.device)
