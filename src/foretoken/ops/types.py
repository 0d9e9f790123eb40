"""Arguments and results of ops: records of tensors.

Records made for every call are `NamedTuple`s (0.3 us; a frozen dataclass takes 1.2).

Shape suffixes: B requests in the batch, K most drafts of a request, N rows (= sum of K_b + 1),
V vocabulary, S request slots, T packed tokens, M entries of edits, R masks, W mask words, H heads,
L block-table columns. A *row* is one position at which the target's next-token distribution is
needed; a *slot* is a request's permanent index into per-request state, whatever its batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Stream(IntEnum):
    """Named noise streams: the fourth word of the Philox counter."""

    TARGET_TOKEN = 0
    TARGET_BLOCK = 1
    RESIDUAL_TOKEN = 2
    RESIDUAL_BLOCK = 3
    DRAFT_TOKEN = 4
    DRAFT_BLOCK = 5
    ACCEPT = 6


# Pairs of (token stream, block stream) with which a row may be drawn.
TARGET = (Stream.TARGET_TOKEN, Stream.TARGET_BLOCK)
RESIDUAL = (Stream.RESIDUAL_TOKEN, Stream.RESIDUAL_BLOCK)
DRAFT = (Stream.DRAFT_TOKEN, Stream.DRAFT_BLOCK)


class Rule(IntEnum):
    """Verification rules by their number in `SlotParams.rule_S`; see `ops/rules.py`."""

    STANDARD = 0
    BLOCK = 1
    COUPLED = 2
    SYNTHETIC = 3


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SlotParams:
    """Sampling parameters by slot.

    The tensors' values may change, their shapes, dtypes and device may not: ops check these once.

    key_S: int64, the 64-bit noise key of the sample (bits, two's complement)
    temperature_S: float32, 0 or >= 1e-5; 0 means argmax, lowest index on ties
    top_k_S: int64; active iff 0 < k < V
    top_p_S: float32 in (0, 1]; 1 is off
    min_p_S: float32 in [0, 1]; 0 is off
    rule_S: int64, a `Rule`; slots under COUPLED always draw flat (`Backend.sample`)
    has_filters: False promises that top-k, top-p and min-p are off in every slot in use, so that a
        backend need not read them from the device; True promises nothing
    rules: promises that slots in use have no rule except these
    values_fit: True promises that values of slots in use are in range: ops do not check them then
    """

    key_S: Tensor
    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    rule_S: Tensor
    has_filters: bool = True
    rules: frozenset[Rule] = frozenset(Rule)
    values_fit: bool = False

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self.key_S, self.temperature_S, self.top_k_S, self.top_p_S, self.min_p_S, self.rule_S


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes to raw logits, before temperature: first masks, then entries, one per (row, token).

    An entry turns a logit x into x + bias; then x / repetition if x > 0, else x * repetition; then
    x - subtract. A ban is a bias of -inf, which stays -inf whatever follows. For example, the
    `subtract` of a seen token is frequency * count + presence * (count > 0).

    mask_RW: int32, W = ceil(V / 32) words of masks, or None; token v is allowed iff bit v % 32 of
        word v // 32 is 1
    mask_N: int64, the mask of each row, -1 for none; None iff `mask_RW` is
    start_N1: int64 [N + 1], first entry of each row; start_N1[N] = M
    token_M: int64, rising within a row; ids >= V are not allowed
    bias_M: float32, -inf or up to 3.4e38; 0 changes nothing
    repetition_M: float32 in [1e-30, 3.4e38]; 1 changes nothing
    subtract_M: float32 in [-3e38, 3.4e38]; 0 changes nothing
    """

    mask_RW: Tensor | None
    mask_N: Tensor | None
    start_N1: Tensor
    token_M: Tensor
    bias_M: Tensor
    repetition_M: Tensor
    subtract_M: Tensor


class Rows(NamedTuple):
    """Rows of raw logits, and how an op processes them (`Backend.process_logits`).

    logits_NV: any float dtype, unit stride along V; rows may lie apart
    params: the parameters of all slots
    slot_N: int64, the slot of each row
    edits: the edits of these N rows; None changes nothing
    """

    logits_NV: Tensor
    params: SlotParams
    slot_N: Tensor
    edits: Edits | None = None


class Noise(NamedTuple):
    """The noise with which each of N rows is drawn, with the key of the row's slot.

    position_N: int64, sequence position of the token that is drawn
    draft_index_N: int64, 0 for target and residual streams
    streams: `TARGET`, `RESIDUAL` or `DRAFT`
    fp64: whether a uniform has 53 random bits instead of 24
    """

    position_N: Tensor
    draft_index_N: Tensor
    streams: tuple[Stream, Stream]
    fp64: bool = False


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DraftCache:
    """The numbers from which the q of a draft is recomputed, by slot and draft index.

    The three tensors are contiguous, and have at least one row per slot of the parameters. Their
    shapes, dtypes and device do not change: ops check these once.
    q is softmax of logits / temperature over the tokens with a raw logit >= threshold. An entry is
    written by `Backend.draft`, or by `draft_cache` for drafts made elsewhere. It is valid until the
    slot's next draft at that index; until then the slot's temperature must not change.

    logits_SKV: raw draft logits, any float dtype; V' may differ from the target's V
    threshold_SK: float32, in units of raw logits; -inf where nothing is dropped
    lse_SK: float64, log sum exp of logits / temperature over the kept tokens; not finite if the row
        is not (NaN, +inf or all -inf): then q counts as 0 everywhere

    At T=0 q is never read: the threshold is -inf and lse 0.
    """

    logits_SKV: Tensor
    threshold_SK: Tensor
    lse_SK: Tensor

    @classmethod
    def empty(
        cls, slots: int, drafts: int, vocabulary: int, dtype: torch.dtype, device: torch.device
    ) -> DraftCache:
        """Uninitialised memory for `drafts` drafts of every slot."""
        shape = (slots, drafts)
        return cls(
            torch.empty(*shape, vocabulary, dtype=dtype, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float64, device=device),
        )


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The drafts of a batch of B requests, and the q from which they were drawn.

    token_BK: int32 or int64 token ids; -1 is a placeholder, and padding from num_B[b] on. Ids that
        the target lacks (>= V) have p = 0.
    num_B: int64, K_b drafts of each request, 0 allowed
    cache: has the q of this batch's slots; None if no request has a real q
    real_q_B: bool; False means one-hot q (greedy drafts, n-grams, drafts of which q was not kept).
        At T=0 and under COUPLED q is not read.
    source_B: int64, the number of the drafter that made each request's drafts; None: the drafters
        that the requests name
    expected_B: float64, for drafts by lookup: how many accepted drafts to expect by the frequencies
        in earlier text; None: unknown
    faults: by slot, an error in drafting for only this slot's request, which has no drafts
    """

    token_BK: Tensor
    num_B: Tensor
    cache: DraftCache | None
    real_q_B: Tensor
    source_B: Tensor | None = None
    expected_B: Tensor | None = None
    faults: dict[int, Exception] = field(default_factory=dict)


class VerifyBatch(NamedTuple):
    """The input of a verification of B requests.

    logits_NV: raw target logits as in `Rows`, K_b + 1 rows per request, requests in batch order
    params: the parameters of all slots
    slot_B: int64, the slot of each request
    position_B: int64, sequence position of the token that a request's first row decides
    edits: the edits of the N rows; those of a row assume that the request's drafts before this row
        were accepted
    synthetic_rate_K: float64 in [0, 1], the probability that draft i is accepted once all earlier
        drafts are; at least one rate per column of `token_BK`. Needed iff a slot of the batch has
        `Rule.SYNTHETIC`
    fp64_noise: as `Noise.fp64`
    values_fit: True promises all of the above, so that ops need not check
    """

    logits_NV: Tensor
    params: SlotParams
    slot_B: Tensor
    position_B: Tensor
    drafts: DraftBlock
    edits: Edits | None = None
    synthetic_rate_K: Tensor | None = None
    fp64_noise: bool = False
    values_fit: bool = False


class Logprobs(NamedTuple):
    """Log-probabilities in N rows: of one given token per row, and of the T likeliest tokens.

    logprob_N: float32, of the given token
    rank_N: int64, 1 + the number of likelier tokens; equal logits have equal ranks
    top_logprob_NT: float32, of the likeliest tokens, falling
    top_token_NT: int64, ids of the likeliest tokens; the lowest first where logits are equal
    """

    logprob_N: Tensor
    rank_N: Tensor
    top_logprob_NT: Tensor
    top_token_NT: Tensor

    @classmethod
    def empty(cls, rows: int, top: int, device: torch.device) -> Logprobs:
        """Uninitialised memory for `rows` rows with `top` likeliest tokens."""
        shapes = ((rows,), (rows,), (rows, top), (rows, top))
        dtypes = (torch.float32, torch.int64, torch.float32, torch.int64)
        pairs = zip(shapes, dtypes, strict=True)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in pairs))


class Verdict(NamedTuple):
    """The outcome of verification.

    token_BK1: accepted drafts, then the resampled or bonus token, or -1 where `finite_B` is False,
        then -1; dtype of the drafts
    n_accept_B: int64 in 0..K_b, number of accepted drafts
    finite_B: bool; False if there is no token after the accepted drafts, because one of the
        deciding target rows (0..n_accept) was not finite after its edits, or because the request's
        rule is unknown or cannot be applied
    """

    token_BK1: Tensor
    n_accept_B: Tensor
    finite_B: Tensor


class Evidence(NamedTuple):
    """The numbers that decided R requests of a verdict; see `Backend.evidence`.

    Values after a request's last draft may be anything, except in column K of p and q.

    token_RK: int64, the drafts x_i
    p_RK1: float64, p(x_i); column K: p of the token that follows the accepted drafts
    q_RK1: float64, q(x_i): 1 if q is one-hot; NaN if the draft row is not finite; 0 if x_i counts
        as no draft for another reason. Column K: q of the token that follows the accepted drafts,
        in the row of the draft that it replaces; 0 if it replaces no draft
    u_RK: float64, the acceptance uniforms
    mass_RK: float64, under BLOCK S_i, the residual mass after the prefix that ends with draft i, if
        a draft follows draft i; NaN elsewhere
    real_q_R: bool, whether q is not one-hot
    """

    token_RK: Tensor
    p_RK1: Tensor
    q_RK1: Tensor
    u_RK: Tensor
    mass_RK: Tensor
    real_q_R: Tensor


@dataclass(slots=True, eq=False, weakref_slot=True)
class AttentionBatch:
    """Ragged queries of B requests over paged keys and values, for all layers of a pass.

    The T new tokens lie packed, request by request. Token t of request b is at position
    length_B[b] - (query_start_B1[b + 1] - t); the key and value of position i are in block
    block_BL[b, i // block_size], at offset i % block_size.

    query_start_B1: int64 [B + 1], the first token of each request, rising from 0 to T; every
        request has at least one token
    length_B: int64 [B], tokens in the cache after this pass, the new ones included
    block_BL: int64 [B, L] block ids, contiguous; after a request's last block any valid id, 0 by
        convention. With `values_fit` it may be anything, as it is not read
    block_size: tokens per block
    most_queries: upper bound of a request's new tokens, known to the host; 0 stands for T
    values_fit: True promises all of the above, so that ops need not check

    On a device T may exceed query_start_B1[B]. Tokens from that index on are padding: their results
    are not read.
    """

    query_start_B1: Tensor
    length_B: Tensor
    block_BL: Tensor
    block_size: int
    most_queries: int = 0
    values_fit: bool = False


class AttentionOptions(NamedTuple):
    """How a layer attends.

    scale: scores are multiplied by it
    sliding_window: w keeps keys j with i - w < j <= i
    softcap: c replaces scores s by c * tanh(s / c)
    sinks_H: float, one extra logit per head in the softmax, without a value
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
