"""Verification in three stages: reductions per row -> a rule -> one draw per request; its evidence.

q(x) is one number of the cache. p(x) takes a pass over the row of every draft with a q, the token
after the accepted drafts a pass over one row, and the block rule a second pass over p and q of each
draft except the first.

Shapes: B requests, K columns of drafts, N rows, V vocabulary, W the vocabulary padded to whole
blocks, M drafts or rows as a flat list, R drafts, rows or requests processed at a time, J rows of a
request, E entries of edits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.ops.backends.torch.noise import RowNoise, first_uniform
from foretoken.ops.backends.torch.process import chunks, distribution, draws_flat, temperatures
from foretoken.ops.backends.torch.sample import draw, draw_rows
from foretoken.ops.rules import RuleInputs, accept, block_weights, rules_of, weights

from foretoken.ops.types import (  # isort: skip
    RESIDUAL, TARGET, DraftCache, Edits, Evidence, Logprobs, Rows, Rule, SlotParams, Stream,
    Verdict, VerifyBatch,
)  # fmt: skip

_ProcessLogits = Callable[[Rows], Tensor]
_Logprobs = Callable[[Rows, Tensor, int], Logprobs]

_MAX_LOGITS = 1 << 22  # that `evidence` processes at a time


class Batch(NamedTuple):
    """The data that the stages share.

    rows:        the N target rows, each with the parameters of its request's slot
    first_row_B: index of the row that decides the request's first token
    one_hot_p_B: whether p is one-hot at the target's own draw: at T = 0 and under COUPLED
    real_q_B:    whether the request's q is read from the cache: never if p is one-hot
    finite_BK1:  written by the stages: False where a target row was read and is not finite
    """

    inputs: VerifyBatch
    rows: Rows
    first_row_B: Tensor
    rule_B: Tensor
    one_hot_p_B: Tensor
    token_BK: Tensor
    real_q_B: Tensor
    finite_BK1: Tensor
    vocabulary: int


def verify(inputs: VerifyBatch) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`."""
    params, slot_B, drafts = inputs.params, inputs.slot_B, inputs.drafts
    columns, num_rows_B, rule_B = drafts.token_BK.shape[1], drafts.num_B + 1, params.rule_S[slot_B]
    rules_of(rule_B.tolist())  # raises an error for an unknown rule
    slot_N = slot_B.repeat_interleave(num_rows_B, output_size=len(inputs.logits_NV))
    one_hot_p_B = (params.temperature_S[slot_B] == 0) | (rule_B == Rule.COUPLED)
    batch = Batch(
        inputs, rows=Rows(inputs.logits_NV, params, slot_N, inputs.edits),
        first_row_B=num_rows_B.cumsum(0) - num_rows_B, rule_B=rule_B, one_hot_p_B=one_hot_p_B,
        token_BK=drafts.token_BK.long(), real_q_B=drafts.real_q_B & ~one_hot_p_B,
        finite_BK1=slot_B.new_ones(len(slot_B), columns + 1, dtype=torch.bool),
        vocabulary=inputs.logits_NV.shape[1],
    )  # fmt: skip
    n_accept_B, rejected_B, log_w_B = _decide(batch)
    last_B1 = _draw_last(batch, n_accept_B, rejected_B, log_w_B)[:, None]
    n_accept_B1 = n_accept_B[:, None]
    after_BK1 = torch.arange(columns + 1, device=slot_B.device) > n_accept_B1
    # Rows 0..n_accept must be finite; only SYNTHETIC accepts drafts whatever their rows hold.
    finite_B = (batch.finite_BK1 | after_BK1).all(dim=1)
    last_B1.masked_fill_(~finite_B[:, None], -1)
    token_BK1 = pad(batch.token_BK, (0, 1)).masked_fill_(after_BK1, -1)
    token_BK1 = token_BK1.scatter_(1, n_accept_B1, last_B1).to(drafts.token_BK.dtype)
    return Verdict(token_BK1, n_accept_B, finite_B)


