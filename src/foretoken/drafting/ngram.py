"""Prompt lookup: draft what followed the last occurrence of the current suffix.

No model and no q: drafts are verified as one-hot. The longest suffix of `prompt_lookup_max` down
to `prompt_lookup_min` tokens that occurred before wins; among its occurrences the latest one that
has K tokens after it, else the one that has most (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretoken.drafting.base import Drafter, DrafterSetup, one_hot_block
from foretoken.ops import DraftBlock
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.step import DraftRows
from foretoken.slots.table import SlotTable

_BYTES = 4  # token ids are searched as 4-byte words: bytes.rfind runs at C speed


class NGram(Drafter):
    """Drafts by looking up the request's own tokens."""

    options = frozenset({"prompt_lookup_min", "prompt_lookup_max"})

    def __init__(self, setup: DrafterSetup) -> None:
        self.shortest, self.longest = setup.speculation.lookup_sizes

    def allocate(self, slots: SlotTable | DeviceSlotTable, num_blocks: int) -> None:
        """Remember where the tokens are."""
        self.slots = slots

    def propose(self, rows: DraftRows) -> DraftBlock:
        """One-hot drafts; none where nothing matches. See `Drafter.propose`."""
        if isinstance(self.slots, DeviceSlotTable):
            text_BL = self.slots.state.token_SL[rows.slot_B]
            return _look_up(text_BL, rows, self.shortest, self.longest)
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


def _look_up(text_BL: Tensor, rows: DraftRows, shortest: int, longest: int) -> DraftBlock:
    """The same drafts on a device, for all requests at once.

    An occurrence is named by where it ends: `run_BL` is how many tokens up to there are equal to
    the last ones.
    """
    length_B1 = rows.position_B[:, None]
    place_L = torch.arange(text_BL.shape[1], device=text_BL.device)
    run_BL, goes_on_BL = torch.zeros_like(text_BL), torch.ones_like(text_BL, dtype=torch.bool)
    for back in range(longest):
        last_B1 = text_BL.gather(1, (length_B1 - 1 - back).clamp(min=0))
        shifted_BL = text_BL.roll(back, dims=1)
        goes_on_BL = goes_on_BL & (shifted_BL == last_B1) & (place_L >= back)
        run_BL = run_BL + goes_on_BL
    run_BL = torch.where(place_L < length_B1 - 1, run_BL, 0)  # an earlier occurrence
    size_B1 = run_BL.amax(dim=1, keepdim=True)
    ends_BL = (run_BL == size_B1) & (size_B1 >= shortest)
    is_long_BL = ends_BL & (length_B1 - 1 - place_L >= rows.num_B[:, None])
    latest_B = torch.where(is_long_BL, place_L, -1).amax(dim=1)
    width = text_BL.shape[1]
    earliest_B = torch.where(ends_BL, place_L, width).amin(dim=1)
    end_B = torch.where(latest_B >= 0, latest_B, earliest_B) + 1
    num_B = torch.minimum(rows.num_B, (rows.position_B - end_B).clamp(min=0))
    index_K = torch.arange(rows.most, device=text_BL.device)
    token_BK = text_BL.gather(1, (end_B[:, None] + index_K).clamp(max=width - 1)).to(torch.int64)
    token_BK = token_BK.masked_fill(index_K >= num_B[:, None], -1)
    return DraftBlock(token_BK, num_B, None, torch.zeros_like(num_B, dtype=torch.bool))
