"""Raw logits in, processed on load: edits, temperature and filters of a few rows at a time.

Belongs here: what a row's parameters are, reading rows, edits, thresholds, `process_logits`. Does
not: sums over the vocabulary (`_reduce`), noise, and what is done with a processed row.

Filters become one threshold per row in units of raw logits, since each of them keeps every logit
at or above some value (ties are kept by law). It is sought among the largest values only, 64, then
1024, then all of them. numpy's partition and sort make that cheap: the upper 1024 of 151 936 values
cost 0.09 ms (torch.topk 0.49), a full sort 0.30 ms (torch 10.6; one core with AVX-512, 2026-11).

Shapes: N rows, R some of them, V vocabulary, C candidates of a row, M entries of edits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor, from_numpy

from foretoken.ops import types
from foretoken.ops.backends.torch.noise import Array
from foretoken.ops.types import Edits, Rule, SlotParams

CHUNK = 1 << 19  # values handled at a time: 2 MB in float32


class Rows(NamedTuple):
    """N rows of raw logits, and how each of them is read.

    temperature_N: float32, 1 at T=0
    greedy_N:      T = 0
    flat_N:        the row draws flat noise: top-k is active, or its slot is under COUPLED
    filtered_N:    some filter is active, and T > 0
    top_k_N:       V where off
    top_p_N, min_p_N: float64; empty, as `top_k_N`, if no row is filtered
    """

    logits_NV: Tensor
    edits: Edits | None
    key_N: Array
    temperature_N: Array
    greedy_N: Array
    flat_N: Array
    filtered_N: Array
    top_k_N: Array
    top_p_N: Array
    min_p_N: Array


def rows_of(logits_NV: Tensor, params: SlotParams, slot_N: Array, edits: Edits | None) -> Rows:
    """Gather the parameters of each row's slot; filters are not looked at if none is promised."""
    temperature_N = params.temperature_S.numpy()[slot_N]
    greedy_N = temperature_N == 0
    if greedy_N.any():
        temperature_N = np.where(greedy_N, np.float32(1), temperature_N)
    flat_N = params.rule_S.numpy()[slot_N] == Rule.COUPLED
    filtered_N = np.zeros(len(slot_N), bool)
    top_k_N = top_p_N = min_p_N = np.empty(0)
    if params.has_filters:
        vocabulary = logits_NV.shape[1]
        top_k_N, top_p_N = params.top_k_S.numpy()[slot_N], params.top_p_S.numpy()[slot_N]
        min_p_N = params.min_p_S.numpy()[slot_N].astype(np.float64)
        top_k_N = np.where((top_k_N > 0) & (top_k_N < vocabulary), top_k_N, vocabulary)
        flat_N = flat_N | (top_k_N < vocabulary)
        filtered_N = (top_k_N < vocabulary) | (top_p_N < 1) | (min_p_N > 0)
        filtered_N &= ~greedy_N
    return Rows(
        logits_NV.detach(),
        edits,
        params.key_S.numpy()[slot_N],
        temperature_N,
        greedy_N,
        flat_N,
        filtered_N,
        top_k_N,
        top_p_N.astype(np.float64),
        min_p_N,
    )


