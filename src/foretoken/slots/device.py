"""Everything that is kept by request slot, on a device that nobody waits for.

The same slots as in `table.py`, as tensors: a step reads lengths and tokens there and writes them
there, and no number of it is needed on the host to launch the next step. What the host adds between
steps (requests, blocks) is gathered, and written at once when a step begins.

Behind the slots of requests stands one more, the spare: padding of a captured step names it. It has
one token, may have no more, and its blocks are all the cache's last one, which no request is given.
A request that may have no more tokens (its limit is reached, or its logits were not finite) may
still take part in a step: then the spare is computed in its place, and nothing of it is kept.

Shape suffixes: S slots, L tokens or blocks of a slot, B requests, D deciding requests, K drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.ops import DraftBlock
from foretoken.ops.pinned import Staging, to_device
from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, SlotState, Steps, StepTokens
from foretoken.slots.history import Array
from foretoken.slots.parameters import SlotParameters, SlotRequest, numbers_of
from foretoken.slots.step import StepInput, StepRequests, StepResult, StepShape


class DeviceSlotTable(SlotParameters):
    """State by slot as tensors, `state`; see `SlotTable` for what they hold.

    Args:
        steps: of the backend: what reads and changes `state` in a step.
        trash_block: the cache block of whatever is computed for nobody.
    """

    on_host = False

    def __init__(
        self,
        num_slots: int,
        device: torch.device,
        steps: Steps,
        *,
        max_tokens: int,
        max_drafts: int,
        blocks: int,
        trash_block: int,
    ) -> None:
        super().__init__(num_slots + 1, device)
        self.steps = steps
        self.num_slots, self.spare = num_slots, num_slots
        width = max_tokens + max_drafts + 1  # nobody reads the last column

        def numbers(fill: int) -> Tensor:
            return torch.full((num_slots + 1,), fill, dtype=torch.int64, device=device)

        shape = (num_slots + 1, blocks)
        self.state = SlotState(
            torch.zeros(num_slots + 1, width, dtype=torch.int32, device=device),
            torch.full(shape, trash_block, dtype=torch.int64, device=device),
            length_S=numbers(1),
            computed_S=numbers(0),
            limit_S=numbers(1),
        )
        self.drafter_S = numbers(0)
        self._admitted: dict[int, SlotRequest] = {}
        self._blocks: list[tuple[int, int, Sequence[int]]] = []
        self._inputs: dict[int, Tensor] = {}  # of captured steps, by bucket

    def admit(self, slot: int, request: SlotRequest) -> None:
        """Write a request's state into its slot with the next step."""
        self._enter(slot, request)
        self._admitted[slot] = request

    def write_blocks(self, ranges: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Write new blocks, as (slot, first column, block ids), with the next step."""
        self._blocks += [(slot, first, list(ids)) for slot, first, ids in ranges]

    def release(self, slot: int) -> None:
        """Forget a request that ended; its numbers stay until the slot's next request."""
        super().release(slot)
        self._admitted.pop(slot, None)

    def begin(self, step: StepInput, shape: StepShape | None = None) -> StepRequests:
        """A step's requests as tensors, and what the host has added since the last one."""
        self._flush()
        self._shape = shape
        count = len(step.slot_B)
        size = count if shape is None else shape.size
        staging = Staging((3, _even(size)), torch.int64, self.device)
        host, numbers = staging.host, staging.host.numpy()
        numbers[0, :count], numbers[1, :count] = step.slot_B, step.num_tokens_B
        numbers[2, :count] = step.max_drafts_B
        numbers[0, count:], numbers[1, count:], numbers[2, count:] = self.spare, 1, 0
        if shape is None:
            sent = host.to(self.device, non_blocking=True)
            most = max(step.max_drafts_B)
            asked = (self.requests.get(slot) for slot in step.slot_B)
            warm = any(request is None or request.params.temperature > 0 for request in asked)
        else:  # a captured step reads its numbers where it read them when it was captured
            if size not in self._inputs:
                self._inputs[size] = torch.empty_like(host, device=self.device)
            sent = self._inputs[size].copy_(host, non_blocking=True)
            most, warm = shape.most_drafts, shape.warm
        staging.give_back()
        slot_B, num_tokens_B, max_drafts_B = sent[:, :size].unbind()
        if all(step.decides_B):
            return StepRequests(
                step, slot_B, num_tokens_B, slot_B, max_drafts_B, None, most, warm, shape
            )
        chosen = np.array([step.slot_B, step.max_drafts_B])[:, list(step.decides_B)]
        deciding = chosen.shape[1]
        both = np.zeros((2, _even(deciding)), dtype=np.int64)
        both[:, :deciding] = chosen
        slot_D, max_drafts_D = self._sent(both)[:, :deciding].unbind()
        of_B = self._sent(np.array(step.of_B, dtype=np.int64))
        return StepRequests(step, slot_B, num_tokens_B, slot_D, max_drafts_D, of_B, most, warm)

    def asked(self, rows: StepRequests) -> DraftRequests:
        """How many drafts each deciding request may have, K_b, and where they stand."""
        num_D, position_D = self.steps.count_drafts(self.state, rows.slot_D, rows.max_drafts_D)
        return DraftRequests(rows.slot_D, num_D, position_D, rows.most_drafts, rows.warm)

    def write_drafts(self, rows: DraftRequests, drafts: DraftBlock, last_id: int) -> None:
        """Write drafts behind the known tokens, ids past the last as the last."""
        self.steps.write_drafts(self.state, rows, drafts.num_B, drafts.token_BK, last_id)

    def pack(
        self, rows: StepRequests, num_D: Tensor, sizes: PackSizes, block_size: int
    ) -> ForwardBatch:
        """What a step computes: the requests' next known tokens, then the drafts of who decides."""
        return self.steps.pack(self.state, _tokens(rows, num_D), sizes, block_size)

    def advance_step(self, rows: StepRequests, result: StepResult) -> None:
        """Take over a step: accepted drafts and the token after them are known now."""
        tokens = _tokens(rows, result.drafts.num_B)
        result.packet = self.steps.advance(self.state, tokens, result.verdict)

    def committed(self, slot: int, token_ids: Sequence[int]) -> None:
        """The host has seen these tokens: the request's edits depend on them."""
        if history := self.histories.get(slot):
            history.append(token_ids)

    def _flush(self) -> None:
        """Write what the host has added."""
        if self._admitted:
            self._write_admitted()
        if self._blocks:
            width = self.state.block_SL.shape[1]
            place = [
                slot * width + first + i for slot, first, b in self._blocks for i in range(len(b))
            ]
            ids = [block for *_, blocks in self._blocks for block in blocks]
            # Of two for the same place the later one holds.
            latest = dict(zip(place, ids, strict=True))
            sent = self._sent(np.array([[*latest], [*latest.values()]], dtype=np.int64))
            self.state.block_SL.view(-1)[sent[0]] = sent[1]
            self._blocks.clear()

    def _write_admitted(self) -> None:
        slots, requests = zip(*self._admitted.items(), strict=True)
        known = [[*r.prompt_ids, *r.output_ids] for r in requests]
        lengths = [(len(k), r.num_computed, r.limit) for k, r in zip(known, requests, strict=True)]
        asked = list(zip(*map(numbers_of, requests), strict=True))
        params = self._params
        columns = (params.key_S, params.top_k_S, params.rule_S, self.drafter_S, *self.state[2:])
        drafters = [request.drafter for request in requests]
        numbers = [slots, asked[0], asked[2], asked[5], drafters, *zip(*lengths, strict=True)]
        slot_A, *values = self._sent(np.array(numbers, dtype=np.int64)).unbind()
        for column, value_A in zip(columns, values, strict=True):
            column[slot_A] = value_A
        floats = self._sent(np.array([asked[1], asked[3], asked[4]], dtype=np.float32))
        for column, value_A in zip(
            (params.temperature_S, params.top_p_S, params.min_p_S), floats, strict=True
        ):
            column[slot_A] = value_A
        tokens: Array = np.zeros((len(known), max(map(len, known))), dtype=np.int32)
        for row, ids in zip(tokens, known, strict=True):
            row[: len(ids)] = ids
        self.state.token_SL[slot_A, : tokens.shape[1]] = self._sent(tokens)
        self._admitted.clear()

    def _sent(self, array: Array) -> Tensor:
        return to_device(array, self.device)


def _even(size: int) -> int:
    """`size`, or one more: then rows of int64 lie at multiples of 16 bytes; for others kernels are
    compiled anew."""
    return size + size % 2


def _tokens(rows: StepRequests, num_D: Tensor) -> StepTokens:
    return StepTokens(rows.slot_B, rows.num_tokens_B, rows.of_B, num_D)
