"""Prompt lookup: draft the tokens that followed the last occurrence of the current suffix.

There is no model and no q: drafts are verified as one-hot. The suffix is the longest one of
`prompt_lookup_min` to `prompt_lookup_max` tokens that occurred before. The latest occurrence with K
tokens after it is used, or else the occurrence with the most tokens after it (Saxena 2023, "Prompt
Lookup Decoding").
"""

from __future__ import annotations

from foretoken.drafting.base import Drafter, DrafterSetup, q_flags
from foretoken.ops import DraftBlock
from foretoken.ops.steps import DraftRequests
from foretoken.slots.table import SlotTable


class NGram(Drafter):
    """Drafts by looking up the request's own tokens."""

    options = frozenset({"prompt_lookup_min", "prompt_lookup_max"})
    looks_up = True

    def __init__(self, setup: DrafterSetup) -> None:
        self.shortest, self.longest = setup.speculation.lookup_sizes

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        self.slots = slots

    def propose(self, requests: DraftRequests) -> DraftBlock:
        token_BK, num_B = self.slots.steps.look_up(requests, self.shortest, self.longest)
        return DraftBlock(token_BK, num_B, None, q_flags(len(num_B), num_B.device, real=False))
