"""max(w p - q, 0) of a row: its mass, which the block rule asks for, and a draw from it.

Belongs here: what needs p and q over the whole vocabulary, and the arrays that the stages of
`verify` share. Does not: what is decided from it.

p and q are stated as exp(logit / T - LSE) with the LSEs that decided acceptance. Where p is
filtered, only its survivors can have mass, and only they are looked at, in float64.

Shapes: B requests, K most drafts, R drafts at a time, V vocabulary, W the same in whole blocks,
S slots, M survivors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor, from_numpy

from foretoken.ops.backends.torch._reduce import (
    Survivors,
    block_sums,
    dense_weights,
    sum_by_row,
    survivors,
)
from foretoken.ops.backends.torch.noise import Array
from foretoken.ops.backends.torch.process import Rows, chunks, load
from foretoken.ops.backends.torch.sample import Noise, draw_survivors, draw_weights
from foretoken.ops.types import DraftCache, Rule

Index = tuple[Array, Array]


class Batch(NamedTuple):
    """What the stages of `verify` share, as arrays; fields named as in the contract, and:

    rows:        the N target rows; those of a request have the parameters of its slot
    greedy_B:    T = 0
    own_B:       p is one-hot at the target's own draw: T = 0, or COUPLED
    first_row_B: the row that decides the request's first token
    known_BK:    there is a draft here, and no placeholder up to here
    real_q_B:    as given, but False where `own_B`, which asks nothing of q
    """

    rows: Rows
    slot_B: Array
    key_B: Array
    position_B: Array
    rule_B: Array
    greedy_B: Array
    own_B: Array
    first_row_B: Array
    num_B: Array
    token_BK: Array
    known_BK: Array
    real_q_B: Array
    cache: DraftCache | None
    fp64_noise: bool


class Reduced(NamedTuple):
    """What stage (i) makes of the vocabulary; filled where a rule asks for it.

    log_p_BK, log_q_BK: as in `RuleInputs`
    threshold_BK, lse_p_BK: of the target row that decides x_i
    own_BK1:    the target's own draws, where `own_B`
    finite_BK1: False where a target row was read and is not finite
    """

    log_p_BK: Array
    log_q_BK: Array
    threshold_BK: Array
    lse_p_BK: Array
    own_BK1: Array
    finite_BK1: Array

    @classmethod
    def empty(cls, num_requests: int, most: int) -> Reduced:
        shape, wide = (num_requests, most), (num_requests, most + 1)
        return cls(
            np.full(shape, -np.inf),
            np.full(shape, -np.inf),
            np.full(shape, -np.inf, np.float32),
            np.zeros(shape),
            np.zeros(wide, np.int64),
            np.ones(wide, bool),
        )


def residual_mass(batch: Batch, out: Reduced, log_w_BK1: Array) -> Array:
    """S_{i-1} = sum_x max(w_{i-1} p(x) - q(x), 0) of the row of x_i, [B, K], for the block rule.

    w where q = 0 everywhere; w (1 - p(x_i)) where q is one-hot; else summed over the row, but for
    x_1, whose mass no rule reads. 0 where p is not finite.
    """
    weight_BK = np.exp(log_w_BK1[:, :-1])
    mass_BK = np.where(np.isneginf(out.log_q_BK), weight_BK, -np.expm1(out.log_p_BK) * weight_BK)
    real_BK = (out.log_q_BK > -np.inf) & (weight_BK > 0) & out.finite_BK1[:, :-1]
    real_BK &= (batch.real_q_B & (batch.rule_B == Rule.BLOCK))[:, None]
    real_BK[:, :1] = False
    b_M, i_M = np.nonzero(real_BK)
    log_w_M = log_w_BK1[b_M, i_M]
    for part in _parts(batch, b_M):
        at = b_M[part], i_M[part]
        if batch.rows.filtered_N[batch.first_row_B[at[0][0]]]:
            kept, weight_M = _sparse(batch, out, at, log_w_M[part])
            mass_BK[at] = sum_by_row(kept.row_M, weight_M, len(part))
        else:
            mass_BK[at] = block_sums(_dense(batch, out, at, log_w_M[part])).sum(axis=1)
    mass_BK[~out.finite_BK1[:, :-1]] = 0.0
    return mass_BK


def draw_residual(
    batch: Batch, out: Reduced, at: Index, log_w_R: Array, noise: Noise
) -> tuple[Array, Array]:
    """(token, mass) of norm(max(w p - q, 0)) at drafts `at` = (b, i); no token if the mass is 0."""
    (b_R, i_R), vocabulary = at, batch.rows.logits_NV.shape[1]
    token_R, mass_R = np.zeros(len(b_R), np.int64), np.zeros(len(b_R))
    for part in _parts(batch, b_R):
        here, own = (b_R[part], i_R[part]), noise.take(part)
        n = batch.first_row_B[here[0]]
        if batch.rows.filtered_N[n[0]]:
            kept, weight_M = _sparse(batch, out, here, log_w_R[part])
            mass_R[part] = sum_by_row(kept.row_M, weight_M, len(part))
            logit_M = np.log(weight_M / mass_R[part][kept.row_M])
            some = np.flatnonzero(weight_M > 0)
            kept = kept._replace(logit_M=logit_M).take(some)
            token_R[part] = draw_survivors(kept, batch.rows.flat_N[n], vocabulary, own)
        else:
            weight_RW = _dense(batch, out, here, log_w_R[part])
            mass_R[part] = block_sums(weight_RW).sum(axis=1)
            token_R[part] = draw_weights(weight_RW, vocabulary, own)
    return token_R, mass_R


def _parts(batch: Batch, b_M: Array) -> Iterator[Array]:
    """Indices of drafts whose rows have one form, a few at a time."""
    filtered_M = batch.rows.filtered_N[batch.first_row_B[b_M]]
    for form in (False, True):
        mine = np.flatnonzero(filtered_M == form)
        for part in chunks(len(mine), batch.rows.logits_NV.shape[1]):
            yield mine[part]


def _dense(batch: Batch, out: Reduced, at: Index, log_w_R: Array) -> Tensor:
    """max(w p - q, 0), float32 [R, W], of rows that no filter cuts."""
    b_R, i_R = at
    n = batch.first_row_B[b_R] + i_R
    weight_RW = _probabilities(
        load(batch.rows, n), batch.rows.temperature_N[n], out.lse_p_BK[at] - log_w_R
    )
    token_R, vocabulary = batch.token_BK[at], batch.rows.logits_NV.shape[1]
    one_hot = np.flatnonzero(~batch.real_q_B[b_R] & (token_R < vocabulary))
    weight_RW.numpy()[one_hot, token_R[one_hot]] = 0.0
    real = np.flatnonzero(batch.real_q_B[b_R])
    if batch.cache is None or not len(real):
        return weight_RW
    logits_RV, bound_R, lse_R = _cached(batch.cache, batch.slot_B[b_R[real]], i_R[real])
    q_RW = _probabilities(logits_RV, batch.rows.temperature_N[n[real]], lse_R, which=1)
    width = min(vocabulary, logits_RV.shape[1])
    q_RV = q_RW[:, :width]
    if (bound_R > -np.inf).any():
        q_RV.masked_fill_(logits_RV[:, :width] < from_numpy(bound_R)[:, None], 0.0)
    if len(real) == len(b_R):
        weight_RW[:, :width] -= q_RV
    else:
        weight_RW[from_numpy(real), :width] -= q_RV
    return weight_RW.clamp_(min=0.0)


def _probabilities(x_RV: Tensor, temperature_R: Array, lse_R: Array, which: int = 0) -> Tensor:
    """exp(x / T - LSE), float32 [R, W]."""
    weight_RW, max_R = dense_weights(x_RV, temperature_R, which)
    scale_R = np.exp(max_R.astype(np.float64) / temperature_R - lse_R).astype(np.float32)
    return weight_RW.mul_(from_numpy(scale_R)[:, None])


def _sparse(batch: Batch, out: Reduced, at: Index, log_w_R: Array) -> tuple[Survivors, Array]:
    """The survivors of p, and max(w p - q, 0) of each, float64 [M]."""
    b_R, i_R = at
    n = batch.first_row_B[b_R] + i_R
    temperature_R = batch.rows.temperature_N[n]
    kept = survivors(load(batch.rows, n).numpy(), out.threshold_BK[at], temperature_R)
    row_M, id_M = kept.row_M, kept.id_M
    weight_M = np.exp(kept.logit_M - (out.lse_p_BK[at] - log_w_R)[row_M])
    real_R = batch.real_q_B[b_R]
    weight_M[~real_R[row_M] & (id_M == batch.token_BK[at][row_M])] = 0.0
    if batch.cache is None or not real_R.any():
        return kept, weight_M
    m = np.flatnonzero(real_R[row_M] & (id_M < batch.cache.logits_SKV.shape[2]))
    r, slot_M, i_M = row_M[m], batch.slot_B[b_R][row_M[m]], i_R[row_M[m]]
    where = from_numpy(slot_M), from_numpy(i_M), from_numpy(id_M[m])
    raw_M = batch.cache.logits_SKV[where].float().numpy()
    q_M = np.exp(
        raw_M.astype(np.float64) / temperature_R[r] - batch.cache.lse_SK.numpy()[slot_M, i_M]
    )
    q_M[raw_M < batch.cache.threshold_SK.numpy()[slot_M, i_M]] = 0.0
    weight_M[m] = np.maximum(weight_M[m] - q_M, 0.0)
    return kept, weight_M


def _cached(cache: DraftCache, slot_R: Array, i_R: Array) -> tuple[Tensor, Array, Array]:
    """The raw draft logits, float32 [R, V'], thresholds and LSEs of drafts i_R of slots."""
    if len(slot_R) == 1:
        logits_RV = cache.logits_SKV[int(slot_R[0]), int(i_R[0])][None].float()
    else:
        logits_RV = cache.logits_SKV[from_numpy(slot_R), from_numpy(i_R)].float()
    return logits_RV, cache.threshold_SK.numpy()[slot_R, i_R], cache.lse_SK.numpy()[slot_R, i_R]
