"""Slots as tests of drafters fill them, and the outcome of a step as drafters see it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.drafting.base import Drafter
from foretoken.ops import Backend, DraftBlock, Rule, SlotParams, get_backend
from foretoken.ops.steps import DraftRequests
from foretoken.sampling.params import SamplingParams
from foretoken.slots.step import NONE, Admission, Outcome, StepInput, StepPlan, StepResult
from foretoken.slots.table import SlotSizes, SlotTable

CPU = torch.device("cpu")


class GivenSlots(SlotTable):
    """A table with these parameters; every slot is in use, and may have any number of tokens.
    on_host: False: what a drafter on a GPU is given, on a CPU
    """

    def __init__(
        self,
        params: SlotParams,
        *,
        max_tokens: int,
        max_drafts: int,
        blocks: int,
        spare_block: int = 0,
        backend: Backend | None = None,
        on_host: bool = True,
    ) -> None:
        sizes = SlotSizes(len(params.key_S), max_tokens, max_drafts, blocks, spare_block)
        super().__init__(sizes, CPU, (backend or get_backend("torch")).steps, on_host=on_host)
        self._rows, self._lengths = self.state.token_SL.numpy(), self.state.length_S.numpy()
        asked = functools.cache(  # equal ones are one: thousands of slots ask for the same
            lambda t, k, p, m: SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        )
        columns = (
            params.key_S, params.rule_S, params.temperature_S, params.top_k_S, params.top_p_S,
            params.min_p_S,
        )  # fmt: skip
        rows = zip(*(column.tolist() for column in columns), strict=True)
        admissions = [
            Admission(slot, key, asked(*numbers), Rule(rule), [0], num_prompt=0, limit=2**31)
            for slot, (key, rule, *numbers) in enumerate(rows)
        ]
        self.apply(StepPlan(admissions=admissions))

    def change(self, slot: int, **fields: Any) -> None:
        self.apply(StepPlan(admissions=[self.admitted[slot]._replace(**fields)]))

    def asking(self, slots: Sequence[int], num_drafts: Sequence[int]) -> DraftRequests:
        slot_B, most = torch.tensor(list(slots)), max(num_drafts, default=0)
        columns = (slot_B, torch.tensor(list(num_drafts)), self.state.length_S[slot_B])
        return DraftRequests(*columns, most, self.params, drafters=self.drafters)

    def put(self, slot: int, tokens: Sequence[int], blocks: Sequence[int] = ()) -> None:
        self._rows[slot, : len(tokens)] = tokens
        self._lengths[slot] = len(tokens)
        if blocks:
            self.apply(StepPlan(new_blocks=[(slot, 0, blocks)]))


def observe(
    drafter: Drafter,
    slots: Sequence[int],
    drafts: DraftBlock,
    accepted: Sequence[int],
    batch: Any = None,
    aux: tuple[Tensor, ...] = (),
) -> None:
    """Show a decode step in which so many drafts of each request were accepted, then token 0.
    batch, aux: the `ForwardBatch` of what the target computed, and its hidden states
    """
    nums, size = drafts.num_B.tolist(), len(slots)
    none = [NONE] * size
    step = StepInput(slots, [1] * size, nums, [True] * size, none, none, [False] * size)
    result = StepResult(step, aux=aux)
    rows = zip(slots, drafts.token_BK.tolist(), nums, accepted, strict=True)
    result.decisions = {slot: Outcome([*row[:kept], 0], num, kept) for slot, row, num, kept in rows}
    table: SlotTable = drafter.slots  # type: ignore[attr-defined]
    drafter.observe(table.begin(step), batch, result)
