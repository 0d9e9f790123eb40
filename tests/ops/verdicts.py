"""For tests of `verify`: certain rows, single draws, few requests, and a verdict as lists."""

from __future__ import annotations

import math
from typing import Any

import torch

from foretoken.ops import Backend, DraftBlock, Noise, Rows, SlotParams, Stream, Verdict, VerifyBatch


def only(token: int, vocabulary: int = 8) -> torch.Tensor:
    row = torch.full((vocabulary,), -math.inf)
    row[token] = 0.0
    return row


def draw(
    ops: Backend,
    row: torch.Tensor,
    params: SlotParams,
    position: int,
    streams: tuple[Stream, Stream],
) -> int:
    one = torch.tensor([position])
    return int(ops.sample(Rows(row[None], params, one * 0), Noise(one, one * 0, streams)))


def verify(
    ops: Backend,
    rows: torch.Tensor,
    params: SlotParams,
    drafts: DraftBlock,
    position: int | list[int] = 0,
    slots: list[int] | None = None,
    **more: Any,
) -> Verdict:
    """The verdict on requests in slots 0, 1, .. at one position, or in these and at these."""
    slot_B = torch.tensor([*range(len(drafts.num_B))] if slots is None else slots)
    position_B = torch.tensor(position).expand(len(slot_B)).contiguous()
    return ops.verify(VerifyBatch(rows, params, slot_B, position_B, drafts, **more))


def check(verdict: Verdict, tokens: list[list[int]], finite: list[bool] | None = None) -> None:
    widest = verdict.token_BK1.shape[1]
    assert verdict.token_BK1.tolist() == [row + [-1] * (widest - len(row)) for row in tokens]
    assert verdict.n_accept_B.tolist() == [len(row) - 1 for row in tokens]
    assert verdict.n_accept_B.dtype == torch.int64
    assert verdict.finite_B.tolist() == (finite or [True] * len(tokens))