def _decide(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Stages (i) and (ii), reductions and rule: n_accept_B; rejected_B, whether the last token
    replaces a draft that has a q, and is drawn from the residual; log_w_B, log of the residual's w.
    """
    zero_B, rules = torch.zeros_like(batch.first_row_B), batch.inputs.params.rules
    if batch.token_BK.shape[1] == 0:  # plain decoding
        return zero_B, zero_B > 0, zero_B.double()
    log_q_BK = _log_q(batch)
    has_q_BK, log_p_BK = log_q_BK > -torch.inf, torch.full_like(log_q_BK, -torch.inf)
    b_M, i_M = (has_q_BK & batch.one_hot_p_B[:, None]).nonzero(as_tuple=True)
    if len(b_M):
        log_p_BK[b_M, i_M] = _log_p_one_hot(batch, b_M, i_M)
    b_M, i_M = (has_q_BK & ~batch.one_hot_p_B[:, None]).nonzero(as_tuple=True)
    for part in chunks(len(b_M), batch.vocabulary):
        log_p_BK[b_M[part], i_M[part]] = _log_p(batch, b_M[part], i_M[part])
    # If p and q are one-hot, the decision is the same for every u.
    log_u_BK = torch.full_like(log_p_BK, -torch.inf)
    if len(b_M) or Rule.SYNTHETIC in rules:
        log_u_BK = _uniforms(batch.inputs, batch.inputs.slot_B, batch.inputs.position_B).log()
    x = RuleInputs(log_p_BK, log_q_BK, log_u_BK, batch.inputs.synthetic_rate_K)
    log_w_BK1 = weights(x, batch.rule_B)
    if Rule.BLOCK in rules:
        x = replace(x, residual_mass_BK=_residual_masses(batch, log_q_BK, log_w_BK1))
    n_accept_B = accept(x, batch.rule_B)
    n_accept_B1 = n_accept_B[:, None]
    rejected_B = pad(has_q_BK, (0, 1)).gather(1, n_accept_B1)[:, 0] & ~batch.one_hot_p_B
    return n_accept_B, rejected_B, log_w_BK1.gather(1, n_accept_B1)[:, 0]


def _log_q(batch: Batch) -> Tensor:
    """log q(x_i), [B, K]: 0 if q is one-hot, else from the cache; -inf where the cached row is not
    finite or does not keep x_i, and from the first placeholder on (under SYNTHETIC also from the
    first id on that the target lacks)."""
    token_BK, inputs = batch.token_BK, batch.inputs
    index_K = torch.arange(token_BK.shape[1], device=token_BK.device)
    is_draft_BK = (index_K < inputs.drafts.num_B[:, None]) & (token_BK >= 0)
    # Under SYNTHETIC a rate would accept ids that the target does not have.
    is_draft_BK &= (token_BK < batch.vocabulary) | (batch.rule_B != Rule.SYNTHETIC)[:, None]
    log_q_BK = torch.zeros_like(token_BK, dtype=torch.float64)
    if inputs.drafts.cache is not None:
        cached = _cached_log_q(inputs.drafts.cache, inputs.params, inputs.slot_B, index_K, token_BK)
        real_BK, is_kept_BK, _ = cached
        real_BK = torch.where(is_kept_BK & real_BK.isfinite(), real_BK, -torch.inf)
        log_q_BK = torch.where(batch.real_q_B[:, None], real_BK, log_q_BK)
    return log_q_BK.masked_fill_(is_draft_BK.cumprod(dim=1) == 0, -torch.inf)


def _cached_log_q(
    cache: DraftCache, params: SlotParams, slot_R: Tensor, index_J: Tensor, token_RJ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For a token in each draft row `index_J` of each slot: log q, valid if q keeps the token;
    whether q keeps the token; the LSE of the row."""
    entry, width = (slot_R[:, None], index_J), cache.logits_SKV.shape[2]
    raw_RJ = cache.logits_SKV[(*entry, token_RJ.clamp(0, width - 1))].float()
    lse_RJ = cache.lse_SK[entry]
    is_kept_RJ = (token_RJ >= 0) & (token_RJ < width) & (raw_RJ >= cache.threshold_SK[entry])
    return raw_RJ / temperatures(params, slot_R)[:, None] - lse_RJ, is_kept_RJ, lse_RJ


def _noise(batch: Batch, b_M: Tensor, i_M: Tensor, streams: tuple[Stream, Stream]) -> RowNoise:
    """TARGET or RESIDUAL noise of row i_M of each request b_M."""
    inputs = batch.inputs
    key_M, position_M = inputs.params.key_S[inputs.slot_B[b_M]], inputs.position_B[b_M] + i_M
    token_M, block_M = (torch.full_like(b_M, stream) for stream in streams)
    return RowNoise(key_M, position_M, torch.zeros_like(b_M), token_M, block_M, inputs.fp64_noise)


def _log_p_one_hot(batch: Batch, b_M: Tensor, i_M: Tensor) -> Tensor:
    """log p(x_i) where p is one-hot at the target's own draw: 0 if x_i is that draw, else -inf."""
    drawn = draw_rows(batch.rows, batch.first_row_B[b_M] + i_M, _noise(batch, b_M, i_M, TARGET))
    batch.finite_BK1[b_M, i_M] = drawn.finite_M
    equal_M = (drawn.token_M == batch.token_BK[b_M, i_M]) & drawn.finite_M
    return torch.where(equal_M, 0.0, -torch.inf).double()


def _log_p(batch: Batch, b_R: Tensor, i_R: Tensor) -> Tensor:
    """log p(x_i) of drafts i_R of requests b_R: -inf where p(x_i) = 0 or the row is not finite."""
    p = distribution(batch.rows, batch.first_row_B[b_R] + i_R)
    token_R, finite_R = batch.token_BK[b_R, i_R], p.max_R.isfinite()
    batch.finite_BK1[b_R, i_R] = finite_R
    raw_R = p.logit_RW.gather(1, token_R.clamp(max=batch.vocabulary - 1)[:, None])[:, 0]
    kept_R = (token_R < batch.vocabulary) & (raw_R >= p.threshold_R) & finite_R
    log_p_R = raw_R / temperatures(batch.inputs.params, batch.inputs.slot_B[b_R]) - p.lse_R
    return torch.where(kept_R, log_p_R, -torch.inf)


def _uniforms(inputs: VerifyBatch, slot_R: Tensor, position_R: Tensor) -> Tensor:
    """The acceptance uniforms of these requests, float64 [R, K]."""
    columns = inputs.drafts.token_BK.shape[1]
    index_M = torch.arange(columns, device=slot_R.device).repeat(len(slot_R))
    key_M = inputs.params.key_S[slot_R].repeat_interleave(columns)
    position_M = position_R.repeat_interleave(columns) + index_M
    u_M = first_uniform(key_M, position_M, index_M, Stream.ACCEPT, inputs.fp64_noise)
    return u_M.double().view(len(slot_R), columns)


def _residual_masses(batch: Batch, log_q_BK: Tensor, log_w_BK1: Tensor) -> Tensor:
    """S_{i-1} = sum_x max(w_{i-1} p(x) - q(x), 0) of the row of x_i, [B, K], for the block rule; 0
    where p is not finite, and where the rule does not need S."""
    log_w_BK, mass_BK = log_w_BK1[:, :-1], torch.zeros_like(log_q_BK)
    is_read_BK = (log_q_BK > -torch.inf) & (log_w_BK > -torch.inf)
    is_read_BK &= ((batch.rule_B == Rule.BLOCK) & ~batch.one_hot_p_B)[:, None]
    is_read_BK[:, :1] = False
    b_M, i_M = is_read_BK.nonzero(as_tuple=True)
    for part in chunks(len(b_M), batch.vocabulary):
        b, i = b_M[part], i_M[part]
        p = distribution(batch.rows, batch.first_row_B[b] + i)
        mass_R = _residual(batch, p.weight_RW, b, i, log_w_BK[b, i]).sum(dim=1)
        mass_BK[b, i] = torch.where(p.max_R.isfinite(), mass_R, 0.0)
    return mass_BK


def _residual(batch: Batch, weight_RW: Tensor, b_R: Tensor, i_R: Tensor, log_w_R: Tensor) -> Tensor:
    """max(w p - q, 0) in the rows of drafts i_R of requests b_R, float64 [R, W]; `weight_RW`: the
    weights of p, not normalised."""
    rest_RW = weight_RW * (log_w_R.exp() / weight_RW.sum(dim=1))[:, None]
    token_R, real_R = batch.token_BK[b_R, i_R], batch.real_q_B[b_R]
    cache = batch.inputs.drafts.cache
    one_hot = (~real_R & (token_R < batch.vocabulary)).nonzero()[:, 0]
    rest_RW[one_hot, token_R[one_hot]] = 0.0
    real = real_R.nonzero()[:, 0]
    if cache is not None and len(real):
        slot_R = batch.inputs.slot_B[b_R[real]]
        q_RV = _q_rows(cache, batch.inputs.params, slot_R, i_R[real], batch.vocabulary)
        rest_RW[real, : q_RV.shape[1]] -= q_RV
    return rest_RW.clamp_(min=0.0)


def _q_rows(
    cache: DraftCache, params: SlotParams, slot_R: Tensor, i_R: Tensor, vocabulary: int
) -> Tensor:
    """q of drafts i_R of slots, from the cache: float64, over the ids that the target also has."""
    raw_RV = cache.logits_SKV[slot_R, i_R][:, :vocabulary].float()
    log_q_RV = raw_RV / temperatures(params, slot_R)[:, None] - cache.lse_SK[slot_R, i_R, None]
    return log_q_RV.exp_().mul_(raw_RV >= cache.threshold_SK[slot_R, i_R, None])


def _draw_last(batch: Batch, i_B: Tensor, rejected_B: Tensor, log_w_B: Tensor) -> Tensor:
    """Stage (iii): the token after the i_B accepted drafts, int64 [B]. In place of a rejected draft
    that has a q, it is drawn with RESIDUAL noise from the residual, or from p if the residual has
    no mass; otherwise with TARGET noise from p."""
    row_B, last_B = batch.first_row_B + i_B, torch.empty_like(i_B)
    b = (~rejected_B).nonzero()[:, 0]
    if len(b):
        drawn = draw_rows(batch.rows, row_B[b], _noise(batch, b, i_B[b], TARGET))
        last_B[b], batch.finite_BK1[b, i_B[b]] = drawn.token_M, drawn.finite_M
    b_M = rejected_B.nonzero()[:, 0]
    for part in chunks(len(b_M), batch.vocabulary):
        b = b_M[part]
        i, n = i_B[b], row_B[b]
        p = distribution(batch.rows, n)
        rest_RW = _residual(batch, p.weight_RW, b, i, log_w_B[b])
        weight_RW = torch.where(rest_RW.sum(dim=1, keepdim=True) > 0, rest_RW, p.weight_RW)
        flat_R, noise = draws_flat(batch.rows, n), _noise(batch, b, i, RESIDUAL)
        last_B[b] = draw(weight_RW, flat_R, noise)
        batch.finite_BK1[b, i] = p.max_R.isfinite()
    return last_B


class _Subset(NamedTuple):
    """The R requests that need evidence, and the backend's functions that read their rows."""

    process_logits: _ProcessLogits
    logprobs: _Logprobs
    inputs: VerifyBatch
    slot_R: Tensor
    num_R: Tensor
    first_row_R: Tensor
    real_q_R: Tensor
    token_RK: Tensor

    def rows(self, index_RJ: Tensor) -> Rows:
        """Rows `index_RJ` of each request; for an index after the last row, that row unedited."""
        row_M = (self.first_row_R[:, None] + index_RJ.minimum(self.num_R[:, None])).flatten()
        exists_M, edits = (index_RJ <= self.num_R[:, None]).flatten(), self.inputs.edits
        slot_M = self.slot_R.repeat_interleave(index_RJ.shape[1])
        edits = None if edits is None else _edits_of(edits, row_M, exists_M)
        return Rows(self.inputs.logits_NV[row_M], self.inputs.params, slot_M, edits)


def evidence_by(
    process_logits: _ProcessLogits, logprobs: _Logprobs
) -> Callable[[VerifyBatch, Verdict, Tensor], Evidence]:
    """Make `Backend.evidence` for a backend that has these functions; it waits for no device, since
    its shapes do not depend on the values of tensors."""

    def evidence(inputs: VerifyBatch, verdict: Verdict, request_R: Tensor) -> Evidence:
        logits_per_request = (inputs.drafts.token_BK.shape[1] + 1) * inputs.logits_NV.shape[1]
        parts = torch.split(request_R, max(_MAX_LOGITS // logits_per_request, 1))
        results = [_evidence(process_logits, logprobs, inputs, verdict, part_R) for part_R in parts]
        return Evidence(*(torch.cat(column) for column in zip(*results, strict=True)))

    return evidence


def _evidence(
    process_logits: _ProcessLogits, logprobs: _Logprobs, inputs: VerifyBatch, verdict: Verdict,
    request_R: Tensor,
) -> Evidence:  # fmt: skip
    drafts, slot_R = inputs.drafts, inputs.slot_B[request_R]
    columns, rows_B = drafts.token_BK.shape[1], drafts.num_B + 1
    index_RK = torch.arange(columns, device=slot_R.device).expand(len(slot_R), columns)
    token_RK = drafts.token_BK[request_R].long()
    one_hot_p_R = inputs.params.temperature_S[slot_R] == 0
    one_hot_p_R |= inputs.params.rule_S[slot_R] == Rule.COUPLED
    real_q_R = drafts.real_q_B[request_R] & ~one_hot_p_R
    first_row_R = (rows_B.cumsum(0) - rows_B)[request_R]
    subset = _Subset(
        process_logits, logprobs, inputs, slot_R, drafts.num_B[request_R], first_row_R, real_q_R,
        token_RK,
    )  # fmt: skip
    accepted_R1 = verdict.n_accept_B[request_R, None]
    last_R1 = verdict.token_BK1[request_R].long().gather(1, accepted_R1)
    p_RK, finite_RK = _p_of_tokens(subset, index_RK, token_RK)
    p_R1, _ = _p_of_tokens(subset, accepted_R1, last_R1)
    q_RK = _q_of_drafts(subset, index_RK)
    q_R1 = _q_of_last(subset, q_RK, accepted_R1, last_R1)
    mass_RK = torch.full_like(p_RK, torch.nan)
    if Rule.BLOCK in inputs.params.rules and columns > 1:
        mass_RK[:, :-1] = _masses(subset, p_RK, q_RK, finite_RK)
    return Evidence(
        token_RK, torch.cat([p_RK, p_R1], dim=1), torch.cat([q_RK, q_R1], dim=1),
        _uniforms(inputs, slot_R, inputs.position_B[request_R]).view_as(p_RK), mass_RK, real_q_R,
    )  # fmt: skip


def _p_of_tokens(subset: _Subset, index_RJ: Tensor, token_RJ: Tensor) -> tuple[Tensor, Tensor]:
    """p of tokens in rows `index_RJ` of each request, float64; and whether each row is finite."""
    vocabulary, rows = subset.inputs.logits_NV.shape[1], subset.rows(index_RJ)
    token_M = token_RJ.flatten()
    logprobs = subset.logprobs(rows, token_M.clamp(0, vocabulary - 1), 1)
    finite_M = logprobs.top_logprob_NT[:, 0].isfinite()
    is_greedy_M = rows.params.temperature_S[rows.slot_N] == 0
    is_best_M = logprobs.top_token_NT[:, 0] == token_M
    p_M = torch.where(is_greedy_M, is_best_M.double(), logprobs.logprob_N.double().exp())
    is_known_M = (token_M >= 0) & (token_M < vocabulary)
    p_M = torch.where(finite_M & is_known_M, p_M, 0.0)
    return p_M.view_as(token_RJ), finite_M.view_as(token_RJ)


def _q_of_tokens(subset: _Subset, index_RJ: Tensor, token_RJ: Tensor) -> Tensor:
    """q of tokens in draft rows `index_RJ`, from the cache: float64; NaN if the row is not finite,
    1 without a cache."""
    cache, params = subset.inputs.drafts.cache, subset.inputs.params
    if cache is None:
        return torch.ones_like(token_RJ, dtype=torch.float64)
    log_q_RJ, is_kept_RJ, lse_RJ = _cached_log_q(cache, params, subset.slot_R, index_RJ, token_RJ)
    return torch.where(is_kept_RJ, log_q_RJ.exp(), 0.0).masked_fill_(~lse_RJ.isfinite(), torch.nan)


def _q_of_drafts(subset: _Subset, index_RK: Tensor) -> Tensor:
    """q(x_i) of all drafts, [R, K]: 1 if q is one-hot; 0 for a placeholder or an unknown id."""
    inputs, token_RK = subset.inputs, subset.token_RK
    is_draft_RK = token_RK < inputs.logits_NV.shape[1]
    is_draft_RK |= (inputs.params.rule_S[subset.slot_R] != Rule.SYNTHETIC)[:, None]
    q_RK = torch.where(subset.real_q_R[:, None], _q_of_tokens(subset, index_RK, token_RK), 1.0)
    return torch.where(is_draft_RK & (token_RK >= 0), q_RK, 0.0)


def _q_of_last(subset: _Subset, q_RK: Tensor, accepted_R1: Tensor, last_R1: Tensor) -> Tensor:
    """q of the token after the accepted drafts, [R, 1]; 0 if the token does not replace a draft."""
    if q_RK.shape[1] == 0:
        return torch.zeros_like(last_R1, dtype=torch.float64)
    index_R1 = accepted_R1.clamp(max=q_RK.shape[1] - 1)
    replaces_R1 = (accepted_R1 < subset.num_R[:, None]) & (q_RK.gather(1, index_R1) > 0)
    is_draft_R1 = (subset.token_RK.gather(1, index_R1) == last_R1).double()
    q_R1 = _q_of_tokens(subset, index_R1, last_R1)
    q_R1 = torch.where(subset.real_q_R[:, None], q_R1, is_draft_R1)
    return torch.where(replaces_R1, q_R1, 0.0)


def _masses(subset: _Subset, p_RK: Tensor, q_RK: Tensor, finite_RK: Tensor) -> Tensor:
    """S_i of the block rule if draft i is not the request's last, [R, K - 1]; else NaN. For a
    one-hot q, S_i is p_i (1 - p(x_{i+1})), which takes no pass over the vocabulary."""
    params, cache, columns = subset.inputs.params, subset.inputs.drafts.cache, p_RK.shape[1]
    is_draft_RK = q_RK > 0
    log_q_RK = torch.where(is_draft_RK, q_RK, 0.0).log()
    w_RK = block_weights(RuleInputs(p_RK.log(), log_q_RK, log_q_RK))[:, 1:-1].exp()
    mass_RK = w_RK * (1 - p_RK[:, 1:])
    if cache is not None:
        following_RK = torch.arange(1, columns, device=p_RK.device).expand_as(mass_RK)
        rows, index_M = subset.rows(following_RK), following_RK.flatten()
        rest_MV = subset.process_logits(rows).double().softmax(dim=1)
        rest_MV.mul_(w_RK.reshape(-1, 1))
        q_MV = _q_rows(cache, params, rows.slot_N, index_M, rest_MV.shape[1])
        rest_MV[:, : q_MV.shape[1]] -= q_MV
        sum_RK = rest_MV.clamp_(min=0.0).sum(dim=1).view_as(mass_RK)
        mass_RK = torch.where(subset.real_q_R[:, None], sum_RK, mass_RK)
    mass_RK = torch.where(finite_RK[:, 1:], mass_RK, 0.0)
    index_RK = torch.arange(columns, device=p_RK.device)
    is_draft_RK = (is_draft_RK & (index_RK < subset.num_R[:, None])).cumprod(dim=1)[:, 1:] > 0
    is_block_R = params.rule_S[subset.slot_R] == Rule.BLOCK
    return torch.where(is_draft_RK & is_block_R[:, None], mass_RK, torch.nan)


def _edits_of(edits: Edits, row_M: Tensor, exists_M: Tensor) -> Edits:
    """The edits of rows `row_M`, which must be distinct where `exists_M`; elsewhere no edits."""
    start_M = edits.start_N1[row_M]
    count_M = (edits.start_N1[row_M + 1] - start_M) * exists_M
    new_M1 = pad(count_M.cumsum(0), (1, 0))
    # The number of entries; on a device an upper bound, since reading the number means waiting.
    size = int(new_M1[-1]) if row_M.is_cpu else len(edits.token_M)
    index_E = torch.arange(size, device=row_M.device)
    m_E = torch.searchsorted(new_M1[1:], index_E, right=True).clamp_(max=len(row_M) - 1)
    entry_E = (start_M - new_M1[:-1])[m_E] + index_E
    entry_E.clamp_(max=max(len(edits.token_M) - 1, 0))
    return replace(
        edits,
        mask_N=None if edits.mask_N is None else torch.where(exists_M, edits.mask_N[row_M], -1),
        start_N1=new_M1, token_M=edits.token_M[entry_E], bias_M=edits.bias_M[entry_E],
        repetition_M=edits.repetition_M[entry_E], subtract_M=edits.subtract_M[entry_E],
    )  # fmt: skip
