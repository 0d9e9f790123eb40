"""Gumbel-max sampling of processed logits on the CPU: flat, or hierarchical over blocks.

One row of 4096 logits is drawn in 0.11 ms (FP64 noise 0.13; after top-k 20 0.06; T=0 0.01), one of
151 936 in 0.26 ms (one core, 2026-11).

Shapes: N rows, V vocabulary, J blocks of a row, M survivors of all rows.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, from_numpy

from foretoken.ops.backends.torch_cpu.noise import (
    Address,
    Array,
    address,
    to_gumbel,
    uniform_at,
    uniform_span,
)
from foretoken.ops.backends.torch_cpu.process import as_float32, chunks
from foretoken.ops.checks import INT64, check_rows, check_tensor
from foretoken.ops.types import SlotParams, Stream

BLOCK = 1024


def sample(
    logits_NV: Tensor,
    params: SlotParams,
    slot_N: Tensor,
    position_N: Tensor,
    draft_index_N: Tensor,
    streams: tuple[Stream, Stream],
    *,
    fp64_noise: bool = False,
) -> Tensor:
    """One token per row from softmax(logits), as the argmax of logits plus Gumbel noise.

    See `Backend.sample`. Rows at T=0 draw no noise. Returns int64 [N].
    """
    check_rows(logits_NV, slot_N, params)
    check_tensor("position_N", position_N, slot_N.shape, INT64)
    check_tensor("draft_index_N", draft_index_N, slot_N.shape, INT64)
    x_NV = as_float32(logits_NV)
    slot = slot_N.numpy()
    greedy_N = params.temperature_S.numpy()[slot] == 0
    if greedy_N.all():
        return from_numpy(x_NV.argmax(axis=1))
    at = address(params.key_S.numpy()[slot], position_N.numpy(), draft_index_N.numpy())
    flat_N = is_flat(params.top_k_S.numpy()[slot], x_NV.shape[1])
    token_stream, block_stream = (int(s) for s in streams)
    return from_numpy(draw(x_NV, greedy_N, flat_N, at, token_stream, block_stream, fp64_noise))


def is_flat(top_k_N: Array, vocabulary: int) -> Array:
    """Which noise a row uses follows from its parameters alone: flat where top-k is active."""
    flat: Array = (top_k_N > 0) & (top_k_N < vocabulary)
    return flat


def draw(
    x_NV: Array,
    greedy_N: Array,
    flat_N: Array,
    at: Address,
    token_stream: Array | int,
    block_stream: Array | int,
    fp64: bool,
) -> Array:
    """Draw every row its own way: argmax, flat or hierarchical. Streams may differ by row."""
    kinds = np.where(greedy_N, 0, np.where(flat_N, 1, 2))
    token_N = np.empty(len(x_NV), np.int64)
    for kind in (0, 1, 2):
        rows = np.flatnonzero(kinds == kind)
        for part in chunks(len(rows), x_NV.shape[1]):
            r = rows[part]
            everything = len(r) == len(x_NV)
            x = x_NV if everything else x_NV[r]
            if kind == 0:
                token_N[r] = x.argmax(axis=1)
                continue
            own = at if everything else at.take(r)
            token = token_stream[r] if isinstance(token_stream, np.ndarray) else token_stream
            block = block_stream[r] if isinstance(block_stream, np.ndarray) else block_stream
            with np.errstate(all="ignore"):
                if kind == 1:
                    token_N[r] = draw_flat(x, own, token, fp64)
                else:
                    token_N[r] = draw_hierarchical(x, own, token, block, fp64)
    return token_N


def draw_flat(x_NV: Array, at: Address, token_stream: Array | int, fp64: bool) -> Array:
    """argmax over the survivors of logit + Gumbel noise named by token id; lowest id on ties.

    A row without survivors gives 0: `verify` reports such rows, and never emits it.
    """
    survivor_M = np.flatnonzero(x_NV > -np.inf)
    row_M, id_M = np.divmod(survivor_M, x_NV.shape[1])
    stream = token_stream[row_M] if isinstance(token_stream, np.ndarray) else token_stream
    score_M = to_gumbel(uniform_at(id_M, at.take(row_M), stream, fp64))
    score_M += x_NV.ravel()[survivor_M]
    token_N = np.zeros(len(x_NV), np.int64)
    if len(x_NV) == 1:
        if len(id_M):
            token_N[0] = id_M[score_M.argmax()]
        return token_N
    best_N = np.full(len(x_NV), -np.inf, score_M.dtype)
    np.maximum.at(best_N, row_M, score_M)
    winner = np.flatnonzero(score_M == best_N[row_M])[::-1]
    token_N[row_M[winner]] = id_M[winner]  # the last write, the lowest id, stays
    return token_N


def draw_hierarchical(
    x_NV: Array, at: Address, token_stream: Array | int, block_stream: Array | int, fp64: bool
) -> Array:
    """argmax over blocks of log-mass + Gumbel noise, then the same over the block's tokens.

    The law is exactly softmax(x), since P(block) P(token | block) = P(token); only V/1024 + 1024
    noises are drawn. Block noise is named by block, token noise by token id, in two streams.
    """
    num_rows, vocabulary = x_NV.shape
    if vocabulary <= BLOCK:
        first_N, value = np.zeros(num_rows, np.int64), x_NV
    else:
        mass_NJ = block_masses(x_NV)
        zero_N = np.zeros(num_rows, np.int64)
        score_NJ = to_gumbel(uniform_span(zero_N, mass_NJ.shape[1], at, block_stream, fp64))
        score_NJ += mass_NJ
        first_N = score_NJ.argmax(axis=1) * BLOCK
        value = np.full((num_rows, BLOCK), -np.inf, np.float32)  # ids >= V stay at -inf
        for n, first in enumerate(first_N.tolist()):
            part = x_NV[n, first : first + BLOCK]
            value[n, : len(part)] = part
    score = to_gumbel(uniform_span(first_N, value.shape[1], at, token_stream, fp64))
    score += value
    return np.asarray(first_N + score.argmax(axis=1))


def block_masses(x_NV: Array) -> Array:
    """log sum exp of each block of 1024 ids, float32 [N, J]; -inf for an empty block."""
    num_rows, vocabulary = x_NV.shape
    whole = vocabulary // BLOCK * BLOCK
    masses = [log_sum_exp(x_NV[:, :whole].reshape(num_rows, -1, BLOCK))]
    if whole < vocabulary:
        masses.append(log_sum_exp(x_NV[:, whole:])[:, None])
    return np.concatenate(masses, axis=1) if len(masses) > 1 else masses[0]


def log_sum_exp(x: Array) -> Array:
    """Over the last axis: -inf if all are -inf, NaN or +inf if any is; call under `errstate`."""
    peak = x.max(axis=-1, keepdims=True)
    peak[peak == -np.inf] = 0
    weight = x - peak
    np.exp(weight, out=weight)
    total = weight.sum(axis=-1)
    np.log(total, out=total)
    total += peak[..., 0]
    return np.asarray(total)
