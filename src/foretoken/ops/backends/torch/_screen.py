"""Which block a row draws, though few blocks' masses are known.

Belongs here: the first half of the hierarchical draw where nothing but the token is wanted. Does
not: sums that need every token (`_reduce`), the token inside the block (`sample`).

A block is cut in 64 groups. Let S be the sum of the groups' largest weights: the block's mass is at
most `GROUP` S. A block whose log(`GROUP` S) + noise lies below what some block reaches has lost,
whatever its mass: of 149 blocks of about one mass some 5 remain, and the exponential of one number
in 10 is taken. Masses decide among these, bit by bit those of the dense pass (`_reduce`): the law,
and which tokens are drawn, do not depend on S.

Shapes: R rows, V > 1024 vocabulary, J blocks of a row, G = 64 groups, C blocks of any rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, from_numpy

from foretoken.ops.backends.torch._reduce import (
    BLOCK,
    block_sums,
    dense_weights,
    exponent_scale,
    scratch,
)
from foretoken.ops.backends.torch.noise import Array

GROUP = 16  # logits of a group, 64 apart
_GROUPS = BLOCK // GROUP
_REACH = np.log(GROUP) + 1e-3  # FP32 rounds by far less than 1e-3
_LIKELY = _REACH - 1.0  # log(mass / S) is 1.3 where logits are normal, deviation 1; no law


def draw_block(x_RV: Tensor, temperature_R: Array, gumbel_RJ: Array) -> tuple[Array, Array]:
    """argmax of log-mass + noise over blocks: (block, the row's largest logit, float32), [R] each.

    Logits of any float type. Weights are relative to the row's largest: a block where they
    underflow lies 87 below it, and noise spans 41 at most, so it cannot win. Any block of a row
    that is not finite.
    """
    group_RJG = _group_maxima(x_RV, gumbel_RJ.shape[1])
    max_R = group_RJG.amax((1, 2)).numpy()
    group_RJG -= from_numpy(max_R)[:, None, None]
    group_RJG *= from_numpy(exponent_scale(temperature_R))[:, None, None]
    bound_RJ = np.log(group_RJG.exp2_().sum(2).numpy()) + (_REACH + gumbel_RJ)
    score_RJ = np.full(bound_RJ.shape, -np.inf)

    def weigh(open_RJ: Array) -> None:
        """Log-mass + noise of some blocks."""
        row_C, block_C = open_RJ.nonzero()
        if not len(row_C):
            return
        value_CB, top_C1 = take(x_RV, row_C, block_C), from_numpy(max_R[row_C, None])
        weight_CB, _ = dense_weights(value_CB, temperature_R[row_C], max_R1=top_C1)
        score_RJ[open_RJ] = np.log(block_sums(weight_CB)[:, 0]) + gumbel_RJ[open_RJ]

    likely_RJ = bound_RJ >= bound_RJ.max(axis=1)[:, None] - _LIKELY
    weigh(likely_RJ)
    weigh((bound_RJ >= score_RJ.max(axis=1)[:, None]) & ~likely_RJ)  # mostly none
    return score_RJ.argmax(axis=1), max_R


def take(x_RV: Tensor, row_C: Array, block_C: Array) -> Tensor:
    """Logits of whole blocks, float32 [C, 1024], -inf from V on; the caller's until the next call.

    Rows and blocks as two indices would take 3 times as long as offsets of one long row do.
    """
    (num_rows, vocabulary), stride = x_RV.shape, x_RV.stride(0)
    offsets = (num_rows - 1) * stride + vocabulary - BLOCK + 1
    at_C = from_numpy(row_C * stride + np.minimum(block_C * BLOCK, vocabulary - BLOCK))
    windows, out = x_RV.as_strided((offsets, BLOCK), (1, 1)), scratch.take(1, len(at_C) * BLOCK)
    out_CB = out.view(-1, BLOCK)
    if x_RV.dtype == torch.float32:
        torch.index_select(windows, 0, at_C, out=out_CB)
    else:
        out_CB.copy_(windows.index_select(0, at_C))
    last, rest, value_CB = block_C * BLOCK > vocabulary - BLOCK, vocabulary % BLOCK, out_CB.numpy()
    if last.any():
        value = value_CB[last, -rest:]
        value_CB[last] = -np.inf
        value_CB[last, :rest] = value
    return out_CB


def _group_maxima(x_RV: Tensor, num_blocks: int) -> Tensor:
    """The largest logit of each group, float32 [R, J, 64].

    The groups of a last block that is not whole are those of the row's last 1024 logits: no bound
    is too low.
    """
    whole = x_RV.shape[1] // BLOCK
    # torch takes maxima of four vectors of 64 bytes side by side; of fewer, one by one.
    lanes = max(_GROUPS, 256 // x_RV.itemsize)
    out = x_RV.new_empty(len(x_RV), num_blocks, lanes)
    blocks = x_RV[:, : whole * BLOCK].view(-1, whole, BLOCK // lanes, lanes)
    torch.amax(blocks, 2, out=out[:, :whole])
    if whole < num_blocks:
        torch.amax(x_RV[:, -BLOCK:].view(-1, BLOCK // lanes, lanes), 1, out=out[:, whole])
    if lanes > _GROUPS:
        out = out.view(len(x_RV), num_blocks, -1, _GROUPS).amax(2)
    return out.float()
