"""Log-probabilities of given tokens and of the likeliest ones.

Shapes: N rows, R of them at a time, V vocabulary, T likeliest tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, from_numpy

from foretoken.ops.backends.torch._reduce import block_sums, dense_lse, dense_weights
from foretoken.ops.backends.torch.noise import Array
from foretoken.ops.backends.torch.process import chunks, process_logits, select
from foretoken.ops.types import Edits, Logprobs, Rows, SlotParams


def logprobs(rows: Rows | Tensor, token_N: Tensor, num_top: int) -> Logprobs:
    """log softmax at `token_N` and at the `num_top` largest; see `Backend.logprobs`.

    Of raw logits, or of processed `Rows`. A dropped token has -inf; it
    ranks behind every survivor.
    """
    logits_NV = rows.logits_NV if isinstance(rows, Rows) else rows
    count, vocabulary = logits_NV.shape
    out = Logprobs(
        torch.empty(count),
        torch.empty(count, dtype=torch.int64),
        torch.empty(count, num_top),
        torch.empty(count, num_top, dtype=torch.int64),
    )
    index_N, token = np.arange(count), token_N.numpy()
    with np.errstate(all="ignore"):
        for part in chunks(count, vocabulary):
            x_RV = select(logits_NV.detach(), index_N[part])
            if isinstance(rows, Rows):
                x_RV = _processed(x_RV, rows.params, rows.slot_N, rows.edits, part)
            one_R = np.ones(len(x_RV), np.float32)
            weight_RW, max_R = dense_weights(x_RV, one_R)
            lse_R = dense_lse(block_sums(weight_RW), max_R, one_R)
            x = x_RV.numpy()
            given_R1 = x[np.arange(len(x)), token[part]][:, None]
            out.logprob_N[part] = from_numpy(given_R1[:, 0] - lse_R)
            out.rank_N[part] = from_numpy((x > given_R1).sum(axis=1) + 1)
            if num_top:
                top_RT = top_ids(x, num_top)
                out.top_token_NT[part] = from_numpy(top_RT)
                value_RT = np.take_along_axis(x, top_RT, axis=1)
                out.top_logprob_NT[part] = from_numpy(value_RT - lse_R[:, None])
    return out


def _processed(
    x_RV: Tensor, params: SlotParams, slot_N: Tensor, edits: Edits | None, part: slice
) -> Tensor:
    """Processed logits of some rows, with their own edits."""
    if edits is not None:
        start_R1 = edits.start_N1[part.start : part.stop + 1]
        entries = slice(int(start_R1[0]), int(start_R1[-1]))
        edits = Edits(
            edits.mask_RW,
            None if edits.mask_N is None else edits.mask_N[part],
            start_R1 - start_R1[0],
            edits.token_M[entries],
            edits.bias_M[entries],
            edits.repetition_M[entries],
            edits.subtract_M[entries],
        )
    return process_logits(Rows(x_RV, params, slot_N[part], edits))


def top_ids(x_RV: Array, num_top: int) -> Array:
    """Ids of the largest values of each row in falling order, the lowest id first on ties, [R, T].

    Ties at the last value are looked for in the whole row: a partition keeps any of them.
    """
    vocabulary = x_RV.shape[1]
    best_RT = np.empty((len(x_RV), num_top), np.int64)
    least_R = np.partition(x_RV, vocabulary - num_top, axis=1)[:, vocabulary - num_top]
    for r, least in enumerate(least_R):
        candidates = np.flatnonzero(x_RV[r] >= least)
        if len(candidates) < num_top:  # a row of NaN: any ids will do
            candidates = np.arange(num_top)
        order = np.argsort(-x_RV[r, candidates], kind="stable")[:num_top]
        best_RT[r] = candidates[order]
    return best_RT
