"""Data that crosses the boundary of `ops`. Plain tensors in named fields, no behaviour.

Shape suffixes: B requests in the batch, K most drafts of a request, N rows (= sum of K_b + 1),
V vocabulary, S request slots, T packed tokens, M sparse entries, Q queries of one request,
L block-table columns. A *row* is one position of the target whose next-token distribution is
needed; a *slot* is a request's permanent index into per-request state, not its batch order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Stream(IntEnum):
    """Named noise streams: the fourth word of the Philox counter (design: noise by name)."""

    TARGET_TOKEN = 0
    TARGET_BLOCK = 1
    RESIDUAL_TOKEN = 2
    RESIDUAL_BLOCK = 3
    DRAFT_TOKEN = 4
    DRAFT_BLOCK = 5
    ACCEPT = 6


@dataclass(frozen=True, slots=True)
class SlotParams:
    """Sampling state of every request slot; rows gather from it by slot index.

    key_S:         int64, the 64-bit noise key of the sample (bits, two's complement)
    temperature_S: float32 >= 0; 0 means argmax, lowest index on ties
    top_k_S:       int64; active iff 0 < k < V
    top_p_S:       float32 in (0, 1]; 1 is off
    min_p_S:       float32 in [0, 1]; 0 is off
    """

    key_S: Tensor
    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor


@dataclass(frozen=True, slots=True)
class Edits:
    """Sparse changes to raw logits, applied in field order, before temperature.

    Each `*_row` is an int64 index into the N rows, each `*_token` a token id. A row absent from
    every field is left alone. Duplicate (row, token) pairs occur only in `ban_*`.

    bias_*:     value added to one logit
    allow_*:    for every row named in `allow_row`, tokens not listed with it become -inf
    ban_early_*: -inf (`min_tokens` holding back end-of-text and stop ids)
    penalty_*:  per (row, token seen): `penalty_count` = times in the output (drafts of this block
                before the row included), 0 if only in the prompt; repetition divides a positive
                logit and multiplies a negative one, then frequency * count + presence * (count>0)
                is subtracted
    ban_late_*: -inf (`bad_words`)
    """

    bias_row_M: Tensor
    bias_token_M: Tensor
    bias_value_M: Tensor
    allow_row_M: Tensor
    allow_token_M: Tensor
    ban_early_row_M: Tensor
    ban_early_token_M: Tensor
    penalty_row_M: Tensor
    penalty_token_M: Tensor
    penalty_count_M: Tensor
    penalty_repetition_M: Tensor
    penalty_frequency_M: Tensor
    penalty_presence_M: Tensor
    ban_late_row_M: Tensor
    ban_late_token_M: Tensor


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """What was drafted for a batch of B requests, and the q it was sampled from.

    token_BK:   int32 or int64 token ids; -1 is a placeholder, and padding from num_B[b] on
    num_B:      int64, K_b drafts of each request, 0 allowed
    logits_SKV: processed draft logits by request *slot* and draft index: temperature applied,
                filtered tokens at -inf, exactly what was sampled from; None if no row has a real q
    real_q_B:   bool; False means one-hot q (greedy drafts, n-grams, a request whose q is missing)
    """

    token_BK: Tensor
    num_B: Tensor
    logits_SKV: Tensor | None
    real_q_B: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verification.

    token_BK1:  accepted drafts, then the resampled or bonus token, then -1; dtype of the drafts
    n_accept_B: int64 in 0..K_b; a request emits n_accept + 1 tokens
    finite_B:   bool; False if a target row that decided this request (rows 0..n_accept) was not
                finite: its tokens must not be used
    """

    token_BK1: Tensor
    n_accept_B: Tensor
    finite_B: Tensor


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Requests of one batch that have the same number of new tokens Q, attended in one call.

    token_index: positions of their b*Q new tokens in the packed axis T, request by request:
                 a slice where they are adjacent, else an int64 tensor [b*Q]
    num_requests: b
    num_queries: Q
    block_bL:    int64 [b, L] block ids, padded with block 0
    length_b:    int64 [b] tokens in the cache after this pass, the new ones included
    position_bQ: int64 [b, Q] absolute positions of the new tokens
    """

    token_index: Tensor | slice
    num_requests: int
    num_queries: int
    block_bL: Tensor
    length_b: Tensor
    position_bQ: Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Ragged queries over paged K/V.

    slot_T:     int64 [T] flat cache index (block * block_size + offset) where a token is written
    block_size: tokens per block
    groups:     a partition of the packed tokens
    """

    slot_T: Tensor
    block_size: int
    groups: tuple[AttentionGroup, ...]
