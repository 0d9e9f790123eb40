"""Drafts between proposal and verification, kept by slot and re-ordered to each batch.

A proposal's q must reach the ratio test of exactly its own request, whatever order the next batch
has: with proposals in order [c, a, b] and a batch [a, b, c], row blocks are looked up by slot.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from foretoken.drafting.base import one_hot_block
from foretoken.ops import DraftBlock, DraftCache


class DraftState:
    """Which slots have a q, real or one-hot, for the drafts they hold."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._has_real_q: dict[int, bool] = {}
        self._cache: DraftCache | None = None
        self._empty: dict[int, DraftBlock] = {}
        self._last: tuple[list[int], list[list[int]], DraftBlock] | None = None

    def put(self, slots: Sequence[int], block: DraftBlock) -> list[list[int]]:
        """Replace all of the last round's q by this proposal's; returns the drafts per request."""
        self._cache = block.cache
        self._has_real_q = dict(zip(slots, block.real_q_B.tolist(), strict=True))
        counts = block.num_B.tolist()
        rows = block.token_BK.tolist()
        drafts = [row[:count] for row, count in zip(rows, counts, strict=True)]
        self._last = ([*slots], drafts, block) if any(counts) else None
        return [[*row] for row in drafts]

    def take(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> DraftBlock:
        """The block for a batch in the order given; `drafts` may be prefixes of those proposed.

        A request that has drafts but no q is verified as one-hot, alone, with a warning.
        """
        if self._last is not None and self._last[:2] == (slots, drafts):
            return self._last[2]  # as in most steps: 1 us instead of 20
        if not any(drafts):
            return self._no_drafts(len(drafts))
        block = one_hot_block(drafts, self.device)
        real = []
        for slot, tokens in zip(slots, drafts, strict=True):
            if tokens and slot not in self._has_real_q:
                warnings.warn(
                    f"slot {slot} has drafts but no q: verified as one-hot, which accepts less",
                    RuntimeWarning,
                    stacklevel=2,
                )
            real.append(bool(tokens) and self._has_real_q.get(slot, False))
        if not any(real):
            return block
        real_q_B = torch.tensor(real, device=self.device)
        return replace(block, cache=self._cache, real_q_B=real_q_B)

    def _no_drafts(self, num_requests: int) -> DraftBlock:
        """The empty block of a plain step; one for each size of batch, made once."""
        if num_requests not in self._empty:
            self._empty[num_requests] = one_hot_block([[]] * num_requests, self.device)
        return self._empty[num_requests]

    @property
    def slots(self) -> set[int]:
        """Slots whose drafts have a q."""
        return set(self._has_real_q)

    def drop(self, slot: int) -> None:
        """Forget the q of a request that ended."""
        self._has_real_q.pop(slot, None)
        self._last = None
