"""Batches of given tokens, for tests of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from foretoken.ops import get_backend
from foretoken.ops.steps import ForwardBatch, PackSizes, SlotState, StepTokens


class Span(NamedTuple):
    """One request's new tokens, at positions `start` to `start + len(tokens) - 1`.
    block_ids:  the request's blocks from position 0 on; may reach beyond the new tokens
    num_logits: logits are wanted for the last `num_logits` tokens; 0 means none
    """

    block_ids: Sequence[int]
    start: int
    tokens: Sequence[int]
    num_logits: int


def build_batch(spans: Sequence[Span], block_size: int, device: torch.device) -> ForwardBatch:
    longest = max(span.start + len(span.tokens) for span in spans)
    start_S, count_S, wanted_S = (
        torch.tensor([*numbers, 1])  # and the spare's
        for numbers in (
            [span.start for span in spans],
            [len(span.tokens) for span in spans],
            [span.num_logits for span in spans],
        )
    )
    token_SL = torch.zeros(len(spans) + 1, longest + 1, dtype=torch.int32)
    block_SL = torch.zeros(len(spans) + 1, max(len(s.block_ids) for s in spans), dtype=torch.int64)
    for slot, (block_ids, start, tokens, _) in enumerate(spans):
        token_SL[slot, start : start + len(tokens)] = torch.tensor(tokens)
        block_SL[slot, : len(block_ids)] = torch.tensor(block_ids)
    length_S = start_S + 1
    columns = (token_SL, block_SL, length_S, start_S, length_S + 1)
    state = SlotState(*(column.to(device) for column in columns))
    # Of a request that decides the rows are the last known token's and those of drafts after it.
    decides_B, drafts_B = wanted_S[:-1] > 0, (wanted_S[:-1] - 1).clamp(min=0)
    decider_B = torch.where(decides_B, decides_B.cumsum(0) - 1, -1)
    numbers = (torch.arange(len(spans)), count_S[:-1] - drafts_B, decider_B, drafts_B[decides_B])
    sizes = PackSizes(int(count_S[:-1].sum()), int(wanted_S[:-1].sum()), int(count_S[:-1].max()))
    steps = get_backend("torch").steps(state)
    batch = steps.pack(StepTokens(*(n.to(device) for n in numbers)), sizes, block_size)
    return batch._replace(attention=replace(batch.attention, values_fit=False))
