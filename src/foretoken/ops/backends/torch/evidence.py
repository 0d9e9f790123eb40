"""What a verdict rests on, in stock operators, over any backend's processing and log-probabilities.

Nothing waits for the device and no shape depends on what tensors hold: a step on a GPU has this,
too, outside of what is captured.

Shapes: R requests, K most drafts, N rows of the batch, M of them at a time, V vocabulary, E edits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.ops.backends.torch.noise import first_uniform
from foretoken.ops.backends.torch.process import temperatures
from foretoken.ops.rules import RuleInputs, block_weights
from foretoken.ops.types import Edits, Evidence, Logprobs, Rows, Rule, Stream, Verdict, VerifyBatch

_AT_ONCE = 1 << 22  # logits at a time: memory does not grow with how many requests are asked for


class Reading(NamedTuple):
    """How a backend reads rows: two of its functions, see `Backend`."""

    process_logits: Callable[[Rows], Tensor]
    logprobs: Callable[[Rows, Tensor, int], Logprobs]


class _Asked(NamedTuple):
    """The requests that are asked for, by their order there."""

    reading: Reading
    given: VerifyBatch
    slot_R: Tensor
    num_R: Tensor
    first_row_R: Tensor
    real_q_R: Tensor
    token_RK: Tensor

    def rows(self, index_RJ: Tensor) -> Rows:
        """Rows of the requests, one after another; behind a request's last one, that again."""
        row_M = (self.first_row_R[:, None] + index_RJ.minimum(self.num_R[:, None])).flatten()
        real_M, edits = (index_RJ <= self.num_R[:, None]).flatten(), self.given.edits
        slot_M = self.slot_R.repeat_interleave(index_RJ.shape[1])
        edits = None if edits is None else _edits_of(edits, row_M, real_M)
        return Rows(self.given.logits_NV[row_M], self.given.params, slot_M, edits)


