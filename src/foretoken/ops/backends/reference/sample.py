"""Gumbel-max sampling in fp64, one row at a time.

argmax_v (logit_v + G_v) with independent standard Gumbel G_v is a draw from softmax(logit)
(Gumbel 1954; Maddison et al. 2014). The same over blocks of the vocabulary, then within the block,
is the same distribution, since P(block) P(token | block) = P(token).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.ops.backends.reference.noise import gumbels
from foretoken.ops.backends.reference.process import Row, is_finite, process_logits
from foretoken.ops.types import Noise, Rows, Rule, SlotParams, Stream

BLOCK = 1024

Streams = tuple[Stream, Stream]


class Slot(NamedTuple):
    """What decides how a slot's rows are drawn, its filters apart."""

    key: int
    temperature: float
    top_k: int
    rule: Rule
    fp64_noise: bool

    @classmethod
    def of(cls, params: SlotParams, slot: int, fp64_noise: bool) -> Slot:
        return cls(
            int(params.key_S[slot]), float(params.temperature_S[slot]), int(params.top_k_S[slot]),
            Rule(int(params.rule_S[slot])), fp64_noise,
        )  # fmt: skip

    @property
    def is_certain(self) -> bool:
        """Whether p and q are one-hot: p is the argmax, or under COUPLED the target's own draw."""
        return self.temperature == 0 or self.rule == Rule.COUPLED


def sample(rows: Rows, noise: Noise) -> Tensor:
    """See `Backend.sample`. Returns int64 [N]."""
    position_N, draft_index_N, streams, fp64_noise = noise
    processed = process_logits(rows).numpy()
    token_N = torch.empty(len(processed), dtype=torch.int64)
    for n, s in enumerate(rows.slot_N.tolist()):
        slot = Slot.of(rows.params, s, fp64_noise)
        token_N[n] = draw(processed[n], slot, int(position_N[n]), int(draft_index_N[n]), streams)
    return token_N


def draw(row: Row, slot: Slot, position: int, draft_index: int, streams: Streams) -> int:
    """One token of one processed row; the slot alone decides which noise it uses."""
    if slot.temperature == 0:
        return int(np.argmax(row))  # the lowest index on ties
    if is_finite(row):
        row = row - row.max()  # beside 1e30 noise would be rounded away

    def gumbel_argmax(score: Row, first: int, stream: Stream) -> int:
        """first + argmax of score + noise, named by first + index; -inf is never drawn."""
        index = first + np.flatnonzero(score > -np.inf)
        if len(index) == 0:
            return first
        noise = gumbels(index, slot.key, position, draft_index, stream, slot.fp64_noise)
        return int(index[np.argmax(score[index - first] + noise)])

    token_stream, block_stream = streams
    if 0 < slot.top_k < len(row) or slot.rule == Rule.COUPLED:
        return gumbel_argmax(row, 0, token_stream)
    masses = [log_sum_exp(row[i : i + BLOCK]) for i in range(0, len(row), BLOCK)]
    first = gumbel_argmax(np.array(masses), 0, block_stream) * BLOCK
    return gumbel_argmax(row[first : first + BLOCK], first, token_stream)


def log_sum_exp(row: Row) -> float:
    """log sum exp; -inf for an empty set, NaN or +inf if the row holds one."""
    largest = float(np.max(row))
    if not math.isfinite(largest):
        return largest
    return largest + math.log(float(np.sum(np.exp(row - largest))))


def softmax(row: Row) -> npt.NDArray[np.float64]:
    """exp of a finite row over its sum."""
    weight = np.exp(row - np.max(row))
    return np.asarray(weight / weight.sum())
