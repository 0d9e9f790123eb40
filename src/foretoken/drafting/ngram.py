"""Prompt lookup: draft what followed the last occurrence of the current suffix.

No model and no q: drafts are verified as one-hot. The longest suffix of `prompt_lookup_max` down
to `prompt_lookup_min` tokens that occurred before wins; among its occurrences the latest one that
has K tokens after it, else the one that has most (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

import numpy as np

from foretoken.drafting.base import Drafter, DrafterSetup, one_hot_block, q_flags
from foretoken.ops import DraftBlock
from foretoken.ops.steps import DraftRequests
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.table import SlotTable

_BYTES = 4  # token ids are searched as 4-byte words: bytes.rfind runs at C speed


class NGram(Drafter):
    """Drafts by looking up the request's own tokens."""

    options = frozenset({"prompt_lookup_min", "prompt_lookup_max"})
    looks_up = True

    def __init__(self, setup: DrafterSetup) -> None:
        self.shortest, self.longest = setup.speculation.lookup_sizes

    def allocate(self, slots: SlotTable | DeviceSlotTable, num_blocks: int) -> None:
        """Remember where the tokens are."""
        self.slots = slots

    def propose(self, rows: DraftRequests) -> DraftBlock:
        """One-hot drafts; none where nothing matches. See `Drafter.propose`."""
        if isinstance(self.slots, DeviceSlotTable):
            steps, state = self.slots.steps, self.slots.state
            token_BK, num_B = steps.look_up(state, rows, self.shortest, self.longest)
            return DraftBlock(token_BK, num_B, None, q_flags(len(num_B), num_B.device, real=False))
        asked = zip(rows.slot_B.tolist(), rows.num_B.tolist(), strict=True)
        return one_hot_block([self._lookup(self.slots, *one) for one in asked], self.slots.device)

    def _lookup(self, slots: SlotTable, slot: int, num_drafts: int) -> list[int]:
        length = slots.length_S[slot]
        text = slots.token_SL[slot, :length].tobytes() if num_drafts else b""
        for size in range(min(self.longest, len(text) // _BYTES - 1), self.shortest - 1, -1):
            end = _best_match(text, size, num_drafts * _BYTES)
            if end >= 0:
                found = text[end : end + num_drafts * _BYTES]
                return np.frombuffer(found, dtype=np.int32).tolist()  # type: ignore[no-any-return]
        return []


def _best_match(text: bytes, size: int, wanted: int) -> int:
    """Byte offset after an earlier occurrence of the last `size` tokens, or -1.

    The latest one with `wanted` bytes after it; the earliest, which has most, if none has as many.
    """
    suffix = text[-size * _BYTES :]
    best, stop = -1, len(text) - _BYTES
    while True:
        at = text.rfind(suffix, 0, stop)
        if at < 0:
            return best
        if at % _BYTES == 0:
            best = at + len(suffix)
            if len(text) - best >= wanted:
                return best
        stop = at + len(suffix) - 1
