"""What one forward pass of a model reads: packed tokens, and where their keys and values live.

Belongs here: turning requests' new tokens into tensors. Does not: choosing which tokens run
(scheduler), owning blocks (block pool), attention itself (ops).

Shape suffixes: T packed tokens, N rows whose logits are wanted, B requests, L block-table columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import IntegrityError
from foretoken.ops import AttentionBatch

__all__ = ["ForwardBatch", "Span", "build_batch"]


class Span(NamedTuple):
    """One request's new tokens, at positions `start` to `start + len(tokens) - 1`.

    block_ids:  the request's blocks from position 0 on; may reach beyond the new tokens
    num_logits: logits are wanted for the last `num_logits` tokens; 0 means none
    """

    block_ids: Sequence[int]
    start: int
    tokens: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Packed input of one forward pass; rows come in the order of the spans.

    token_T:     int64 token ids
    position_T:  int64 absolute positions
    logit_row_N: int64 indices into T whose logits are wanted, ascending
    attention:   whose the tokens are, and where their K/V go
    """

    token_T: Tensor
    position_T: Tensor
    logit_row_N: Tensor
    attention: AttentionBatch


def build_batch(
    spans: Sequence[Span], block_size: int, device: torch.device, *, ahead: int = 0
) -> ForwardBatch:
    """Pack spans in order.

    Every index of the batch is written into one host array, moved to the device once and cut
    into views: 6 µs for one decode row (2-core CPU; 16 requests of 6 rows 23 µs, a prefill of 512
    tokens 26 µs).

    Args:
        ahead: positions behind each span that the block table reaches over, too, as far as the
            request has blocks for them.

    Raises:
        IntegrityError: a span is empty, wants more logits than it has tokens, or lacks blocks.
    """
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    starts = [0]
    lengths: list[int] = []
    for span in spans:
        first, count, start = len(tokens), len(span.tokens), span.start
        _check(span, count, block_size)
        tokens += span.tokens
        end = first + count
        positions += range(start, start + count)
        rows += range(end - span.num_logits, end)
        starts.append(end)
        lengths.append(start + count)
    table = _block_table(spans, -(-(max(lengths) + ahead) // block_size))
    sizes = [len(tokens), len(positions), len(rows), len(starts), len(lengths), len(table)]
    flat = np.array(tokens + positions + rows + starts + lengths + table, dtype=np.int64)
    packed = torch.from_numpy(flat)
    if device.type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    token_T, position_T, row_N, start_B1, length_B, block_ids = torch.split_with_sizes(
        packed, sizes
    )
    batch = AttentionBatch(start_B1, length_B, block_ids.view(len(lengths), -1), block_size)
    return ForwardBatch(token_T, position_T, row_N, batch)


def _check(span: Span, count: int, block_size: int) -> None:
    if count == 0 or not 0 <= span.num_logits <= count or span.start < 0:
        raise IntegrityError(
            f"A span of {count} tokens at {span.start} cannot give {span.num_logits} logits."
        )
    if len(span.block_ids) * block_size < span.start + count:
        raise IntegrityError(
            f"A span ends at position {span.start + count} but owns {len(span.block_ids)} blocks "
            f"of {block_size}."
        )


def _block_table(spans: Sequence[Span], columns: int) -> list[int]:
    """The first blocks of every request, rows of one length, 0 where a request has none."""
    table: list[int] = []
    for span in spans:
        table += span.block_ids[:columns]
        missing = columns - len(span.block_ids)
        if missing > 0:
            table += [0] * missing
    return table
