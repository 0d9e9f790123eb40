"""Gumbel-max sampling of raw logits on the CPU: argmax, flat, or hierarchical over blocks.

Belongs here: `sample`, and how a row is drawn, which `draft` and `verify` share. Does not:
what a row is (`process`), its sums (`_reduce`), its noise (`noise`).

Shapes: N rows of the call, M of them drawn, R of these at a time, V vocabulary, J blocks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor, from_numpy

from foretoken.ops import types
from foretoken.ops.backends.torch._reduce import (
    BLOCK,
    Survivors,
    block_sums,
    dense_lse,
    dense_weights,
    sparse_lse,
    sum_by_row,
    survivors,
)
from foretoken.ops.backends.torch._screen import draw_block, take
from foretoken.ops.backends.torch.noise import (
    Address,
    Array,
    address,
    to_gumbel,
    uniform_at,
    uniform_span,
)
from foretoken.ops.backends.torch.process import (
    Rows,
    chunks,
    cut,
    in_place,
    load,
    raw,
    rows_of,
)

WAVE = 64  # rows whose noise is made in one go: 64 x 1024 draws
SCREENED = 1 << 19  # logits from which it pays not to take all their exponentials


class Noise(NamedTuple):
    """Where the noise of M rows lives. One entry per row."""

    at: Address
    token_M: Array
    block_M: Array
    fp64: bool

    def take(self, index: Array | slice) -> Noise:
        return Noise(self.at.take(index), self.token_M[index], self.block_M[index], self.fp64)

    def span(self, count: int, first_M: Array | None = None) -> Array:
        """Token noise of `count` ids from `first_M` (0) on, [M, count]."""
        first_M = np.zeros(len(self.token_M), np.int64) if first_M is None else first_M
        return to_gumbel(uniform_span(first_M, count, self.at, self.token_M, self.fp64))

    def blocks(self, count: int) -> Array:
        """Block noise of the first `count` blocks, [M, count]."""
        first_M = np.zeros(len(self.block_M), np.int64)
        return to_gumbel(uniform_span(first_M, count, self.at, self.block_M, self.fp64))


class Drawn(NamedTuple):
    """What drawing M rows found.

    max_M:       float32, the largest logit; finite iff the row is
    threshold_M: float32, in units of raw logits
    lse_M:       float64, log sum exp of logits / T over what is kept, if asked for; 0 at T=0
    """

    token_M: Array
    max_M: Array
    threshold_M: Array
    lse_M: Array


def sample(given: types.Rows, where: types.Noise) -> Tensor:
    """One token per row of raw logits, as the argmax of processed logits plus Gumbel noise.

    See `Backend.sample`. Rows at T=0 draw no noise. Returns int64 [N].
    """
    logits_NV, params, slot_N, edits = given
    position_N, draft_index_N, streams, fp64_noise = where
    rows = rows_of(logits_NV, params, slot_N.numpy(), edits)
    at = address(rows.key_N, position_N.numpy(), draft_index_N.numpy())
    token_N, block_N = (np.full(len(slot_N), stream, np.uint32) for stream in streams)
    noise = Noise(at, token_N, block_N, fp64_noise)
    return from_numpy(draw(rows, np.arange(len(slot_N)), noise).token_M)


def draw(rows: Rows, index_M: Array, noise: Noise, *, want_lse: bool = False) -> Drawn:
    """Draw rows `index_M`, each its own way, by its parameters alone."""
    count, vocabulary = len(index_M), rows.logits_NV.shape[1]
    out = Drawn(
        np.zeros(count, np.int64),
        np.zeros(count, np.float32),
        np.full(count, -np.inf, np.float32),
        np.zeros(count),
    )
    greedy_M, filtered_M = rows.greedy_N[index_M], rows.filtered_N[index_M]
    flat_M = rows.flat_N[index_M] | (vocabulary <= BLOCK)  # one block: no block to draw
    kinds_M = np.where(greedy_M, 0, np.where(filtered_M, 1, np.where(flat_M, 2, 3)))
    ways = (_draw_greedy, _draw_filtered, _draw_flat, _draw_hierarchical)
    with np.errstate(all="ignore"):
        for kind, way in enumerate(ways):
            mine = np.flatnonzero(kinds_M == kind)
            if len(mine):
                way(rows, index_M, mine, noise, out, want_lse)
    return out


def _draw_greedy(
    rows: Rows, index_M: Array, mine: Array, noise: Noise, out: Drawn, want_lse: bool
) -> None:
    """argmax, the lowest id on ties."""
    for part in chunks(len(mine), rows.logits_NV.shape[1]):
        m = mine[part]
        x_RV = load(rows, index_M[m]).numpy()
        out.token_M[m] = x_RV.argmax(axis=1)  # the first NaN if there is one
        out.max_M[m] = x_RV[np.arange(len(m)), out.token_M[m]]


def _draw_filtered(
    rows: Rows, index_M: Array, mine: Array, noise: Noise, out: Drawn, want_lse: bool
) -> None:
    """Flat or hierarchical noise over the survivors of filters."""
    for part in chunks(len(mine), rows.logits_NV.shape[1]):
        m = mine[part]
        n = index_M[m]
        x_RV, temperature_R = load(rows, n).numpy(), rows.temperature_N[n]
        out.max_M[m] = max_R = x_RV.max(axis=1)
        out.threshold_M[m] = bound_R = cut(rows, n, x_RV, max_R)
        kept = survivors(x_RV, bound_R, temperature_R)
        if want_lse:
            out.lse_M[m] = sparse_lse(kept, max_R, temperature_R)
        score = kept.logit_M - (max_R / temperature_R)[kept.row_M]
        kept = kept._replace(logit_M=score)
        out.token_M[m] = draw_survivors(kept, rows.flat_N[n], x_RV.shape[1], noise.take(m))


def _draw_flat(
    rows: Rows, index_M: Array, mine: Array, noise: Noise, out: Drawn, want_lse: bool
) -> None:
    """Flat noise over the whole vocabulary: one block, or a slot under COUPLED."""
    vocabulary = rows.logits_NV.shape[1]
    for part in chunks(len(mine), vocabulary):
        m = mine[part]
        n = index_M[m]
        x_RV, temperature_R = load(rows, n), rows.temperature_N[n]
        if want_lse:
            weight_RW, max_R = dense_weights(x_RV, temperature_R)
            out.lse_M[m] = dense_lse(block_sums(weight_RW), max_R, temperature_R)
        else:
            max_R = x_RV.amax(dim=1).numpy()
        score_RV = x_RV.numpy() - max_R[:, None]
        score_RV /= temperature_R[:, None]
        score_RV = noise.take(m).span(vocabulary) + score_RV
        out.max_M[m], out.token_M[m] = max_R, score_RV.argmax(axis=1)


def _draw_hierarchical(
    rows: Rows, index_M: Array, mine: Array, noise: Noise, out: Drawn, want_lse: bool
) -> None:
    """argmax over blocks of log-mass + Gumbel noise, then the same over the block's tokens.

    The law is exactly softmax, since P(block) P(token | block) = P(token); only V/1024 + 1024
    noises are drawn. Block noise is named by block, token noise by token id, in two streams.
    """
    vocabulary = rows.logits_NV.shape[1]
    for start in range(0, len(mine), WAVE):
        wave = mine[start : start + WAVE]
        own = noise.take(wave)
        gumbel_MJ = own.blocks(-(-vocabulary // BLOCK))
        block_M = np.zeros(len(wave), np.int64)
        value = np.empty((len(wave), BLOCK), np.float32)
        screens = not want_lse and len(wave) * vocabulary > SCREENED
        screens = screens and in_place(rows, index_M[wave])  # all rows at once, so not of copies
        for part in [slice(0, len(wave))] if screens else chunks(len(wave), vocabulary):
            m = wave[part]
            n = index_M[m]
            x_RV, temperature_R = (raw if screens else load)(rows, n), rows.temperature_N[n]
            if screens:
                block_R, max_R = draw_block(x_RV, temperature_R, gumbel_MJ[part])
            else:
                weight_RW, max_R = dense_weights(x_RV, temperature_R)
                sums_RJ = block_sums(weight_RW)
                block_R = _best_block(sums_RJ, gumbel_MJ[part])
                if want_lse:
                    out.lse_M[m] = dense_lse(sums_RJ, max_R, temperature_R)
            out.max_M[m], block_M[part] = max_R, block_R
            value[part] = take(x_RV, np.arange(len(m)), block_R).numpy() - max_R[:, None]
            value[part] /= temperature_R[:, None]
        first_M = block_M * BLOCK
        out.token_M[wave] = first_M + (own.span(BLOCK, first_M) + value).argmax(axis=1)


def _best_block(sums_RJ: Array, gumbel_RJ: Array) -> Array:
    """The block that each row draws."""
    best: Array = (np.log(sums_RJ) + gumbel_RJ).argmax(axis=1)
    return best


def draw_weights(weight_RW: Tensor, vocabulary: int, noise: Noise) -> Array:
    """One token per row with probability proportional to dense float32 weights, hierarchically."""
    num_rows = len(weight_RW)
    if vocabulary <= BLOCK:
        first_R, value = np.zeros(num_rows, np.int64), weight_RW.numpy()
    else:
        blocks_RJ = weight_RW.view(num_rows, -1, BLOCK).numpy()
        block_R = _best_block(block_sums(weight_RW), noise.blocks(blocks_RJ.shape[1]))
        first_R, value = block_R * BLOCK, blocks_RJ[np.arange(num_rows), block_R]
    token_R: Array = first_R + (noise.span(value.shape[1], first_R) + np.log(value)).argmax(axis=1)
    return token_R


def draw_survivors(kept: Survivors, flat_R: Array, vocabulary: int, noise: Noise) -> Array:
    """One token per row among survivors, whose logits are at most about 0; lowest id on ties.

    A row without survivors gives 0: `verify` reports such rows, and never emits it.
    """
    num_rows = len(flat_R)
    if vocabulary > BLOCK and not flat_R.all():
        num_blocks = -(-vocabulary // BLOCK)
        block_M = kept.id_M // BLOCK
        cell_M = kept.row_M * num_blocks + block_M
        sums = sum_by_row(cell_M, np.exp(kept.logit_M), num_rows * num_blocks)
        block_R = _best_block(sums.reshape(num_rows, -1), noise.blocks(num_blocks))
        kept = kept.take(flat_R[kept.row_M] | (block_M == block_R[kept.row_M]))
    row_M, id_M, token_R = kept.row_M, kept.id_M, np.zeros(num_rows, np.int64)
    if not len(row_M):
        return token_R
    at, stream_M = noise.at.take(row_M), noise.token_M[row_M]
    score_M = to_gumbel(uniform_at(id_M, at, stream_M, noise.fp64)) + kept.logit_M
    best_R = np.full(num_rows, -np.inf)
    np.maximum.at(best_R, row_M, score_M)
    winner = np.flatnonzero(score_M == best_R[row_M])[::-1]
    token_R[row_M[winner]] = id_M[winner]  # the last write, the lowest id, stays
    return token_R
