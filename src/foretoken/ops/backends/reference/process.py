"""Edits, temperature, filters and log-probabilities in fp64, one row at a time.

Order: mask -> entries (bias, repetition, subtract) -> temperature -> min_p -> top_k -> top_p. A
filter keeps every logit at or above a threshold, so that equal logits are kept or dropped together.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.ops.types import Edits, Logprobs, Rows, SlotParams

Row = npt.NDArray[np.float64]


def process_logits(rows: Rows) -> Tensor:
    """See `Backend.process_logits`. Returns new float64 [N, V]."""
    logits_NV, params, slot_N, edits = rows
    out_NV = logits_NV.detach().to(torch.float64, copy=True)
    for n, slot in enumerate(slot_N.tolist()):
        row = out_NV[n].numpy()  # shares memory
        if edits is not None:
            edit(row, edits, n)
        filter_row(row, params, slot)
    return out_NV


def edit(row: Row, edits: Edits, n: int) -> None:
    """Apply the edits of row n in place: its mask, then its entries."""
    if edits.mask_RW is not None and edits.mask_N is not None and edits.mask_N[n] >= 0:
        words = edits.mask_RW[int(edits.mask_N[n])].tolist()
        for v in range(len(row)):
            if not words[v // 32] >> v % 32 & 1:
                row[v] = -np.inf
    start, stop = edits.start_N1[n : n + 2].tolist()
    columns = (edits.token_M, edits.bias_M, edits.repetition_M, edits.subtract_M)
    entries = zip(*(column[start:stop].tolist() for column in columns), strict=True)
    for v, bias, repetition, subtract in entries:
        x = float(row[v]) + bias
        x = x / repetition if x > 0 else x * repetition
        row[v] = x - subtract


def filter_row(row: Row, params: SlotParams, slot: int) -> None:
    """Divide a row by its slot's temperature and apply the slot's filters, in place. At T=0 the row
    does not change. A row that is not finite (`is_finite`) is divided, but not filtered."""
    temperature = float(params.temperature_S[slot])
    if temperature == 0:
        return
    row /= temperature
    if not is_finite(row):
        return
    # min-p: keep p >= min_p * p_max
    row[np.exp(row - row.max()) < float(params.min_p_S[slot])] = -np.inf
    k = int(params.top_k_S[slot])
    if 0 < k < len(row):  # keep every logit >= the k-th largest
        row[row < np.sort(row)[len(row) - k]] = -np.inf
    _keep_top_p(row, float(params.top_p_S[slot]))


def is_finite(row: Row) -> bool:
    """Whether the row defines a distribution: no NaN, no +inf, at least one logit above -inf."""
    return not np.isnan(row).any() and bool(np.isfinite(row.max()))


def _keep_top_p(row: Row, top_p: float) -> None:
    """Keep every logit >= the largest threshold t with P(logit >= t) >= top_p."""
    if top_p >= 1:
        return
    weight = np.exp(row - row.max())
    order = np.argsort(-row, kind="stable")
    cumulative = np.cumsum(weight[order])
    last = np.argmax(cumulative >= top_p * cumulative[-1])  # the first True
    row[row < row[order[last]]] = -np.inf


def log_sum_exp(row: Row) -> float:
    """log sum exp of a row: -inf if all logits are -inf; NaN or +inf if a logit is NaN or +inf."""
    largest = float(np.max(row))
    if not math.isfinite(largest):
        return largest
    return largest + math.log(float(np.sum(np.exp(row - largest))))


def softmax(row: Row) -> Row:
    """exp(row) / sum(exp(row)) of a finite row."""
    weight = np.exp(row - np.max(row))
    return np.asarray(weight / weight.sum())


def logprobs(rows: Rows | Tensor, token_N: Tensor, num_top: int) -> Logprobs:
    """See `Backend.logprobs`. log p(v) = logit_v - log sum exp of the row."""
    x_NV = (process_logits(rows) if isinstance(rows, Rows) else rows.detach().double()).numpy()
    out = Logprobs.empty(len(x_NV), num_top, token_N.device)
    for n, x in enumerate(token_N.tolist()):
        with np.errstate(invalid="ignore"):  # inf - inf, in rows that are not finite
            log_p = x_NV[n] - log_sum_exp(x_NV[n])
        likeliest = np.argsort(-x_NV[n], kind="stable")[:num_top]
        # Assign a tensor: a Python float outside the range of float32 would raise an error.
        out.logprob_N[n] = torch.from_numpy(log_p)[x]
        out.rank_N[n] = 1 + int((x_NV[n] > x_NV[n][x]).sum())
        out.top_token_NT[n] = torch.from_numpy(likeliest)
        out.top_logprob_NT[n] = torch.from_numpy(log_p[likeliest])
    return out
