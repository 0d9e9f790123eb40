"""Gumbel-max sampling of raw logits: by argmax at T=0, flat (over all tokens), or hierarchically
(a block of tokens, then a token of the block); `Backend.sample` says which.

Shapes: N rows of the call, M rows or groups that are drawn from, R rows processed at a time, W the
vocabulary padded to whole blocks, B requests, J blocks of a row, I ids of a block, G groups of
noise, P draws of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.ops.backends.torch.noise import RowNoise
from foretoken.ops.backends.torch.process import BLOCK, chunks, distribution, draws_flat, edit_rows
from foretoken.ops.types import DraftCache, Noise, Rows, Rule, Stream


class Drawn(NamedTuple):
    """The draws of M rows.

    finite_M:    whether the row is finite
    threshold_M: float32; tokens with raw logits >= threshold are kept
    lse_M:       float64, log sum exp of logits / T over kept tokens; 0 at T=0
    """

    token_M: Tensor
    finite_M: Tensor
    threshold_M: Tensor
    lse_M: Tensor


def sample(rows: Rows, noise: Noise) -> Tensor:
    """See `Backend.sample`. Returns int64 [N]."""
    index_N = torch.arange(len(rows.slot_N), device=rows.slot_N.device)
    token_N, block_N = (torch.full_like(index_N, stream) for stream in noise.streams)
    key_N = rows.params.key_S[rows.slot_N]
    row_noise = RowNoise(key_N, noise.position_N, noise.draft_index_N, token_N, block_N, noise.fp64)
    return draw_rows(rows, index_N, row_noise).token_M


def draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
    """See `Backend.draft`. Returns int64 [B]."""
    slot_B, index_B = rows.slot_N, noise.draft_index_N
    coupled_B = rows.params.rule_S[slot_B] == Rule.COUPLED
    row_noise = RowNoise(
        rows.params.key_S[slot_B], noise.position_N, index_B.masked_fill(coupled_B, 0),
        torch.where(coupled_B, Stream.TARGET_TOKEN, Stream.DRAFT_TOKEN),
        torch.where(coupled_B, Stream.TARGET_BLOCK, Stream.DRAFT_BLOCK), noise.fp64,
    )  # fmt: skip
    drawn = draw_rows(rows, torch.arange(len(slot_B), device=slot_B.device), row_noise)
    if cache is not None:
        cache.logits_SKV[slot_B, index_B] = rows.logits_NV.detach()
        cache.threshold_SK[slot_B, index_B] = drawn.threshold_M
        cache.lse_SK[slot_B, index_B] = drawn.lse_M
    return drawn.token_M


def draw_rows(rows: Rows, index_M: Tensor, noise: RowNoise) -> Drawn:
    """Draw a token in each row `index_M`; `noise` is that of these M rows."""
    out = Drawn(
        torch.empty_like(index_M), torch.empty_like(index_M, dtype=torch.bool),
        torch.full_like(index_M, -torch.inf, dtype=torch.float32),
        torch.zeros_like(index_M, dtype=torch.float64),
    )  # fmt: skip
    for part in chunks(len(index_M), rows.logits_NV.shape[1]):
        n = index_M[part]
        greedy = (rows.params.temperature_S[rows.slot_N[n]] == 0).nonzero()[:, 0]
        if len(greedy) < len(n):
            p = distribution(rows, n)
            out.token_M[part] = draw(p.weight_RW, draws_flat(rows, n), noise.take(part))
            out.finite_M[part], out.threshold_M[part] = p.max_R.isfinite(), p.threshold_R
            out.lse_M[part] = p.lse_R
        if len(greedy):
            max_R, token_R = edit_rows(rows, n[greedy]).max(dim=1)  # the lowest id on ties
            m = greedy + part.start
            out.token_M[m], out.finite_M[m], out.lse_M[m] = token_R, max_R.isfinite(), 0.0
    return out


def draw(weight_RW: Tensor, flat_R: Tensor, noise: RowNoise) -> Tensor:
    """One token per row with probability proportional to its weight, the lowest id on ties.

    Weights are float64, the largest near 1; a token with a weight that underflows to 0 could not
    win with any noise. A row that is not finite gives some id in [0, V). `flat_R`: whether to draw
    flat.
    """
    if weight_RW.shape[1] <= BLOCK:  # a single block needs no draw of a block
        gumbel_RW = noise.tokens(torch.zeros_like(noise.key_N), weight_RW.shape[1])
        return (weight_RW.log() + gumbel_RW).argmax(dim=1)
    flat = flat_R.nonzero()[:, 0]
    if len(flat) == len(flat_R):
        return _draw_flat(weight_RW, noise)
    token_R = _draw_hierarchical(weight_RW, noise)
    if len(flat):
        token_R[flat] = _draw_flat(weight_RW[flat], noise.take(flat))
    return token_R


def _draw_hierarchical(weight_RW: Tensor, noise: RowNoise) -> Tensor:
    """Draw a block by the argmax of log-mass + Gumbel noise, then a token of the block likewise:
    P(block) P(token | block) = P(token), with noise for only V/1024 blocks and 1024 tokens."""
    weight_RJI = weight_RW.view(len(weight_RW), -1, BLOCK)
    mass_RJ = weight_RJI.sum(dim=2)
    block_R = (mass_RJ.log() + noise.blocks(mass_RJ.shape[1])).argmax(dim=1)
    weight_RI = weight_RJI[torch.arange(len(block_R), device=block_R.device), block_R]
    first_R = block_R * BLOCK
    return first_R + (weight_RI.log() + noise.tokens(first_R, BLOCK)).argmax(dim=1)


def _draw_flat(weight_RW: Tensor, noise: RowNoise) -> Tensor:
    """The id with the largest log-weight + Gumbel noise, the lowest on ties; noise is computed only
    for groups that contain a weight above 0."""
    weight_RGP = weight_RW.view(len(weight_RW), -1, noise.per_group)
    row_M, group_M = (weight_RGP > 0).any(dim=2).nonzero(as_tuple=True)
    first_M = group_M * noise.per_group
    gumbel_MP = noise.take(row_M).tokens(first_M, noise.per_group)
    best_M, place_M = (weight_RGP[row_M, group_M].log() + gumbel_MP).max(dim=1)
    best_R = torch.full_like(weight_RW[:, 0], -torch.inf)
    best_R.scatter_reduce_(0, row_M, best_M, "amax")
    m = (best_M == best_R[row_M]).nonzero()[:, 0]  # the best group of each row; on ties several
    token_R, id_M = torch.zeros_like(noise.key_N), first_M[m] + place_M[m]
    return token_R.scatter_reduce_(0, row_M[m], id_M, "amin", include_self=False)
