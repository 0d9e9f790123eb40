"""Edits, temperature and filters of processed logits, on the CPU.

Filters become one threshold per row, since each of them keeps every logit at or above some value
(ties are kept by law): the threshold is sought among the largest values only, 64, then 1024, then
all of them. numpy's vectorised partition and sort make that cheap: the upper 1024 of 151 936
values cost 0.09 ms (torch.topk 0.49), a full sort 0.30 ms (torch 10.6; one core, 2026-11).

Shapes: N rows, R some of them, V vocabulary, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor, from_numpy

from foretoken.ops.backends.torch_cpu.noise import Array
from foretoken.ops.checks import check_rows
from foretoken.ops.types import Edits, SlotParams

CHUNK = 1 << 16  # values handled at a time: 256 KB of fp32 stays in the L2 cache


def chunks(num_rows: int, width: int) -> Iterator[slice]:
    """Slices of rows that hold about `CHUNK` values each."""
    step = max(1, CHUNK // max(1, width))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def as_float32(logits: Tensor) -> Array:
    """A float32 numpy view, or a converted copy of another float dtype."""
    array: Array = logits.detach().float().numpy()
    return array


def process_logits(
    logits_NV: Tensor, params: SlotParams, slot_N: Tensor, edits: Edits | None
) -> Tensor:
    """Edits -> temperature -> min_p -> top_k -> top_p; see `Backend.process_logits`.

    Returns new float32 [N, V]: survivors divided by the temperature, the rest -inf. Rows at T=0
    are edited only. Rows that are not finite (NaN, +inf, all -inf) stay so, for `verify` to find.
    """
    check_rows(logits_NV, slot_N, params)
    raw_NV = as_float32(logits_NV)
    slot = slot_N.numpy()
    temperature_N = params.temperature_S.numpy()[slot]
    if edits is not None:
        raw_NV = raw_NV.copy()
        apply_edits(raw_NV, edits)
    out_NV = raw_NV / np.where(temperature_N > 0, temperature_N, np.float32(1))[:, None]
    top_k_N = params.top_k_S.numpy()[slot]
    top_p_N = params.top_p_S.numpy()[slot]
    min_p_N = params.min_p_S.numpy()[slot]
    vocabulary = out_NV.shape[1]
    top_k_N = np.where((top_k_N > 0) & (top_k_N < vocabulary), top_k_N, vocabulary)
    active_N = (top_k_N < vocabulary) | (top_p_N < 1) | (min_p_N > 0)
    active_N &= temperature_N > 0
    if active_N.any():
        rows = np.flatnonzero(active_N)
        with np.errstate(all="ignore"):
            for part in chunks(len(rows), vocabulary):
                r = rows[part]
                x = out_NV[r] if len(r) < len(out_NV) else out_NV
                bound = threshold(x, top_k_N[r], top_p_N[r].astype(float), min_p_N[r].astype(float))
                np.copyto(x, -np.inf, where=x < bound[:, None])  # False where either is NaN
                if x is not out_NV:
                    out_NV[r] = x
    return from_numpy(out_NV)


def apply_edits(x_NV: Array, edits: Edits) -> None:
    """Apply the sparse fields in their order, in place."""
    if len(edits.bias_row_M):
        x_NV[edits.bias_row_M.numpy(), edits.bias_token_M.numpy()] += edits.bias_value_M.numpy()
    if len(edits.allow_row_M):
        where = edits.allow_row_M.numpy(), edits.allow_token_M.numpy()
        allowed = x_NV[where]
        x_NV[where[0]] = -np.inf
        x_NV[where] = allowed
    if len(edits.ban_early_row_M):
        x_NV[edits.ban_early_row_M.numpy(), edits.ban_early_token_M.numpy()] = -np.inf
    if len(edits.penalty_row_M):
        where = edits.penalty_row_M.numpy(), edits.penalty_token_M.numpy()
        value = x_NV[where]
        repetition = edits.penalty_repetition_M.numpy()
        count = edits.penalty_count_M.numpy()
        value = np.where(value > 0, value / repetition, value * repetition)
        value -= edits.penalty_frequency_M.numpy() * count
        value -= edits.penalty_presence_M.numpy() * (count > 0)
        x_NV[where] = value
    if len(edits.ban_late_row_M):
        x_NV[edits.ban_late_row_M.numpy(), edits.ban_late_token_M.numpy()] = -np.inf


def threshold(x_RV: Array, top_k_R: Array, top_p_R: Array, min_p_R: Array) -> Array:
    """The value at or above which each row's logits survive min_p, then top_k, then top_p.

    `top_k_R` is V where top-k is off. -inf where nothing is dropped; NaN (nothing is dropped)
    where the row holds NaN.
    """
    vocabulary = x_RV.shape[1]
    max_R = x_RV.max(axis=1)
    bound_R = max_R + np.log(min_p_R).astype(np.float32)  # log 0 = -inf: off
    topk_R = top_k_R < vocabulary
    rows = np.flatnonzero(topk_R | (top_p_R < 1))
    if not len(rows):
        return np.asarray(bound_R)
    # The mass of the set that top-p cuts, where top-k leaves it to the whole row.
    mass_R = np.zeros(len(x_RV))
    wide = np.flatnonzero(~topk_R & (top_p_R < 1))
    if len(wide):
        weight = np.exp(x_RV[wide] - max_R[wide, None])
        weight[x_RV[wide] < bound_R[wide, None]] = 0
        mass_R[wide] = weight.sum(axis=1)
    width = max(64, int(np.max(top_k_R, where=topk_R, initial=0)))
    while len(rows):
        width = vocabulary if width * 4 > vocabulary else width
        x = x_RV[rows] if len(rows) < len(x_RV) else x_RV
        low = np.partition(x, vocabulary - width, axis=1)[:, vocabulary - width :]
        low.sort(axis=1)
        found, bound = _cut(
            x, low[:, ::-1], max_R[rows], bound_R[rows], top_k_R[rows], top_p_R[rows], mass_R[rows]
        )
        found |= width == vocabulary
        bound_R[rows[found]] = bound[found]
        rows = rows[~found]
        width = min(vocabulary, width * 16)
    return np.asarray(bound_R)


def _cut(
    x_RV: Array,
    best_RC: Array,
    max_R: Array,
    bound_R: Array,
    top_k_R: Array,
    top_p_R: Array,
    mass_R: Array,
) -> tuple[Array, Array]:
    """Find thresholds within each row's C best values, in falling order.

    Returns (found_R, bound_R); a row is not found when its nucleus goes on below the C values.
    """
    vocabulary, width = x_RV.shape[1], best_RC.shape[1]
    index = np.arange(len(best_RC))
    topk_R = top_k_R < vocabulary
    kth_R = best_RC[index, np.minimum(top_k_R, width) - 1]
    bound_R = np.where(topk_R & ~(bound_R > kth_R), kth_R, bound_R)
    if not (top_p_R < 1).any():
        return np.ones(len(index), bool), bound_R
    weight_RC = np.exp(best_RC.astype(np.float64) - max_R[:, None])
    weight_RC[best_RC < bound_R[:, None]] = 0.0
    cumulative_RC = weight_RC.cumsum(axis=1)
    # Ties at the k-th value may go on below the C values: count them into the mass.
    inside_R = cumulative_RC[:, -1]
    tied = np.flatnonzero(topk_R & (best_RC[:, -1] == bound_R))
    if len(tied):
        beyond = (x_RV[tied] == bound_R[tied, None]).sum(axis=1)
        beyond -= (best_RC[tied] == bound_R[tied, None]).sum(axis=1)
        inside_R[tied] += beyond * weight_RC[tied, -1]
    mass_R = np.where(topk_R, inside_R, mass_R)
    reached_RC = cumulative_RC >= (top_p_R * mass_R)[:, None]
    reached_R = reached_RC[:, -1]
    last_R = best_RC[index, reached_RC.argmax(axis=1)]
    last_R = np.where(reached_R & (top_p_R < 1), last_R, bound_R)
    return reached_R | topk_R | ~(top_p_R < 1), np.where(last_R < bound_R, bound_R, last_R)
