"""What a request asks for, by slot: parameters as tensors, histories of its edits, who else keeps.

Charter: the part of the slots that every device has in common. Tokens, lengths and blocks are in
`table.py` on a host, in `device.py` where nobody waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch

from foretoken.errors import IntegrityError
from foretoken.ops import Rule, SlotParams
from foretoken.sampling.noise_key import to_int64
from foretoken.sampling.params import SamplingParams
from foretoken.slots.history import SlotHistory
from foretoken.slots.step import StepShape

LEAST_TOP_P = 2.0**-149
"""Smaller values round to 0 in float32, which is out of range; both keep the likeliest token."""


class SlotRequest(NamedTuple):
    """What a request brings into its slot.

    Attributes:
        prompt_ids, output_ids: its known tokens.
        limit: most tokens that it may have, prompt included.
        num_computed: leading tokens whose K/V are in the cache already.
        stop_ids: banned while it has fewer than `min_tokens`.
        bad_word_ids: tokenised `bad_words`.
        drafter: its drafter's number, of several.
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
    drafter: int = 0

    @property
    def shows_drafts(self) -> bool:
        """Whether its tokens, though not their distribution, depend on what is drafted."""
        if self.rule is Rule.SYNTHETIC:
            return True
        return self.params.temperature > 0 and self.rule is not Rule.COUPLED


class SlotOwner(Protocol):
    """Whoever keeps something by slot outside of the table."""

    def release(self, slot: int) -> None:
        """Forget the request in this slot: it ended, or was preempted and will be admitted anew."""

    def held_slots(self) -> Iterable[int]:
        """Slots for which something is kept."""


class SlotParameters:
    """Parameters by slot, as tensors; and what is kept of each request on the host.

    Attributes:
        histories: of slots whose requests edit logits.
        requests: as they were admitted, of slots in use.
        draft_faults: by slot, what drafting for one request alone has raised in this step.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._params = SlotParams(
            key_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            temperature_S=torch.ones(num_slots, dtype=torch.float32, device=device),
            top_k_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            top_p_S=torch.ones(num_slots, dtype=torch.float32, device=device),
            min_p_S=torch.zeros(num_slots, dtype=torch.float32, device=device),
            rule_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            values_fit=True,  # `SamplingParams` saw to it
        )
        self._drafters = frozenset[int]()
        self.device = device
        self.histories: dict[int, SlotHistory] = {}
        self.requests: dict[int, SlotRequest] = {}
        self.draft_faults: dict[int, Exception] = {}
        self._changed = True
        self._shape: StepShape | None = None  # of the step under way, if it was captured
        # Weakly: a drafter holds the slots, too, and what is frozen (`engine/build.py`) is freed
        # by its last reference or never.
        self._owners = WeakValueDictionary[str, SlotOwner]()

    @staticmethod
    def bytes_per_slot(max_tokens: int, block_size: int) -> int:
        """Memory of one slot, beside a few numbers."""
        return 4 * max_tokens + 8 * -(-max_tokens // block_size)

    @property
    def params(self) -> SlotParams:
        """What ops are given of the slots; in a captured step no more is promised than its shape
        does."""
        shape, params = self._shape, self.in_use
        if shape is None:
            return params
        return replace(params, has_filters=shape.has_filters, rules=shape.rules)

    @property
    def in_use(self) -> SlotParams:
        """The slots' parameters, always in the same tensors.

        `has_filters` and `rules` are those of the slots in use, known without looking at the
        device, and stated anew only once a request has come or gone.
        """
        self._refresh()
        return self._params

    def _refresh(self) -> None:
        """Look at the requests once some have come or gone."""
        if self._changed:
            has_filters = any(r.params.filters_logits for r in self.requests.values())
            rules = frozenset(request.rule for request in self.requests.values())
            self._drafters = frozenset(request.drafter for request in self.requests.values())
            self._params = replace(self._params, has_filters=has_filters, rules=rules)
            self._changed = False

    @property
    def drafters_in_use(self) -> frozenset[int]:
        """Numbers of drafters: no slot in use has another."""
        self._refresh()
        return self._drafters

    @property
    def drafters(self) -> frozenset[int]:
        """The same of a step under way."""
        return self.drafters_in_use if self._shape is None else self._shape.drafters

    def register(self, name: str, owner: SlotOwner) -> None:
        """Have what `owner` keeps by slot released and checked with the table's own, as long as
        somebody else holds it."""
        self._owners[name] = owner

    def _enter(self, slot: int, request: SlotRequest) -> None:
        """Remember a request, and what it needs to edit its logits."""
        self.release(slot)
        self.requests[slot] = request
        if request.params.edits_logits:
            history = SlotHistory(
                request.params, request.prompt_ids, request.stop_ids, request.bad_word_ids
            )
            history.append(request.output_ids)
            self.histories[slot] = history

    def release(self, slot: int) -> None:
        """Forget a request that ended; its numbers stay until the slot's next request."""
        self.histories.pop(slot, None)
        self.requests.pop(slot, None)
        self._changed = True
        for owner in self._owners.values():
            owner.release(slot)

    def check_integrity(self, live: set[int]) -> None:
        """Raise `IntegrityError` if anything is kept for a slot that no request has."""
        own = {"parameters": self.requests.keys(), "histories": self.histories.keys()}
        others = {name: owner.held_slots() for name, owner in self._owners.items()}
        for name, held in (own | others).items():
            if leaked := set(held) - live:
                raise IntegrityError(f"{name} of slots that no request has: {sorted(leaked)}")


def numbers_of(request: SlotRequest) -> tuple[int, float, int, float, float, int]:
    """A request's row of `SlotParams`, in the order of its fields."""
    params = request.params
    top_k = min(max(params.top_k, 0), 2**31)  # past any vocabulary: off
    top_p = max(params.top_p, LEAST_TOP_P)
    key, rule = to_int64(request.key), int(request.rule)
    return key, params.temperature, top_k, top_p, params.min_p, rule
