"""Prompt lookup: draft what followed the last occurrence of the current suffix.

No model and no q: drafts are verified as one-hot. The longest suffix of `prompt_lookup_max` down
to `prompt_lookup_min` tokens that occurred before wins; among its occurrences the latest one that
has K tokens after it, else the one that has most (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

from array import array

from foretoken.drafting.base import DraftContext, Drafter, DrafterSetup, DraftRequest, one_hot_block
from foretoken.ops import DraftBlock

_BYTES = 4  # token ids are searched as 4-byte words: bytes.rfind runs at C speed


class NGram(Drafter):
    """Drafts by looking up the request's own tokens."""

    options = frozenset({"prompt_lookup_min", "prompt_lookup_max"})

    def __init__(self, setup: DrafterSetup) -> None:
        self.shortest, self.longest = setup.speculation.lookup_sizes
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
            end = _best_match(text, size, request.num_drafts * _BYTES)
            if end >= 0:
                found = array("i", bytes(text[end : end + request.num_drafts * _BYTES]))
                return found.tolist()
        return []


def _best_match(text: bytearray, size: int, wanted: int) -> int:
    """Byte offset after an earlier occurrence of the last `size` tokens, or -1.

    The latest one with `wanted` bytes after it; the earliest, which has most, if none has as many.
    """
    suffix = bytes(text[-size * _BYTES :])
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
