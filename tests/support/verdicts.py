"""What tests of `verify` look at: certain rows, single draws, and a verdict as lists."""

from __future__ import annotations

import math

import torch

from foretoken.ops import Backend, Noise, Rows, SlotParams, Stream, Verdict


def only(token: int, vocabulary: int = 8) -> torch.Tensor:
    """All mass on one token."""
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


def check(verdict: Verdict, tokens: list[list[int]], finite: list[bool] | None = None) -> None:
    widest = verdict.token_BK1.shape[1]
    assert verdict.token_BK1.tolist() == [row + [-1] * (widest - len(row)) for row in tokens]
    assert verdict.n_accept_B.tolist() == [len(row) - 1 for row in tokens]
    assert verdict.n_accept_B.dtype == torch.int64
    assert verdict.finite_B.tolist() == (finite or [True] * len(tokens))
