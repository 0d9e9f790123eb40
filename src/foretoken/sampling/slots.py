"""Per-request sampling state: a structure of arrays indexed by slot, plus sparse histories.

A slot is a request's permanent index from admission to its end. Nothing is ever reordered: a batch
gathers the rows it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foretoken.ops import SlotParams
from foretoken.sampling.noise_key import to_int64
from foretoken.sampling.params import SamplingParams


@dataclass(slots=True)
class SlotHistory:
    """What logit edits need to know of one request; kept only for requests that have edits.

    Attributes:
        params: the request's parameters.
        prompt_tokens: distinct prompt ids (repetition penalty).
        counts: occurrences in the output (frequency, presence and repetition penalties).
        output_ids: generated ids in order (bad words, min_tokens).
        stop_ids: ids that end this request, held back until `min_tokens`.
        bad_word_ids: tokenised bad words.
    """

    params: SamplingParams
    prompt_tokens: frozenset[int]
    stop_ids: tuple[int, ...]
    bad_word_ids: tuple[tuple[int, ...], ...]
    output_ids: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)


class SlotTable:
    """All slots' `SlotParams` on the device, and the histories of those that need one."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.params = SlotParams(
            key_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            temperature_S=torch.ones(num_slots, dtype=torch.float32, device=device),
            top_k_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            top_p_S=torch.ones(num_slots, dtype=torch.float32, device=device),
            min_p_S=torch.zeros(num_slots, dtype=torch.float32, device=device),
        )
        self.histories: dict[int, SlotHistory] = {}

    def admit(
        self,
        slot: int,
        key: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        stop_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Write one request's parameters into its slot."""
        table = self.params
        table.key_S[slot] = to_int64(key)
        table.temperature_S[slot] = params.temperature
        table.top_k_S[slot] = min(max(params.top_k, 0), 2**31)  # past any vocabulary: off
        table.top_p_S[slot] = params.top_p
        table.min_p_S[slot] = params.min_p
        self.histories.pop(slot, None)
        if params.edits_logits:
            self.histories[slot] = SlotHistory(
                params=params,
                prompt_tokens=frozenset(prompt_ids),
                stop_ids=tuple(stop_ids),
                bad_word_ids=tuple(tuple(word) for word in bad_word_ids),
            )

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """Record generated tokens; nothing to do for requests without edits."""
        history = self.histories.get(slot)
        if history is not None:
            history.output_ids.extend(token_ids)
            history.counts.update(token_ids)

    def release(self, slot: int) -> None:
        """Forget a request that ended."""
        self.histories.pop(slot, None)