def chunks(num_rows: int, width: int) -> Iterator[slice]:
    """Slices of rows that hold about `CHUNK` values each."""
    step = max(1, CHUNK // max(1, width))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _adjacent(index_R: Array) -> bool:
    return len(index_R) == 1 or bool((np.diff(index_R) == 1).all())


def select(logits_NV: Tensor, index_R: Array) -> Tensor:
    """Rows in float32: a view where they are adjacent and float32 already, else a copy."""
    first, count = int(index_R[0]), len(index_R)
    if _adjacent(index_R):
        return logits_NV[first : first + count].float()
    return logits_NV[from_numpy(np.ascontiguousarray(index_R))].float()


def in_place(rows: Rows, index_R: Array) -> bool:
    """Whether `raw` gives these rows: they are adjacent and not edited."""
    return rows.edits is None and _adjacent(index_R)


def raw(rows: Rows, index_R: Array) -> Tensor:
    """The caller's own memory, in its float type [R, V], so that all of it may be asked for."""
    first = int(index_R[0])
    return rows.logits_NV[first : first + len(index_R)]


def load(rows: Rows, index_R: Array) -> Tensor:
    """Raw logits after edits, float32 [R, V], not to be written to: maybe the caller's memory."""
    x_RV = select(rows.logits_NV, index_R)
    if rows.edits is None:
        return x_RV
    return _edited(x_RV, rows.edits, index_R)


def _edited(x_RV: Tensor, edits: Edits, index_R: Array) -> Tensor:
    """The mask, then one entry per (row, token); a copy if there is any for these rows."""
    start_N1 = edits.start_N1.numpy()
    count_R = start_N1[index_R + 1] - start_N1[index_R]
    out = x_RV.numpy()
    if edits.mask_RW is not None and edits.mask_N is not None:
        mask_R = edits.mask_N.numpy()[index_R]
        for r in np.flatnonzero(mask_R >= 0).tolist():
            out = out.copy() if out.base is not None else out
            words = np.ascontiguousarray(edits.mask_RW[mask_R[r]].numpy())
            bits = np.unpackbits(words.view(np.uint8), count=out.shape[1], bitorder="little")
            np.copyto(out[r], -np.inf, where=bits == 0)
    total = int(count_R.sum())
    if total == 0:
        return from_numpy(out)
    out = out.copy() if out.base is not None else out
    row_M = np.repeat(np.arange(len(index_R)), count_R)
    first_M = np.repeat(start_N1[index_R] - (count_R.cumsum() - count_R), count_R)
    entry_M = first_M + np.arange(total)
    token_M = edits.token_M.numpy()[entry_M]
    repetition_M = edits.repetition_M.numpy()[entry_M]
    value_M = out[row_M, token_M].astype(np.float64) + edits.bias_M.numpy()[entry_M]
    value_M = np.where(value_M > 0, value_M / repetition_M, value_M * repetition_M)
    out[row_M, token_M] = value_M - edits.subtract_M.numpy()[entry_M]
    return from_numpy(out)


def process_logits(given: types.Rows) -> Tensor:
    """Edits -> temperature -> min_p -> top_k -> top_p; see `Backend.process_logits`.

    Returns new float32 [N, V]: survivors divided by the temperature, the rest -inf. Rows at T=0
    are edited only. Rows that are not finite (NaN, +inf, all -inf) stay so, for `verify` to find.
    """
    logits_NV, params, slot_N, edits = given
    rows = rows_of(logits_NV, params, slot_N.numpy(), edits)
    out_NV = np.empty(logits_NV.shape, np.float32)
    with np.errstate(all="ignore"):
        for part in chunks(*out_NV.shape):
            index_R = np.arange(part.start, part.stop)
            x_RV = load(rows, index_R).numpy()
            np.divide(x_RV, rows.temperature_N[part, None], out=out_NV[part])
            if rows.filtered_N[part].any():
                bound_R = cut(rows, index_R, x_RV, x_RV.max(axis=1))
                np.copyto(out_NV[part], -np.inf, where=x_RV < bound_R[:, None])
    return from_numpy(out_NV)


def cut(rows: Rows, index_R: Array, x_RV: Array, max_R: Array) -> Array:
    """Each row's threshold, float32, in units of raw logits; -inf where no filter is active."""
    bound_R = np.full(len(index_R), -np.inf, np.float32)
    r = np.flatnonzero(rows.filtered_N[index_R])
    if len(r):
        n = index_R[r]
        bound_R[r] = threshold(
            x_RV if len(r) == len(x_RV) else x_RV[r],
            max_R[r],
            rows.temperature_N[n].astype(np.float64),
            (rows.top_k_N[n], rows.top_p_N[n], rows.min_p_N[n]),
        )
    return bound_R


def threshold(
    x_RV: Array, max_R: Array, temperature_R: Array, filters: tuple[Array, Array, Array]
) -> Array:
    """The value at or above which each row's logits survive min_p, then top_k, then top_p.

    `filters` = (top_k_R, top_p_R, min_p_R); top-k is V where it is off. -inf where nothing is
    dropped; NaN (nothing is dropped) where the row holds NaN.
    """
    top_k_R, top_p_R, min_p_R = filters
    vocabulary = x_RV.shape[1]
    bound_R = _round_up(max_R + temperature_R * np.log(min_p_R))  # log 0 = -inf: off
    topk_R = top_k_R < vocabulary
    rows = np.flatnonzero(topk_R | (top_p_R < 1))
    # The mass of the set that top-p cuts, where top-k leaves it to the whole row.
    mass_R = np.zeros(len(x_RV))
    for r in np.flatnonzero(~topk_R & (top_p_R < 1)).tolist():
        weight_V = np.exp((x_RV[r] - max_R[r]) * np.float32(1 / temperature_R[r]))
        weight_V[x_RV[r] < bound_R[r]] = 0
        mass_R[r] = weight_V.sum()
    width = max(64, int(np.max(top_k_R, where=topk_R, initial=0)))
    while len(rows):
        width = vocabulary if width * 4 > vocabulary else width
        x = x_RV[rows] if len(rows) < len(x_RV) else x_RV
        best = np.partition(x, vocabulary - width, axis=1)[:, vocabulary - width :]
        best.sort(axis=1)
        found, bound = _cut_among(
            x,
            best[:, ::-1],
            (max_R[rows], bound_R[rows], mass_R[rows]),
            temperature_R[rows],
            (top_k_R[rows], top_p_R[rows]),
        )
        found |= width == vocabulary
        bound_R[rows[found]] = bound[found]
        rows = rows[~found]
        width = min(vocabulary, width * 16)
    return bound_R


def _round_up(bound_R: Array) -> Array:
    """The least float32 that is not below, so that comparing with it decides as in float64."""
    out: Array = bound_R.astype(np.float32)
    return np.where(out < bound_R, np.nextafter(out, np.float32(np.inf)), out)


def _cut_among(
    x_RV: Array,
    best_RC: Array,
    known: tuple[Array, Array, Array],
    temperature_R: Array,
    filters: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Find thresholds within each row's C best values, in falling order.

    `known` = (the row's maximum, its bound so far, the mass that top-p cuts where top-k is off).
    Returns (found_R, bound_R); a row is not found when its nucleus goes on below the C values.
    """
    (max_R, bound_R, mass_R), (top_k_R, top_p_R) = known, filters
    vocabulary, width = x_RV.shape[1], best_RC.shape[1]
    index = np.arange(len(best_RC))
    topk_R = top_k_R < vocabulary
    kth_R = best_RC[index, np.minimum(top_k_R, width) - 1]
    bound_R = np.where(topk_R & ~(bound_R > kth_R), kth_R, bound_R)
    if not (top_p_R < 1).any():
        return np.ones(len(index), bool), bound_R
    weight_RC = np.exp((best_RC.astype(np.float64) - max_R[:, None]) / temperature_R[:, None])
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
