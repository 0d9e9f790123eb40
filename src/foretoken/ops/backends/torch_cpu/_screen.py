"""Which block a row draws, though few blocks' masses are known.

Belongs here: the first half of the hierarchical draw where nothing but the token is wanted. Does
not: sums that need every token (`_reduce`), the token inside the block (`sample`).

A block is cut in 64 groups. Let S be the sum of the groups' largest weights: the block's mass lies
between S and `GROUP` S. Of the blocks' log S + noise, those more than log `GROUP` below the best
have lost, whatever their masses: of 149 blocks of about one mass some 5 remain, and the exponential
of one number in 10 is taken. Masses decide among these, bit by bit those of the dense pass
(`_reduce`): the law, and which tokens are drawn, do not depend on S.

Shapes: R rows, V > 1024 vocabulary, J blocks of a row, C blocks of any rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, from_numpy
from torch.nn.functional import pad

from foretoken.ops.backends.torch_cpu._reduce import (
    BLOCK,
    block_sums,
    dense_weights,
    exponent_scale,
)
from foretoken.ops.backends.torch_cpu.noise import Array

GROUP = 16  # logits of a group, 64 apart: the maxima of 64 groups are taken side by side
_GROUPS = BLOCK // GROUP
_REACH = np.log(GROUP) + 1e-3  # FP32 rounds by far less than 1e-3


def draw_block(x_RV: Tensor, temperature_R: Array, gumbel_RJ: Array) -> tuple[Array, Array]:
    """argmax of log-mass + noise over blocks: (block, the row's largest logit), [R] each.

    Weights are relative to the row's largest: a block where they underflow lies 87 below it, and
    noise spans 41 at most, so it cannot win. Any block of a row that is not finite.
    """
    group_RJG = _group_maxima(x_RV, gumbel_RJ.shape[1])
    max_R = group_RJG.amax((1, 2)).numpy()
    group_RJG -= from_numpy(max_R)[:, None, None]
    group_RJG *= from_numpy(exponent_scale(temperature_R))[:, None, None]
    score_RJ = np.log(group_RJG.exp2_().sum(2).numpy()).astype(np.float64) + gumbel_RJ

    def weigh(row_C: Array, block_C: Array) -> None:
        """Put log-mass + noise in the place of its bound."""
        if not len(row_C):
            return
        value_CB, top_C1 = from_numpy(take(x_RV, row_C, block_C)), from_numpy(max_R[row_C, None])
        weight_CB, _ = dense_weights(value_CB, temperature_R[row_C], max_R1=top_C1)
        score_RJ[row_C, block_C] = np.log(block_sums(weight_CB)[:, 0]) + gumbel_RJ[row_C, block_C]

    likely_R = score_RJ.argmax(axis=1)
    weigh(np.arange(len(x_RV)), likely_R)  # rules out most of the others
    open_RJ = score_RJ + _REACH >= score_RJ.max(axis=1)[:, None]
    open_RJ[np.arange(len(x_RV)), likely_R] = False
    weigh(*open_RJ.nonzero())
    return score_RJ.argmax(axis=1), max_R


def take(x_RV: Tensor, row_C: Array, block_C: Array) -> Array:
    """Logits of whole blocks, float32 [C, 1024]; -inf from V on."""
    x, whole = x_RV.numpy(), x_RV.shape[1] // BLOCK
    blocks = x[:, : whole * BLOCK].reshape(len(x), whole, BLOCK)
    out: Array = blocks[row_C, np.minimum(block_C, whole - 1)]
    rest = np.flatnonzero(block_C == whole)
    if len(rest):
        out[rest] = -np.inf
        out[rest, : x.shape[1] % BLOCK] = x[row_C[rest], whole * BLOCK :]
    return out


def _group_maxima(x_RV: Tensor, num_blocks: int) -> Tensor:
    """The largest logit of each group, float32 [R, J, 64]."""
    whole, rest = divmod(x_RV.shape[1], BLOCK)
    out = x_RV.new_empty(len(x_RV), num_blocks, _GROUPS)
    whole_RV = x_RV[:, : whole * BLOCK]
    torch.amax(whole_RV.view(-1, whole, GROUP, _GROUPS), 2, out=out[:, :whole])
    if rest:
        last = pad(x_RV[:, whole * BLOCK :], (0, BLOCK - rest), value=-torch.inf)
        torch.amax(last.view(-1, GROUP, _GROUPS), 1, out=out[:, whole])
    return out
