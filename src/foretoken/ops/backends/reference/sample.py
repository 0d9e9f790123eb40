"""Gumbel-max sampling in fp64, one row at a time; the q of drafts, to and from the cache.

argmax_v (logit_v + G_v) with independent standard Gumbel G_v is a draw from softmax(logit) (Gumbel
1954; Maddison et al. 2014). A draw of a block of the vocabulary, then of a token of the block, has
the same distribution, since P(block) P(token | block) = P(token).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.ops.backends.reference.noise import gumbels
from foretoken.ops.backends.reference.process import Row, is_finite, log_sum_exp, process_logits

from foretoken.ops.types import (  # isort: skip
    DRAFT, TARGET, DraftBlock, DraftCache, Noise, Rows, Rule, SlotParams, Stream,
)  # fmt: skip

BLOCK = 1024  # ids per block of the vocabulary

Streams = tuple[Stream, Stream]


class Slot(NamedTuple):
    """One slot's sampling parameters, except top-p and min-p, which `process_logits` applies."""

    key: int
    temperature: float
    top_k: int
    rule: Rule
    fp64_noise: bool

    @classmethod
    def from_params(cls, params: SlotParams, slot: int, fp64_noise: bool) -> Slot:
        return cls(
            int(params.key_S[slot]), float(params.temperature_S[slot]), int(params.top_k_S[slot]),
            Rule(int(params.rule_S[slot])), fp64_noise,
        )  # fmt: skip

    @property
    def is_one_hot(self) -> bool:
        """Whether p and q are one-hot: p at the argmax, or under COUPLED at the target's draw."""
        return self.temperature == 0 or self.rule == Rule.COUPLED


def sample(rows: Rows, noise: Noise) -> Tensor:
    """See `Backend.sample`. Returns int64 [N]."""
    position_N, draft_index_N, streams, fp64_noise = noise
    processed = process_logits(rows).numpy()
    token_N = torch.empty(len(processed), dtype=torch.int64)
    for n, s in enumerate(rows.slot_N.tolist()):
        slot = Slot.from_params(rows.params, s, fp64_noise)
        token_N[n] = draw(processed[n], slot, int(position_N[n]), int(draft_index_N[n]), streams)
    return token_N


def draw(row: Row, slot: Slot, position: int, draft_index: int, streams: Streams) -> int:
    """Draw a token from a processed row: under top-k or COUPLED over all tokens, else by blocks."""
    if slot.temperature == 0:
        return int(np.argmax(row))  # the lowest id on ties
    if is_finite(row):
        row = row - row.max()  # noise added to 1e30 would be rounded away

    def gumbel_argmax(score: Row, first: int, stream: Stream) -> int:
        """The id with the largest score + noise, where score[i] belongs to id first + i. An id with
        score -inf is never drawn, but the result is `first` if all scores are -inf."""
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


class Draft(NamedTuple):
    """A draft x, q(x), and q over the target's V ids (x may be >= V). q(x) is NaN if the drafter's
    logits are not finite, and 0 if x counts as no draft for another reason."""

    x: int
    q_x: float
    q: Row


def draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
    """See `Backend.draft`. Returns int64 [B]. At T=0, where q is never read, the LSE is 0."""
    logits_BV = rows.logits_NV.detach()
    processed = process_logits(rows).numpy()
    token_B = torch.empty(len(processed), dtype=torch.int64)
    for b, s in enumerate(rows.slot_N.tolist()):
        slot = Slot.from_params(rows.params, s, noise.fp64)
        position, i = int(noise.position_N[b]), int(noise.draft_index_N[b])
        # Under COUPLED a draft is drawn with the noise of the target's draw.
        index, streams = (0, TARGET) if slot.rule == Rule.COUPLED else (i, DRAFT)
        token_B[b] = draw(processed[b], slot, position, index, streams)
        if cache is not None:
            raw = logits_BV[b].double().numpy()
            cache.logits_SKV[s, i] = logits_BV[b]
            cache.threshold_SK[s, i] = threshold_of(raw, processed[b])
            cache.lse_SK[s, i] = log_sum_exp(processed[b]) if slot.temperature > 0 else 0.0
    return token_B


def threshold_of(raw: Row, filtered: Row) -> float:
    """The least raw logit that the filters kept, rounded down to float32; -inf if they dropped no
    token or the row is not finite."""
    kept = filtered > -np.inf
    if not is_finite(filtered) or not (raw[~kept] > -np.inf).any():
        return -math.inf
    least = raw[kept].min()
    threshold = np.float32(least)
    return float(threshold if threshold <= least else np.nextafter(threshold, np.float32(-np.inf)))


def draft_of(block: DraftBlock, b: int, i: int, s: int, slot: Slot, vocabulary: int) -> Draft:
    """Draft i of request b, which is in slot number s with the parameters `slot`."""
    x, q = int(block.token_BK[b, i]), np.zeros(vocabulary)
    if x < 0 or (x >= vocabulary and slot.rule == Rule.SYNTHETIC):
        return Draft(x, 0.0, q)  # a rate cannot turn an unknown id into a token of the target
    if block.cache is None or not block.real_q_B[b] or slot.is_one_hot:
        return Draft(x, 1.0, one_hot(x, vocabulary))
    if not math.isfinite(float(block.cache.lse_SK[s, i])):
        return Draft(x, math.nan, q)
    drafter_q = q_of(block.cache, s, i, slot.temperature)  # over the drafter's V' ids
    shared = min(vocabulary, len(drafter_q))
    q[:shared] = drafter_q[:shared]
    return Draft(x, float(drafter_q[x]) if x < len(drafter_q) else 0.0, q)


def one_hot(x: int, vocabulary: int) -> Row:
    """A row with 1 at id x and 0 elsewhere; all 0 if x is not an id of the target."""
    q = np.zeros(vocabulary)
    q[x : x + 1] = 1.0
    return q


def q_of(cache: DraftCache, slot: int, i: int, temperature: float) -> Row:
    """q of a finite cached row, over V' tokens: exp(logit / T - lse) where logit >= threshold."""
    raw = cache.logits_SKV[slot, i].detach().double().numpy()
    threshold, lse = float(cache.threshold_SK[slot, i]), float(cache.lse_SK[slot, i])
    return np.asarray(np.where(raw >= threshold, np.exp(raw / temperature - lse), 0.0))
