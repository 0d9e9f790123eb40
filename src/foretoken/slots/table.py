"""Everything that is kept by request slot: parameters, tokens, lengths, blocks, histories.

A slot is a request's permanent index from admission to release. Nothing is ever reordered: a batch
gathers the rows it needs.

Charter: the one owner of request state that a step reads and writes. The scheduler's view of a
request may be a step late; lengths here are the truth. What others keep by slot (a drafter, above
all) they register, so that one `release` reaches all of it and one check finds what is left behind.

Shape suffixes: S slots, L tokens or blocks of a slot, B requests, D deciding requests, K drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from foretoken.errors import IntegrityError
from foretoken.ops import Rule, SlotParams
from foretoken.sampling.noise_key import to_int64
from foretoken.sampling.params import SamplingParams
from foretoken.slots.history import Array, SlotHistory
from foretoken.slots.step import Outcome

LEAST_TOP_P = 2.0**-149
"""Smaller values round to 0 in float32, which is out of range; both keep the likeliest token."""

NO_TOKEN = -1
"""What stands behind a slot's last known token and its drafts: no gather may read it."""


class SlotRequest(NamedTuple):
    """What a request brings into its slot.

    Attributes:
        prompt_ids, output_ids: its known tokens.
        limit: most tokens that it may have, prompt included.
        num_computed: leading tokens whose K/V are in the cache already.
        stop_ids: banned while it has fewer than `min_tokens`.
        bad_word_ids: tokenised `bad_words`.
    """

    key: int
    params: SamplingParams
    rule: Rule
    prompt_ids: Sequence[int]
    limit: int
    output_ids: Sequence[int] = ()
    num_computed: int = 0
    stop_ids: Sequence[int] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()


class SlotOwner(Protocol):
    """Whoever keeps something by slot outside of the table."""

    def release(self, slot: int) -> None:
        """Forget the request in this slot: it ended, or was preempted and will be admitted anew."""

    def held_slots(self) -> Iterable[int]:
        """Slots for which something is kept."""


