"""Slots as tests of drafters fill them, and the outcome of a step as drafters see it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from foretoken.slots.parameters import SlotRequest
from torch import Tensor

from foretoken.drafting.base import Drafter
from foretoken.ops import DraftBlock, Rule, SlotParams, Verdict
from foretoken.ops.steps import DraftRequests, SlotSpan
from foretoken.sampling.params import SamplingParams
from foretoken.slots.step import NONE, StepInput, StepRequests, StepResult
from foretoken.slots.table import NO_TOKEN, SlotTable

CPU = torch.device("cpu")


class GivenSlots(SlotTable):
    """A table with these parameters; every slot is in use, and may have any number of tokens."""

    def __init__(
        self, params: SlotParams, *, max_tokens: int, max_drafts: int, blocks: int
    ) -> None:
        num_slots = len(params.key_S)
        sizes = {"max_tokens": max_tokens, "max_drafts": max_drafts, "blocks": blocks}
        super().__init__(num_slots, CPU, **sizes)
        self.given = params
        asked = zip(params.temperature_S.tolist(), params.rule_S.tolist(), strict=True)
        request = functools.cache(  # equal ones are one: thousands of slots ask for the same
            lambda t, rule: SlotRequest(0, SamplingParams(temperature=t), Rule(rule), [], 2**31)
        )
        self.requests.update(enumerate(request(*its) for its in asked))
        self.limit_S = [2**31] * num_slots

    def asking(self, slots: Sequence[int], num_drafts: Sequence[int]) -> DraftRequests:
        """Whom to draft for, as a drafter is told."""
        positions = [self.length_S[slot] for slot in slots]
        columns = torch.tensor([list(slots), list(num_drafts), positions]).unbind()
        return DraftRequests(*columns, most=max(num_drafts, default=0))

    @property
    def params(self) -> SlotParams:
        return self.given

    def put(self, slot: int, tokens: Sequence[int], blocks: Sequence[int] = ()) -> None:
        """Known tokens of a request, and its cache blocks unless it has them."""
        self.token_SL[slot, : len(tokens)] = tokens
        self.token_SL[slot, len(tokens) :] = NO_TOKEN
        self.length_S[slot] = len(tokens)
        if blocks:
            self.write_blocks([(slot, 0, blocks)])


def observe(
    drafter: Drafter,
    slots: Sequence[int],
    drafts: DraftBlock,
    accepted: Sequence[int],
    batch: Any = None,
    aux: tuple[Tensor, ...] = (),
) -> None:
    """Show a decode step in which so many drafts of each request were accepted, then token 0.

    Args:
        batch, aux: the `ForwardBatch` of what the target computed, and its hidden states.
    """
    nums = drafts.num_B.tolist()
    tokens = [
        [*row[:kept], 0, *[-1] * (len(row) - kept)]
        for row, kept in zip(drafts.token_BK.tolist(), accepted, strict=True)
    ]
    size = len(slots)
    step = StepInput(
        slots, [1] * size, nums, [True] * size, [NONE] * size, [NONE] * size, [False] * size
    )
    spans = [SlotSpan(slot, 0, 1 + num, 1 + num) for slot, num in zip(slots, nums, strict=True)]
    verdict = Verdict(
        torch.tensor(tokens), torch.tensor(accepted), torch.ones(size, dtype=torch.bool)
    )
    slot_B = torch.tensor(slots)
    rows = StepRequests(
        step, slot_B, torch.ones_like(slot_B), slot_B, drafts.num_B, None, max(nums)
    )
    drafter.observe(rows, batch, StepResult(spans, slots, drafts, verdict, aux=aux))
