"""Draft the tokens that a request's own parameters force.

Each kind of parameter that forces tokens has a function in `FORCING` that makes a `Continuation`.
No model and no q: drafts are verified as one-hot, so a wrong draft only costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from foretoken.config import MAX_SPECULATIVE_TOKENS
from foretoken.drafting.base import Drafter, DrafterSetup, one_hot_block
from foretoken.ops import DraftBlock
from foretoken.ops.steps import DraftRequests
from foretoken.sampling.params import SamplingParams
from foretoken.slots.table import SlotTable

Continuation = Callable[[NDArray[Any]], Sequence[int] | NDArray[Any]]
"""A function that takes the output so far, int32, and returns the ids that must follow it; no ids
if there is a choice.

Each sample has a continuation of its own, which may keep state, because outputs only grow from call
to call. After a preemption a new continuation gets the whole output at once and must return the
same ids.
"""


def only_allowed(params: SamplingParams) -> Continuation | None:
    """The continuation of a request that allows only one token: this token, repeated."""
    allowed = set(params.allowed_token_ids or ())
    if len(allowed) != 1:
        return None
    repeated = [*allowed] * MAX_SPECULATIVE_TOKENS
    return lambda output: repeated


def by_grammar(params: SamplingParams) -> Continuation | None:
    """The continuation of a request with a grammar: the tokens that the grammar forces."""
    if params.grammar is None:
        return None
    matcher, num_read = params.grammar.matcher(), 0

    def forced_tokens(output: NDArray[Any]) -> Sequence[int]:
        nonlocal num_read
        matcher.append(output[num_read:].tolist())
        num_read = len(output)
        return matcher.forced_tokens()

    return forced_tokens


FORCING: list[Callable[[SamplingParams], Continuation | None]] = [only_allowed, by_grammar]
"""Each function makes the continuation for one parameter; None if a request does not have it."""


class Forced(Drafter):
    """Drafts forced tokens, from the first of a request's continuations that returns any."""

    looks_up = True

    def __init__(self, setup: DrafterSetup) -> None:
        """Nothing is loaded."""

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Remember the slots, which hold the requests' tokens."""
        self.slots = slots
        self._continuations: dict[int, list[Continuation]] = {}

    def continuations(self, params: SamplingParams) -> list[Continuation]:
        """The continuations of a sample with these parameters, in the order in which they are
        tried."""
        candidates = (make(params) for make in FORCING)
        return [continuation for continuation in candidates if continuation is not None]

    def propose(self, requests: DraftRequests) -> DraftBlock:
        """One-hot drafts; none where no token is forced. See `Drafter.propose`."""
        drafts, faults = list[list[int]](), dict[int, Exception]()
        for slot, num in zip(requests.slot_B.tolist(), requests.num_B.tolist(), strict=True):
            try:
                drafts.append(self._draft(slot, num))
            except Exception as error:  # from a continuation; it ends only this request
                drafts.append([])
                faults[slot] = error
        return replace(one_hot_block(drafts, self.slots.device), faults=faults)

    def _draft(self, slot: int, max_drafts: int) -> list[int]:
        """Up to `max_drafts` tokens that follow the output of the slot's request."""
        request = self.slots.admitted[slot]
        if slot not in self._continuations:
            self._continuations[slot] = self.continuations(request.params)
        output = self.slots.text(slot, request.num_prompt)
        output.flags.writeable = False
        for continuation in self._continuations[slot]:
            if drafts := [int(token) for token in continuation(output)[:max_drafts]]:
                return drafts
        return []

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._continuations.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        """Slots of requests that have had drafts."""
        return self._continuations
