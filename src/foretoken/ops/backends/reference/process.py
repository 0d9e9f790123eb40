"""Edits, temperature and filters in fp64, one row at a time, each step as it is defined.

Order: logit bias, allowed tokens, min_tokens -> penalties -> bad words -> temperature -> min_p ->
top_k -> top_p. A filter keeps every logit at or above a threshold: ties stay together.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.ops.checks import check_rows
from foretoken.ops.types import Edits, SlotParams

Row = npt.NDArray[np.float64]


def process_logits(
    logits_NV: Tensor, params: SlotParams, slot_N: Tensor, edits: Edits | None
) -> Tensor:
    """See `Backend.process_logits`. Returns new float64 [N, V]."""
    check_rows(logits_NV, slot_N, params)
    out_NV = logits_NV.detach().to(torch.float64, copy=True)
    if edits is not None:
        _apply_edits(out_NV, edits)
    for n, slot in enumerate(slot_N.tolist()):
        temperature = float(params.temperature_S[slot])
        if temperature == 0:
            continue
        row = out_NV[n].numpy()  # shares memory
        row /= temperature
        if np.isnan(row).any() or not np.isfinite(row.max()):
            continue  # left as it is, for `verify` to report
        _keep_min_p(row, float(params.min_p_S[slot]))
        _keep_top_k(row, int(params.top_k_S[slot]))
        _keep_top_p(row, float(params.top_p_S[slot]))
    return out_NV


def _apply_edits(x_NV: Tensor, edits: Edits) -> None:
    for n, v, value in _entries(edits.bias_row_M, edits.bias_token_M, edits.bias_value_M):
        x_NV[int(n), int(v)] += value
    allowed: dict[int, list[int]] = {}
    for n, v in _entries(edits.allow_row_M, edits.allow_token_M):
        allowed.setdefault(int(n), []).append(int(v))
    for row, tokens in allowed.items():
        dropped = torch.ones(x_NV.shape[1], dtype=torch.bool)
        dropped[tokens] = False
        x_NV[row, dropped] = -torch.inf
    for n, v in _entries(edits.ban_early_row_M, edits.ban_early_token_M):
        x_NV[int(n), int(v)] = -torch.inf
    penalties = _entries(
        edits.penalty_row_M,
        edits.penalty_token_M,
        edits.penalty_count_M,
        edits.penalty_repetition_M,
        edits.penalty_frequency_M,
        edits.penalty_presence_M,
    )
    for n, v, count, repetition, frequency, presence in penalties:
        x = float(x_NV[int(n), int(v)])
        x = x / repetition if x > 0 else x * repetition
        x_NV[int(n), int(v)] = x - frequency * count - presence * (count > 0)
    for n, v in _entries(edits.ban_late_row_M, edits.ban_late_token_M):
        x_NV[int(n), int(v)] = -torch.inf


def _entries(*columns: Tensor) -> list[tuple[float, ...]]:
    """The rows of a sparse field."""
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _keep_min_p(row: Row, min_p: float) -> None:
    """Keep p >= min_p * p_max."""
    if min_p > 0:
        row[np.exp(row - row.max()) < min_p] = -np.inf


def _keep_top_k(row: Row, k: int) -> None:
    """Keep every logit >= the k-th largest; active iff 0 < k < V."""
    if 0 < k < len(row):
        row[row < np.sort(row)[len(row) - k]] = -np.inf


def _keep_top_p(row: Row, top_p: float) -> None:
    """Keep every logit >= the largest threshold t with P(logit >= t) >= top_p."""
    if top_p >= 1:
        return
    weight = np.exp(row - row.max())
    order = np.argsort(-row, kind="stable")
    cumulative = np.cumsum(weight[order])
    reached = np.flatnonzero(cumulative >= top_p * cumulative[-1])
    row[row < row[order[reached[0]]]] = -np.inf
