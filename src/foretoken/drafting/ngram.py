"""Prompt lookup: draft what followed the last occurrence of the current suffix.

No model and no q: drafts are verified as one-hot. The longest suffix of `prompt_lookup_max` down
to `prompt_lookup_min` tokens that occurred before wins; among its occurrences the latest one that
has enough tokens after it (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

from array import array

from foretoken.drafting.base import DraftContext, Drafter, DrafterSetup, DraftRequest, one_hot_block
from foretoken.ops import DraftBlock

_BYTES = 4  # token ids are searched as 4-byte words: bytes.rfind runs at C speed


class NGram(Drafter):
    """Drafts by looking up the request's own tokens."""

    def __init__(self, setup: DrafterSetup) -> None:
        self.shortest = setup.speculation.prompt_lookup_min
        self.longest = setup.speculation.prompt_lookup_max
        self.device = setup.device
        self._texts: dict[int, bytearray] = {}

    def propose(self, context: DraftContext) -> DraftBlock:
        """One-hot drafts; none where nothing matches. See `Drafter.propose`."""
        return one_hot_block([self._lookup(r) for r in context.requests], self.device)

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._texts.pop(slot, None)

    def _lookup(self, request: DraftRequest) -> list[int]:
        text = self._texts.setdefault(request.slot, bytearray())
        text += array("i", request.token_ids[len(text) // _BYTES :]).tobytes()
        for size in range(min(self.longest, len(request.token_ids) - 1), self.shortest - 1, -1):
            end = _last_match(text, size)
            if end >= 0:
                found = array("i", bytes(text[end : end + request.num_drafts * _BYTES]))
                return found.tolist()
        return []


def _last_match(text: bytearray, size: int) -> int:
    """Byte offset after the latest earlier occurrence of the last `size` tokens, or -1."""
    suffix = bytes(text[-size * _BYTES :])
    stop = len(text) - _BYTES
    while True:
        at = text.rfind(suffix, 0, stop)
        if at < 0:
            return -1
        if at % _BYTES == 0:
            return at + len(suffix)
        stop = at + len(suffix) - 1
