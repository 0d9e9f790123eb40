"""Gumbel-max sampling in fp64, one row at a time.

argmax_v (logit_v + G_v) with independent standard Gumbel G_v is a draw from softmax(logit)
(Gumbel 1954; Maddison et al. 2014). The same over blocks of the vocabulary, then within the block,
is the same law, since P(block) P(token | block) = P(token).

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.ops.backends.reference.noise import gumbel_of
from foretoken.ops.backends.reference.process import Row
from foretoken.ops.checks import INT64, check_rows, check_tensor
from foretoken.ops.types import SlotParams, Stream

BLOCK = 1024


class Place(NamedTuple):
    """Names one row's noise, but for the index of the draw and the stream."""

    key: int
    position: int
    draft_index: int
    fp64: bool

    def gumbel(self, index: int, stream: int) -> float:
        return gumbel_of(index, self.key, self.position, self.draft_index, stream, self.fp64)


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
    """See `Backend.sample`. Returns int64 [N]."""
    check_rows(logits_NV, slot_N, params)
    check_tensor("position_N", position_N, slot_N.shape, INT64)
    check_tensor("draft_index_N", draft_index_N, slot_N.shape, INT64)
    token_N = torch.empty(len(slot_N), dtype=torch.int64)
    for n, slot in enumerate(slot_N.tolist()):
        row = logits_NV[n].detach().double().numpy()
        place = Place(
            int(params.key_S[slot]), int(position_N[n]), int(draft_index_N[n]), fp64_noise
        )
        token_N[n] = draw(
            row, float(params.temperature_S[slot]), int(params.top_k_S[slot]), place, streams
        )
    return token_N


def draw(
    row: Row, temperature: float, top_k: int, place: Place, streams: tuple[Stream, Stream]
) -> int:
    """One token of one row; its parameters alone decide which noise it uses."""
    token_stream, block_stream = streams
    if temperature == 0:
        return int(np.argmax(row))  # the lowest index on ties
    if 0 < top_k < len(row):
        return _gumbel_argmax(row, 0, len(row), place, token_stream)
    masses = [log_sum_exp(row[i : i + BLOCK]) for i in range(0, len(row), BLOCK)]
    block = _gumbel_argmax(np.array(masses), 0, len(masses), place, block_stream)
    first = block * BLOCK
    return _gumbel_argmax(row, first, min(first + BLOCK, len(row)), place, token_stream)


def _gumbel_argmax(row: Row, start: int, stop: int, place: Place, stream: Stream) -> int:
    """argmax of logit + noise over the indices [start, stop); the lowest index on ties."""
    best, best_score = start, -math.inf
    for v in range(start, stop):
        if row[v] > -math.inf:
            score = float(row[v]) + place.gumbel(v, stream)
            if score > best_score:
                best, best_score = v, score
    return best


def log_sum_exp(row: Row) -> float:
    """log sum exp; -inf for an empty set."""
    largest = float(np.max(row))
    if largest == -math.inf:
        return -math.inf
    return largest + math.log(float(np.sum(np.exp(row - largest))))
