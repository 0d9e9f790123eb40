"""Everything that is kept by request slot, on a host: tokens, lengths, blocks as plain numbers.

A slot is a request's permanent index from admission to release. Nothing is ever reordered: a batch
gathers the rows it needs.

Charter: the one owner of request state that a step reads and writes. The scheduler's view of a
request may be a step late; lengths here are the truth. What others keep by slot (a drafter, above
all) they register, so that one `release` reaches all of it and one check finds what is left behind.
In a step the runner calls `begin`, `asked`, `write_drafts` and `advance_step`, in this order, of
this table or of `device.py`'s.

Shape suffixes: S slots, L tokens or blocks of a slot, B requests, D deciding requests, K drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import gt

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import IntegrityError
from foretoken.ops import DraftBlock
from foretoken.ops.steps import DraftRequests, SlotState
from foretoken.slots.history import Array
from foretoken.slots.parameters import SlotParameters, SlotRequest, numbers_of
from foretoken.slots.step import Outcome, StepInput, StepRequests, StepResult, StepShape

NO_TOKEN = -1
"""What stands behind a slot's last known token and its drafts: no gather may read it."""


class SlotTable(SlotParameters):
    """State by slot: parameters as tensors, tokens and blocks as arrays, lengths as numbers.

    Attributes:
        token_SL: int32, known tokens, then drafts, then `NO_TOKEN`.
        block_SL: int64, cache blocks by position; num_blocks_S: how many are the request's.
        prompt_S: tokens of the prompt.
        length_S: known tokens, those of the latest step included.
        computed_S: leading tokens whose K/V are in the target's cache.
        limit_S: most tokens the request may have; its length, once nothing may be added.
    """

    on_host = True

    def __init__(
        self, num_slots: int, device: torch.device, *, max_tokens: int, max_drafts: int, blocks: int
    ) -> None:
        super().__init__(num_slots, device)
        self.num_slots = num_slots
        width = max_tokens + max_drafts  # drafts are padded to those of the request with most
        self.token_SL: Array = np.full((num_slots, width), NO_TOKEN, dtype=np.int32)
        self.block_SL: Array = np.zeros((num_slots, blocks), dtype=np.int64)
        self.num_blocks_S = [0] * num_slots
        self.prompt_S = [0] * num_slots
        self.length_S = [0] * num_slots
        self.computed_S = [0] * num_slots
        self.limit_S = [0] * num_slots

    @property
    def state(self) -> SlotState:
        """Tokens, blocks and lengths as tensors; a copy, but for the first two."""
        lengths = (self.length_S, self.computed_S, self.limit_S)
        return SlotState(
            torch.from_numpy(self.token_SL), torch.from_numpy(self.block_SL), *map(_int64, lengths)
        )

    def admit(self, slot: int, request: SlotRequest) -> None:
        """Write a request's state into its slot; its blocks come with `write_blocks`."""
        for column, number in zip(self._params.columns, numbers_of(request), strict=True):
            column[slot] = number
        known = [*request.prompt_ids, *request.output_ids]
        self.token_SL[slot, : len(known)] = known
        self.token_SL[slot, len(known) :] = NO_TOKEN
        self.length_S[slot], self.limit_S[slot] = len(known), request.limit
        self.prompt_S[slot] = len(request.prompt_ids)
        self.computed_S[slot] = request.num_computed
        self.num_blocks_S[slot] = 0
        self._enter(slot, request)

    def write_blocks(self, ranges: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Write a step's new blocks, as (slot, first column, block ids), in this order."""
        for slot, first, block_ids in ranges:
            end = self.num_blocks_S[slot] = first + len(block_ids)
            self.block_SL[slot, first:end] = block_ids

    def begin(self, step: StepInput, shape: StepShape | None = None) -> StepRequests | None:
        """The requests of a step that may have more tokens; None if there are none.

        A step may have been launched before it was known that a request has all its tokens.

        Args:
            shape: always None: nothing is captured on a host.
        """
        live = self.unfinished(step.slot_B)
        if len(live) < len(step.slot_B):
            if not live:
                return None
            step = step.at(live)
        num_B = list(map(self.num_drafts, step.slot_B, step.max_drafts_B))
        length_B = [self.length_S[slot] for slot in step.slot_B]
        of_B, most = None, max(num_B)
        columns = (step.slot_B, step.num_tokens_B, num_B, length_B)
        slot_B, num_tokens_B, num_D, position_D = map(_int64, columns)
        slot_D = slot_B
        if not all(step.decides_B):
            of_B = _int64(step.of_B)
            slot_D, num_D, position_D = (c[of_B >= 0] for c in (slot_B, num_D, position_D))
        warm = any(self.requests[slot].params.temperature > 0 for slot in step.slot_B)
        known = DraftRequests(slot_D, num_D, position_D, most, warm)
        return StepRequests(step, slot_B, num_tokens_B, slot_D, num_D, of_B, most, known=known)

    def asked(self, rows: StepRequests) -> DraftRequests:
        """How many drafts each deciding request may have, K_b, and where they stand."""
        if rows.known is None:
            raise IntegrityError("a step's rows were not made by `begin`")
        return rows.known

    def unfinished(self, slots: Sequence[int]) -> list[int]:
        """Which of these requests, by index, may have more tokens."""
        return [i for i, s in enumerate(slots) if self.length_S[s] < self.limit_S[s]]

    def known(self, slot: int, start: int, count: int) -> list[int]:
        """Tokens of a slot, drafts too.

        Raises:
            IntegrityError: one of them was never written, or taken back.
        """
        tokens: list[int] = self.token_SL[slot, start : start + count].tolist()
        if NO_TOKEN in tokens:
            raise IntegrityError(f"slot {slot}: a placeholder in tokens {start} + {count}")
        return tokens

    def following(self, slot: int, start: int, count: int) -> list[int]:
        """Tokens of the prompt behind each of the `count` from `start` on."""
        return self.known(slot, start + 1, min(count, self.prompt_S[slot] - start - 1))

    def num_drafts(self, slot: int, max_drafts: int) -> int:
        """K_b: as many drafts as were asked for, and none that could not be emitted."""
        return max(min(max_drafts, self.limit_S[slot] - self.length_S[slot] - 1), 0)

    def write_drafts(self, rows: DraftRequests, drafts: DraftBlock, last_id: int) -> None:
        """Write a step's drafts behind the known tokens, ids past the last as the last.

        Raises:
            IntegrityError: there are more than were asked for.
        """
        proposed, asked = drafts.num_B.tolist(), rows.num_B.tolist()
        if len(proposed) != len(asked) or any(map(gt, proposed, asked)):
            raise IntegrityError(f"a drafter proposed {proposed} drafts, asked for {asked}")
        self.put_drafts(rows.slot_B.tolist(), np.minimum(drafts.token_BK.numpy(), last_id))

    def put_drafts(self, slots: Sequence[int], token_BK: Array) -> None:
        """Write drafts behind the known tokens, padded by NO_TOKEN behind a request's last."""
        for slot, token_K in zip(slots, token_BK, strict=True):
            first = self.length_S[slot]
            self.token_SL[slot, first : first + len(token_K)] = token_K

    def advance(self, slot: int, outcome: Outcome) -> None:
        """Take over a decision: its tokens are known now, the rest of the drafts is taken back.

        A request without a token behind its accepted drafts may not go on, nor one whose history
        raises: `stop` it.
        """
        first, token_ids = self.length_S[slot], outcome.token_ids
        last = self.length_S[slot] = first + len(token_ids)
        for i, token in enumerate(token_ids, first):  # one by one: as an array takes 5 us longer
            self.token_SL[slot, i] = token
        if outcome.num_drafts:
            self.token_SL[slot, last : first + outcome.num_drafts] = NO_TOKEN
        self.computed_S[slot] += outcome.num_accepted
        if history := self.histories.get(slot):
            history.append(token_ids)

    def advance_step(self, rows: StepRequests, result: StepResult) -> None:
        """Take over a whole step; a request that has failed does not go on."""
        for slot, num_tokens in zip(rows.step.slot_B, rows.step.num_tokens_B, strict=True):
            self.computed_S[slot] += num_tokens
        for slot, outcome in result.decisions.items():
            try:
                self.advance(slot, outcome)
            except Exception as error:
                result.faults[slot] = error
            if not outcome.is_finite or slot in result.faults:
                self.stop(slot)

    def stop(self, slot: int) -> None:
        """Nothing is drawn for this slot any more."""
        self.limit_S[slot] = self.length_S[slot]

    def committed(self, slot: int, token_ids: Sequence[int]) -> None:
        """The host has seen these tokens: `advance` has, too."""


def _int64(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    # By way of numpy: torch.tensor takes 40 us for 450 numbers, this 6.
    return torch.from_numpy(np.array(numbers, dtype=np.int64))