def evidence_by(
    process_logits: Callable[[Rows], Tensor], logprobs: Callable[[Rows, Tensor, int], Logprobs]
) -> Callable[[VerifyBatch, Verdict, Tensor], Evidence]:
    """`Backend.evidence` of a backend that reads rows by these functions of its own."""
    reading = Reading(process_logits, logprobs)

    def evidence(given: VerifyBatch, verdict: Verdict, request_R: Tensor) -> Evidence:
        """Some requests at a time."""
        most_logits = (given.drafts.token_BK.shape[1] + 1) * given.logits_NV.shape[1]
        parts = torch.split(request_R, max(_AT_ONCE // most_logits, 1))
        found = [_evidence(reading, given, verdict, part_R) for part_R in parts]
        return Evidence(*(torch.cat(column) for column in zip(*found, strict=True)))

    return evidence


def _evidence(
    reading: Reading, given: VerifyBatch, verdict: Verdict, request_R: Tensor
) -> Evidence:
    drafts, slot_R = given.drafts, given.slot_B[request_R]
    most, rows_B = drafts.token_BK.shape[1], drafts.num_B + 1
    index_RK = torch.arange(most, device=slot_R.device).expand(len(slot_R), most)
    token_RK = drafts.token_BK[request_R].long()
    own_R = given.params.temperature_S[slot_R] == 0
    own_R = own_R | (given.params.rule_S[slot_R] == Rule.COUPLED)
    real_q_R = drafts.real_q_B[request_R] & ~own_R
    first_row_R = (rows_B.cumsum(0) - rows_B)[request_R]
    asked = _Asked(reading, given, slot_R, drafts.num_B[request_R], first_row_R, real_q_R, token_RK)
    accepted_R1 = verdict.n_accept_B[request_R, None]
    last_R1 = verdict.token_BK1[request_R].long().gather(1, accepted_R1)
    p_RK, finite_RK = _p(asked, index_RK, token_RK)
    p_R1, _ = _p(asked, accepted_R1, last_R1)
    q_RK = _q_of_drafts(asked, index_RK)
    q_R1 = _q_of_last(asked, q_RK, accepted_R1, last_R1)
    key_M = given.params.key_S[slot_R].repeat_interleave(most)
    index_M = index_RK.flatten()
    position_M = given.position_B[request_R].repeat_interleave(most) + index_M
    u_M = first_uniform(key_M, position_M, index_M, Stream.ACCEPT, given.fp64_noise)
    mass_RK = torch.full_like(p_RK, torch.nan)
    if Rule.BLOCK in given.params.rules and most > 1:
        mass_RK[:, :-1] = _masses(asked, p_RK, q_RK, finite_RK)
    return Evidence(
        token_RK, torch.cat([p_RK, p_R1], dim=1), torch.cat([q_RK, q_R1], dim=1),
        u_M.double().view_as(p_RK), mass_RK, real_q_R,
    )  # fmt: skip


def _p(asked: _Asked, index_RJ: Tensor, token_RJ: Tensor) -> tuple[Tensor, Tensor]:
    """p of tokens in rows of each request, float64; and whether the rows are finite."""
    vocabulary, rows = asked.given.logits_NV.shape[1], asked.rows(index_RJ)
    token_M = token_RJ.flatten()
    found = asked.reading.logprobs(rows, token_M.clamp(0, vocabulary - 1), 1)
    finite_M = found.top_logprob_NT[:, 0].isfinite()
    cold_M = rows.params.temperature_S[rows.slot_N] == 0
    is_best_M = found.top_token_NT[:, 0] == token_M
    p_M = torch.where(cold_M, is_best_M.double(), found.logprob_N.double().exp())
    is_known_M = (token_M >= 0) & (token_M < vocabulary)
    p_M = torch.where(finite_M & is_known_M, p_M, 0.0)
    return p_M.view_as(token_RJ), finite_M.view_as(token_RJ)


def _q(asked: _Asked, index_RJ: Tensor, token_RJ: Tensor) -> Tensor:
    """q of tokens as the cache states it, float64; NaN where the draft's row is not finite."""
    cache, params = asked.given.drafts.cache, asked.given.params
    if cache is None:
        return torch.ones_like(token_RJ, dtype=torch.float64)
    at, width = (asked.slot_R[:, None], index_RJ), cache.logits_SKV.shape[2]
    raw_RJ = cache.logits_SKV[(*at, token_RJ.clamp(0, width - 1))].float()
    lse_RJ = cache.lse_SK[at]
    q_RJ = (raw_RJ / temperatures(params, asked.slot_R)[:, None] - lse_RJ).exp()
    is_kept_RJ = (token_RJ >= 0) & (token_RJ < width) & (raw_RJ >= cache.threshold_SK[at])
    return torch.where(is_kept_RJ, q_RJ, 0.0).masked_fill_(~lse_RJ.isfinite(), torch.nan)


def _q_of_drafts(asked: _Asked, index_RK: Tensor) -> Tensor:
    given, token_RK = asked.given, asked.token_RK
    is_token_RK = token_RK < given.logits_NV.shape[1]
    is_token_RK |= (given.params.rule_S[asked.slot_R] != Rule.SYNTHETIC)[:, None]
    q_RK = torch.where(asked.real_q_R[:, None], _q(asked, index_RK, token_RK), 1.0)
    return torch.where(is_token_RK & (token_RK >= 0), q_RK, 0.0)


def _q_of_last(asked: _Asked, q_RK: Tensor, accepted_R1: Tensor, last_R1: Tensor) -> Tensor:
    """q of the token behind the accepted drafts, if a draft stood there."""
    if q_RK.shape[1] == 0:
        return torch.zeros_like(last_R1, dtype=torch.float64)
    place_R1 = accepted_R1.clamp(max=q_RK.shape[1] - 1)
    replaces_R1 = (accepted_R1 < asked.num_R[:, None]) & (q_RK.gather(1, place_R1) > 0)
    is_draft_R1 = (asked.token_RK.gather(1, place_R1) == last_R1).double()
    q_R1 = torch.where(asked.real_q_R[:, None], _q(asked, place_R1, last_R1), is_draft_R1)
    return torch.where(replaces_R1, q_R1, 0.0)


def _masses(asked: _Asked, p_RK: Tensor, q_RK: Tensor, finite_RK: Tensor) -> Tensor:
    """S_i of the drafts that another one follows, [R, K - 1], as the block rule has it.

    Of a one-hot q it is p_i (1 - p(x_{i+1})), which takes no pass over the vocabulary.
    """
    params, cache, most = asked.given.params, asked.given.drafts.cache, p_RK.shape[1]
    is_draft_RK = q_RK > 0
    log_q_RK = torch.where(is_draft_RK, q_RK, 0.0).log()
    w_RK = block_weights(RuleInputs(p_RK.log(), log_q_RK, log_q_RK))[:, 1:-1].exp()
    mass_RK = w_RK * (1 - p_RK[:, 1:])
    if cache is not None:
        following_RK = torch.arange(1, most, device=p_RK.device).expand_as(mass_RK)
        rows, index_M = asked.rows(following_RK), following_RK.flatten()
        rest_MV = asked.reading.process_logits(rows).double().softmax(dim=1)
        rest_MV.mul_(w_RK.reshape(-1, 1))
        raw_MV = cache.logits_SKV[rows.slot_N, index_M][:, : rest_MV.shape[1]].float()
        lse_M1 = cache.lse_SK[rows.slot_N, index_M, None]
        q_MV = (raw_MV / temperatures(params, rows.slot_N)[:, None] - lse_M1).exp_()
        q_MV.mul_(raw_MV >= cache.threshold_SK[rows.slot_N, index_M, None])
        rest_MV[:, : q_MV.shape[1]] -= q_MV
        sum_RK = rest_MV.clamp_(min=0.0).sum(dim=1).view_as(mass_RK)
        mass_RK = torch.where(asked.real_q_R[:, None], sum_RK, mass_RK)
    mass_RK = torch.where(finite_RK[:, 1:], mass_RK, 0.0)
    index_RK = torch.arange(most, device=p_RK.device)
    is_draft_RK = (is_draft_RK & (index_RK < asked.num_R[:, None])).cumprod(dim=1)[:, 1:] > 0
    is_block_R = params.rule_S[asked.slot_R] == Rule.BLOCK
    return torch.where(is_draft_RK & is_block_R[:, None], mass_RK, torch.nan)


def _edits_of(edits: Edits, row_M: Tensor, real_M: Tensor) -> Edits:
    """The edits of some rows, none twice, but for those that are not real and have none."""
    start_M = edits.start_N1[row_M]
    count_M = (edits.start_N1[row_M + 1] - start_M) * real_M
    new_M1 = pad(count_M.cumsum(0), (1, 0))
    # On a host the truth costs nothing; where it is unknown, no more than there are.
    size = int(new_M1[-1]) if row_M.is_cpu else len(edits.token_M)
    index_E = torch.arange(size, device=row_M.device)
    owner_E = torch.searchsorted(new_M1[1:], index_E, right=True).clamp_(max=len(row_M) - 1)
    at_E = (start_M - new_M1[:-1])[owner_E] + index_E
    at_E.clamp_(max=max(len(edits.token_M) - 1, 0))
    return replace(
        edits,
        mask_N=None if edits.mask_N is None else torch.where(real_M, edits.mask_N[row_M], -1),
        start_N1=new_M1, token_M=edits.token_M[at_E], bias_M=edits.bias_M[at_E],
        repetition_M=edits.repetition_M[at_E], subtract_M=edits.subtract_M[at_E],
    )  # fmt: skip
