"""Draft the tokens that a request's own parameters force.

Each source of such tokens is a function in `FORCING` that makes a `Continuation`. No model and no
q: drafts are verified as one-hot, so a wrong one only costs time.
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
"""From the output so far, int32, to the ids that must follow it; none if there is a choice.

One is made for each sample. It may keep state, because outputs only grow from call to call. After a
preemption a new one gets the whole output at once and must return the same ids.
"""


def only_allowed(params: SamplingParams) -> Continuation | None:
    """For a request that allows only one token: that token, without end."""
    allowed = set(params.allowed_token_ids or ())
    if len(allowed) != 1:
        return None
    forever = [*allowed] * MAX_SPECULATIVE_TOKENS
    return lambda output: forever


def by_grammar(params: SamplingParams) -> Continuation | None:
    """For a request with a grammar: the tokens that it forces."""
    if params.grammar is None:
        return None
    matcher, num_read = params.grammar.matcher(), 0

    def ahead(output: NDArray[Any]) -> Sequence[int]:
        nonlocal num_read
        matcher.append(output[num_read:].tolist())
        num_read = len(output)
        return matcher.forced()

    return ahead


FORCING: list[Callable[[SamplingParams], Continuation | None]] = [only_allowed, by_grammar]
"""Each makes the continuation of one kind of parameter; None for a request without it."""


class Forced(Drafter):
    """Drafts the tokens of the first continuation that has any."""

    looks_up = True

    def __init__(self, setup: DrafterSetup) -> None:
        """Nothing is loaded."""

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Remember where the tokens are."""
        self.slots = slots
        self._continuations: dict[int, list[Continuation]] = {}

    def continuations(self, params: SamplingParams) -> list[Continuation]:
        """The continuations of a sample with these parameters, first choice first."""
        made = (force(params) for force in FORCING)
        return [continuation for continuation in made if continuation is not None]

    def propose(self, requests: DraftRequests) -> DraftBlock:
        """One-hot drafts; none where nothing is known. See `Drafter.propose`."""
        drafts, faults = list[list[int]](), dict[int, Exception]()
        for slot, most in zip(requests.slot_B.tolist(), requests.num_B.tolist(), strict=True):
            try:
                drafts.append(self._draft(slot, most))
            except Exception as error:  # from a continuation; it ends only this request
                drafts.append([])
                faults[slot] = error
        return replace(one_hot_block(drafts, self.slots.device), faults=faults)

    def _draft(self, slot: int, most: int) -> list[int]:
        request = self.slots.admitted[slot]
        if slot not in self._continuations:
            self._continuations[slot] = self.continuations(request.params)
        output = self.slots.text(slot, request.num_prompt)
        output.flags.writeable = False
        for continuation in self._continuations[slot]:
            if drafts := [int(token) for token in continuation(output)[:most]]:
                return drafts
        return []

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._continuations.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        """Slots that were drafted for."""
        return self._continuations
