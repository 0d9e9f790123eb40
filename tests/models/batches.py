"""Batches of tokens that are given outright, as tests of models want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from foretoken.cache.batch import gather_batch
from foretoken.ops.steps import ForwardBatch, SlotSpan
from foretoken.slots.table import SlotTable


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
    """Pack spans in order, one slot for each; ops look at every number of it."""
    table = SlotTable(
        len(spans),
        device,
        max_tokens=max(span.start + len(span.tokens) for span in spans),
        max_drafts=0,
        blocks=max(len(span.block_ids) for span in spans),
    )
    asked = []
    for slot, (block_ids, start, tokens, num_logits) in enumerate(spans):
        table.token_SL[slot, start : start + len(tokens)] = tokens
        table.write_blocks([(slot, 0, block_ids)])
        asked.append(SlotSpan(slot, start, len(tokens), num_logits))
    batch = gather_batch(table, asked, block_size)
    return batch._replace(attention=replace(batch.attention, values_fit=False))
