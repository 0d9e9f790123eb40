"""Per-request sampling state: a structure of arrays indexed by slot, plus sparse histories.

A slot is a request's permanent index from admission to its end. Nothing is ever reordered: a batch
gathers the rows it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from foretoken.ops import Rule, SlotParams
from foretoken.sampling.history import SlotHistory
from foretoken.sampling.noise_key import to_int64
from foretoken.sampling.params import SamplingParams

LEAST_TOP_P = 2.0**-149
"""Less is 0 in float32, which no nucleus has. The likeliest token alone reaches both."""


class SlotTable:
    """All slots' `SlotParams` on the device, and the histories of those that need one."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._table = SlotParams(
            key_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            temperature_S=torch.ones(num_slots, dtype=torch.float32, device=device),
            top_k_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            top_p_S=torch.ones(num_slots, dtype=torch.float32, device=device),
            min_p_S=torch.zeros(num_slots, dtype=torch.float32, device=device),
            rule_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
        )
        self._rules: dict[int, Rule] = {}
        self._slots_with_filters: set[int] = set()
        self._changed = True
        self.histories: dict[int, SlotHistory] = {}

    @property
    def params(self) -> SlotParams:
        """The slots' parameters, always in the same tensors.

        `has_filters` and `rules` are those of the slots in use, known without looking at the
        device, and stated anew only once a request has come or gone.
        """
        if self._changed:
            has_filters, rules = bool(self._slots_with_filters), frozenset(self._rules.values())
            self._table = replace(self._table, has_filters=has_filters, rules=rules)
            self._changed = False
        return self._table

    def admit(
        self,
        slot: int,
        key: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        rule: Rule = Rule.STANDARD,
        stop_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Write one request's parameters into its slot."""
        self.release(slot)
        table = self._table
        table.key_S[slot] = to_int64(key)
        table.temperature_S[slot] = params.temperature
        table.top_k_S[slot] = min(max(params.top_k, 0), 2**31)  # past any vocabulary: off
        table.top_p_S[slot] = max(params.top_p, LEAST_TOP_P)
        table.min_p_S[slot] = params.min_p
        table.rule_S[slot] = rule
        self._rules[slot] = rule
        if params.filters_logits:
            self._slots_with_filters.add(slot)
        if params.edits_logits:
            self.histories[slot] = SlotHistory(params, prompt_ids, stop_ids, bad_word_ids)

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """Record generated tokens; nothing to do for requests without edits."""
        history = self.histories.get(slot)
        if history is not None:
            history.append(token_ids)

    def release(self, slot: int) -> None:
        """Forget a request that ended; its numbers stay until the slot's next request."""
        self.histories.pop(slot, None)
        self._slots_with_filters.discard(slot)
        self._rules.pop(slot, None)
        self._changed = True