class SlotTable:
    """State by slot: parameters as tensors, tokens and blocks as arrays, lengths as numbers.

    Attributes:
        token_SL: int32, known tokens, then drafts, then `NO_TOKEN`.
        block_SL: int64, cache blocks by position; num_blocks_S: how many are the request's.
        prompt_S: tokens of the prompt.
        length_S: known tokens, those of the latest step included.
        computed_S: leading tokens whose K/V are in the target's cache.
        limit_S: most tokens the request may have; its length, once nothing may be added.
        histories: of slots whose requests edit logits.
        requests: as they were admitted, of slots in use.
    """

    def __init__(
        self, num_slots: int, device: torch.device, *, max_tokens: int, max_drafts: int, blocks: int
    ) -> None:
        self._params = SlotParams(
            key_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            temperature_S=torch.ones(num_slots, dtype=torch.float32, device=device),
            top_k_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            top_p_S=torch.ones(num_slots, dtype=torch.float32, device=device),
            min_p_S=torch.zeros(num_slots, dtype=torch.float32, device=device),
            rule_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            values_fit=True,  # `SamplingParams` saw to it
        )
        self.device = device
        self.num_slots = num_slots
        width = max_tokens + max_drafts  # drafts are padded to those of the request with most
        self.token_SL: Array = np.full((num_slots, width), NO_TOKEN, dtype=np.int32)
        self.block_SL: Array = np.zeros((num_slots, blocks), dtype=np.int64)
        self.num_blocks_S = [0] * num_slots
        self.prompt_S = [0] * num_slots
        self.length_S = [0] * num_slots
        self.computed_S = [0] * num_slots
        self.limit_S = [0] * num_slots
        self.histories: dict[int, SlotHistory] = {}
        self.requests: dict[int, SlotRequest] = {}
        self._changed = True
        self._owners: dict[str, SlotOwner] = {}

    @staticmethod
    def bytes_per_slot(max_tokens: int, block_size: int) -> int:
        """Memory of one slot, beside a few numbers."""
        return 4 * max_tokens + 8 * -(-max_tokens // block_size)

    @property
    def params(self) -> SlotParams:
        """The slots' parameters, always in the same tensors.

        `has_filters` and `rules` are those of the slots in use, known without looking at the
        device, and stated anew only once a request has come or gone.
        """
        if self._changed:
            has_filters = any(r.params.filters_logits for r in self.requests.values())
            rules = frozenset(request.rule for request in self.requests.values())
            self._params = replace(self._params, has_filters=has_filters, rules=rules)
            self._changed = False
        return self._params

    def register(self, name: str, owner: SlotOwner) -> None:
        """Have what `owner` keeps by slot released and checked with the table's own."""
        self._owners[name] = owner

    def admit(self, slot: int, request: SlotRequest) -> None:
        """Write a request's state into its slot; its blocks come with `write_blocks`."""
        self.release(slot)
        params, table = request.params, self._params
        table.key_S[slot] = to_int64(request.key)
        table.temperature_S[slot] = params.temperature
        table.top_k_S[slot] = min(max(params.top_k, 0), 2**31)  # past any vocabulary: off
        table.top_p_S[slot] = max(params.top_p, LEAST_TOP_P)
        table.min_p_S[slot] = params.min_p
        table.rule_S[slot] = request.rule
        known = [*request.prompt_ids, *request.output_ids]
        self.token_SL[slot, : len(known)] = known
        self.token_SL[slot, len(known) :] = NO_TOKEN
        self.length_S[slot], self.limit_S[slot] = len(known), request.limit
        self.prompt_S[slot] = len(request.prompt_ids)
        self.computed_S[slot] = request.num_computed
        self.num_blocks_S[slot] = 0
        self.requests[slot] = request
        if params.edits_logits:
            history = SlotHistory(
                params, request.prompt_ids, request.stop_ids, request.bad_word_ids
            )
            history.append(request.output_ids)
            self.histories[slot] = history

    def write_blocks(self, ranges: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Write a step's new blocks, as (slot, first column, block ids), in this order."""
        for slot, first, block_ids in ranges:
            end = self.num_blocks_S[slot] = first + len(block_ids)
            self.block_SL[slot, first:end] = block_ids

    def release(self, slot: int) -> None:
        """Forget a request that ended; its numbers stay until the slot's next request."""
        self.histories.pop(slot, None)
        self.requests.pop(slot, None)
        self._changed = True
        for owner in self._owners.values():
            owner.release(slot)

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

    def following(self, slot: int, count: int) -> list[int]:
        """Tokens of the prompt behind each of the next `count` that are to be computed."""
        first = self.computed_S[slot] + 1
        return self.known(slot, first, min(count, self.prompt_S[slot] - first))

    def num_drafts(self, slot: int, max_drafts: int) -> int:
        """K_b: as many drafts as were asked for, and none that could not be emitted."""
        return max(min(max_drafts, self.limit_S[slot] - self.length_S[slot] - 1), 0)

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
        last = first + len(token_ids)
        self.token_SL[slot, first:last] = token_ids
        self.token_SL[slot, last : first + outcome.num_drafts] = NO_TOKEN
        self.length_S[slot] = last
        self.computed_S[slot] += outcome.num_accepted
        if history := self.histories.get(slot):
            history.append(token_ids)

    def stop(self, slot: int) -> None:
        """Nothing is drawn for this slot any more."""
        self.limit_S[slot] = self.length_S[slot]

    def check_integrity(self, live: set[int]) -> None:
        """Raise `IntegrityError` if anything is kept for a slot that no request has."""
        own = {"parameters": self.requests.keys(), "histories": self.histories.keys()}
        others = {name: owner.held_slots() for name, owner in self._owners.items()}
        for name, held in (own | others).items():
            if leaked := set(held) - live:
                raise IntegrityError(f"{name} of slots that no request has: {sorted(leaked)}")
