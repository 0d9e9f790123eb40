"""What one forward pass of a model reads: packed tokens, and where their keys and values live.

Belongs here: turning slots' new tokens into tensors. Does not: choosing which tokens run
(scheduler), owning blocks (block pool), attention itself (ops).

Shape suffixes: T packed tokens, N rows whose logits are wanted, B requests, L block-table columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foretoken.errors import IntegrityError
from foretoken.ops import AttentionBatch, DraftBlock
from foretoken.ops.pinned import to_device
from foretoken.ops.steps import ForwardBatch, PackSizes, SlotSpan
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.step import NONE, StepRequests
from foretoken.slots.table import SlotTable


def gather_step(
    slots: SlotTable | DeviceSlotTable, rows: StepRequests, drafts: DraftBlock, block_size: int
) -> ForwardBatch:
    """What the target computes in a step: known tokens, then the drafts of who decides."""
    if isinstance(slots, SlotTable):
        return _gather_spans(slots, rows, drafts, block_size)
    return _pack_step(slots, rows, drafts, block_size)


def _gather_spans(
    table: SlotTable, rows: StepRequests, drafts: DraftBlock, block_size: int
) -> ForwardBatch:
    step, num_D = rows.step, drafts.num_B.tolist()
    num_drafts = dict(zip(rows.slot_D.tolist(), num_D, strict=True))
    spans: list[SlotSpan] = []
    keep: list[int] = []
    end = 0
    columns = (step.slot_B, step.num_tokens_B, step.num_prompt_logprobs_B)
    for slot, num_tokens, num_prompt_logprobs in zip(*columns, strict=True):
        count = num_tokens + num_drafts.get(slot, 0)
        deciding = 1 + num_drafts[slot] if slot in num_drafts else 0
        num_logits = deciding if num_prompt_logprobs == NONE else count
        spans.append(SlotSpan(slot, table.computed_S[slot], count, num_logits))
        end += num_logits
        keep += range(end - deciding, end)
    batch = gather_batch(table, spans, block_size)
    if len(keep) == end:
        return batch
    return batch._replace(decision_N=torch.tensor(keep, dtype=torch.int64))


def _pack_step(
    slots: DeviceSlotTable, rows: StepRequests, drafts: DraftBlock, block_size: int
) -> ForwardBatch:
    """Rows that decide come first here, then those of prompts whose log-probabilities are wanted.

    Their numbers are those of the host's bounds: what is wanted of whom, the host knows.
    """
    step, most = rows.step, drafts.token_BK.shape[1]
    size_B, size_D = len(rows.slot_B), len(rows.slot_D)
    num_tokens = sum(step.num_tokens_B) + size_B - len(step.slot_B)
    queries = [n + most * d for n, d in zip(step.num_tokens_B, step.decides_B, strict=True)]
    sizes = PackSizes(
        num_tokens + size_D * most, size_D * (most + 1), max(queries, default=1 + most)
    )
    if slots.device.type == "cpu":  # where the truth costs nothing, and ops insist on it
        num_drafts = int(drafts.num_B.sum())
        sizes = sizes._replace(tokens=num_tokens + num_drafts, rows=size_D + num_drafts)
    decision_N = slice(0, sizes.rows)
    prompts = [b for b, most in enumerate(step.num_prompt_logprobs_B) if most != NONE]
    num_rows = sizes.rows + sum(step.num_tokens_B[b] for b in prompts)
    if prompts and num_rows == sizes.tokens:
        # As many rows as tokens are all tokens in order, which these are not: one more, unread.
        sizes = sizes._replace(rows=sizes.rows + 1)
    batch = slots.pack(rows, drafts.num_B, sizes, block_size)
    if not prompts:
        return batch
    starts = batch.attention.query_start_B1
    row_P = [starts[b] + torch.arange(step.num_tokens_B[b], device=slots.device) for b in prompts]
    row_N = torch.cat([batch.logit_row_N, *row_P])
    return batch._replace(logit_row_N=row_N, decision_N=decision_N)


def gather_batch(
    table: SlotTable, spans: Sequence[SlotSpan], block_size: int, *, ahead: int = 0
) -> ForwardBatch:
    """Pack tokens that slots hold, in this order.

    Args:
        ahead: positions behind each span that the block table reaches over, too.

    Raises:
        IntegrityError: one of the tokens was never written, a slot's blocks do not reach them, or a
            span has fewer tokens than rows, or none.
    """
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    starts = [0]
    lengths: list[int] = []
    for slot, start, num_tokens, num_logits in spans:
        tokens += table.known(slot, start, num_tokens)
        end, length = len(tokens), start + num_tokens
        blocks = table.num_blocks_S[slot]
        if num_tokens < max(num_logits, 1):
            raise IntegrityError(f"slot {slot}: {num_logits} rows of {num_tokens} tokens")
        if length > blocks * block_size:
            raise IntegrityError(
                f"slot {slot}: {blocks} blocks of {block_size} for {length} tokens"
            )
        positions += range(start, length)
        rows += range(end - num_logits, end)
        starts.append(end)
        lengths.append(length)
    columns = -(-(max(lengths) + ahead) // block_size)
    block_rows = [table.block_SL[span.slot, :columns] for span in spans]
    token_T, position_T, row_N, start_B1, length_B, block_BL = (
        to_device(np.array(numbers, dtype=np.int64), table.device)
        for numbers in (tokens, positions, rows, starts, lengths, block_rows)
    )
    attention = AttentionBatch(start_B1, length_B, block_BL, block_size, values_fit=True)
    return ForwardBatch(token_T, position_T, row_N, attention, spans=spans)
