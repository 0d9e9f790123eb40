"""Ways to break losslessness by one replacement, on any backend; a law must reject each mutant.

A mutant changes the proposals of a drafter, the functions of a backend, or a rule in
`ops/rules.py`. `mutants` and `rule_mutants` list the case in which a law must reject each mutant.

Shapes as in `laws/__init__.py`; R requests with a rejected draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from foretoken.lab.laws.chain import Propose, edits_of_rows, first_row
from foretoken.lab.laws.findings import MUTANT_P, Finding
from foretoken.lab.laws.joint import Case, run_case
from foretoken.ops import (
    RESIDUAL,
    Backend,
    DraftBlock,
    DraftCache,
    Noise,
    Rows,
    Rule,
    SlotParams,
    Verdict,
    VerifyBatch,
    rules,
)

TRIALS = 20_000  # with these, p < 1e-100 for all mutants except two
TRIALS_OF_SUBTLE = 200_000  # for mutants that differ only after several accepted drafts
READ_RULES = ("torch",)  # backends that take their rules from `ops/rules.py`


def replaced(backend: Backend, **functions: Callable[..., Any]) -> Backend:
    """A copy of the backend with some of its functions replaced."""
    mutant = copy(backend)
    vars(mutant).update(functions)
    return mutant


def _proposal_mutant(change: Callable[[DraftBlock], DraftBlock]) -> Callable[[Propose], Propose]:
    """Turn a change of drafts into a mutant of drafters."""

    @wraps(change)
    def mutant(propose: Propose) -> Propose:
        return lambda *arguments: change(propose(*arguments))

    return mutant


@_proposal_mutant
def hide_token(drafts: DraftBlock) -> DraftBlock:
    """Drafts of token 2 become placeholders."""
    return replace(drafts, token_BK=drafts.token_BK.masked_fill(drafts.token_BK == 2, -1))


@_proposal_mutant
def cut_before_token(drafts: DraftBlock) -> DraftBlock:
    """Drafts end before the first draft of token 2."""
    kept_BK = (drafts.token_BK != 2).long().cumprod(dim=1)
    return replace(drafts, num_B=torch.minimum(kept_BK.sum(dim=1), drafts.num_B))


@_proposal_mutant
def cut_by_total(drafts: DraftBlock) -> DraftBlock:
    """Drafts of two neighbouring requests end at the first index where either draft is token 2."""
    pair_B = torch.arange(len(drafts.num_B), device=drafts.num_B.device) // 2
    hit_BK = (drafts.token_BK == 2).long()
    hits_of_pair_BK = torch.zeros_like(hit_BK).index_add(0, pair_B, hit_BK)[pair_B]
    kept_BK = (hits_of_pair_BK < 1).long().cumprod(dim=1)
    return replace(drafts, num_B=torch.minimum(kept_BK.sum(dim=1), drafts.num_B))


@_proposal_mutant
def row_before_of_q(drafts: DraftBlock) -> DraftBlock:
    """Each draft is verified with the q of the previous draft."""
    q = drafts.cache
    if q is None:
        return drafts
    rolled = (tensor.roll(1, dims=1) for tensor in (q.logits_SKV, q.threshold_SK, q.lse_SK))
    return replace(drafts, cache=DraftCache(*rolled))


def shared_stream(backend: Backend) -> Backend:
    """Drafts are drawn with the noise of residuals; the q in the cache is right."""

    def draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
        backend.draft(rows, noise, cache)
        zero_N = torch.zeros_like(noise.draft_index_N)
        return backend.sample(rows, noise._replace(draft_index_N=zero_N, streams=RESIDUAL))

    return replaced(backend, draft=draft)


def batch_mutant(change: Callable[[VerifyBatch], VerifyBatch]) -> Callable[[Backend], Backend]:
    """Turn a change of the batch that `verify` gets into a mutant of backends."""

    @wraps(change)
    def mutant(backend: Backend) -> Backend:
        return replaced(backend, verify=lambda batch: backend.verify(change(batch)))

    return mutant


@batch_mutant
def same_noise_every_round(batch: VerifyBatch) -> VerifyBatch:
    """Verification ignores positions: each round uses the same uniforms and residual noise."""
    return batch._replace(position_B=torch.zeros_like(batch.position_B))


@batch_mutant
def unfiltered(batch: VerifyBatch) -> VerifyBatch:
    """Drafts are verified against the target without filters and edits."""
    return batch._replace(params=without_filters(batch.params), edits=None)


@batch_mutant
def edits_of_the_row_before(batch: VerifyBatch) -> VerifyBatch:
    """Each row gets the edits of the previous row."""
    if batch.edits is None:
        return batch
    row_N = torch.arange(len(batch.logits_NV), device=batch.logits_NV.device)
    return batch._replace(edits=edits_of_rows(batch.edits, (row_N - 1).clamp(min=0)))


@batch_mutant
def mask_drops_drafts(batch: VerifyBatch) -> VerifyBatch:
    """A draft that the grammar forbids becomes a placeholder before it is verified."""
    edits, drafts = batch.edits, batch.drafts
    if edits is None or edits.mask_N is None or edits.mask_RW is None:
        return batch
    mask_RW, id_BK = edits.mask_RW, drafts.token_BK.clamp(min=0)
    index_K = torch.arange(id_BK.shape[1], device=id_BK.device)
    row_BK = (first_row(drafts)[:, None] + index_K).clamp(max=len(batch.logits_NV) - 1)
    column_BK = (id_BK // 32).clamp(max=mask_RW.shape[1] - 1)
    word_BK = mask_RW[edits.mask_N[row_BK], column_BK].long()
    forbidden_BK = (word_BK >> (id_BK % 32)) & 1 == 0
    token_BK = drafts.token_BK.masked_fill(forbidden_BK, -1)
    return batch._replace(drafts=replace(drafts, token_BK=token_BK))


def without_filters(params: SlotParams) -> SlotParams:
    """Parameters with top-k, top-p and min-p switched off in all slots."""
    top_k_S, top_p_S = torch.zeros_like(params.top_k_S), torch.ones_like(params.top_p_S)
    min_p_S = torch.zeros_like(params.min_p_S)
    return replace(params, top_k_S=top_k_S, top_p_S=top_p_S, min_p_S=min_p_S)


Weights = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""The weights of tokens that may replace a rejected draft x, [R, V], from p [R, V], q [R, V],
one-hot x [R, V], and the weights w_i and w_{i-1} of the block rule, [R], where i drafts were
accepted."""

RESIDUALS: dict[str, Weights] = {
    "no_subtraction": lambda p, q, x, w, w_before: p,
    "one_hot": lambda p, q, x, w, w_before: p * (1 - x),
    "other_way_round": lambda p, q, x, w, w_before: q - p,
    "half_the_draft": lambda p, q, x, w, w_before: p - q / 2,
}
BLOCK_RESIDUALS: dict[str, Weights] = {
    "weight_one": lambda p, q, x, w, w_before: p - q,
    "weight_before": lambda p, q, x, w, w_before: w_before[:, None] * p - q,
}


def residual_mutant(weights: Weights) -> Callable[[Backend], Backend]:
    """A mutant of backends: tokens in place of rejected drafts are drawn from wrong weights."""

    def mutant(backend: Backend) -> Backend:
        def verify(batch: VerifyBatch) -> Verdict:
            return _redraw(backend, batch, backend.verify(batch), weights)

        return replaced(backend, verify=verify)

    return mutant


def _redraw(backend: Backend, batch: VerifyBatch, verdict: Verdict, weights: Weights) -> Verdict:
    """Draw the tokens in place of rejected drafts again, from `weights` with the same noise."""
    drafts = batch.drafts
    b_R = torch.nonzero(verdict.n_accept_B < drafts.num_B).flatten()
    i_R = verdict.n_accept_B[b_R]
    slot_N = batch.slot_B.repeat_interleave(drafts.num_B + 1)
    p_NV = _softmax(backend, Rows(batch.logits_NV, batch.params, slot_N, batch.edits))
    p_RV = p_NV[first_row(drafts)[b_R] + i_R]
    one_hot_RV = torch.zeros_like(p_RV).scatter_(1, drafts.token_BK[b_R, i_R][:, None], 1.0)
    q_RV = _draft_distribution(backend, batch, b_R, i_R, one_hot_RV)
    w_BK1 = _block_weights(backend, batch, p_NV)
    w_R, w_before_R = w_BK1[b_R, i_R], w_BK1[b_R, (i_R - 1).clamp(min=0)]
    weight_RV = weights(p_RV, q_RV, one_hot_RV, w_R, w_before_R).clamp(min=0)
    weight_RV = torch.where(weight_RV.sum(dim=1, keepdim=True) > 0, weight_RV, p_RV)
    plain = without_filters(batch.params)
    plain = replace(plain, temperature_S=torch.ones_like(plain.temperature_S))
    token_BK1 = verdict.token_BK1.clone()
    token_R = backend.sample(
        Rows(weight_RV.log().float(), plain, batch.slot_B[b_R]),
        Noise(batch.position_B[b_R] + i_R, torch.zeros_like(i_R), RESIDUAL),
    )
    token_BK1[b_R, i_R] = token_R.to(token_BK1.dtype)
    return verdict._replace(token_BK1=token_BK1)


def _softmax(backend: Backend, rows: Rows) -> Tensor:
    return backend.process_logits(rows).double().softmax(dim=1)


def _draft_distribution(
    backend: Backend, batch: VerifyBatch, b_R: Tensor, i_R: Tensor, one_hot_RV: Tensor
) -> Tensor:
    """q of draft i_R of request b_R; `one_hot_RV`, one-hot at the draft, if there is no cache."""
    if batch.drafts.cache is None:
        return one_hot_RV
    slot_R = batch.slot_B[b_R]
    rows_RV = batch.drafts.cache.logits_SKV[slot_R, i_R]
    return _softmax(backend, Rows(rows_RV, batch.params, slot_R))


def _block_weights(backend: Backend, batch: VerifyBatch, p_NV: Tensor) -> Tensor:
    """Weights of the block rule, [B, K + 1]: w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)).

    All requests must have K drafts.
    """
    draft_BK = batch.drafts.token_BK
    b_B = torch.arange(len(batch.slot_B), device=batch.slot_B.device)
    p_BKV = p_NV.view(len(b_B), draft_BK.shape[1] + 1, -1)
    columns = [torch.ones(len(b_B), dtype=torch.float64, device=b_B.device)]
    for i in range(draft_BK.shape[1]):
        draft_B1 = draft_BK[:, i : i + 1]
        one_hot_BV = torch.zeros_like(p_BKV[:, i]).scatter_(1, draft_B1, 1.0)
        q_BV = _draft_distribution(backend, batch, b_B, torch.full_like(b_B, i), one_hot_BV)
        ratio_B = (p_BKV[:, i].gather(1, draft_B1) / q_BV.gather(1, draft_B1)).flatten()
        columns.append((columns[-1] * ratio_B).clamp(max=1.0))
    return torch.stack(columns, dim=1)


RuleMutant = Callable[[rules.Decide], rules.Decide]


def one_uniform(rule: rules.Decide) -> rules.Decide:
    """The first draft's uniform decides all drafts of a round."""
    return lambda x: rule(replace(x, log_u_BK=x.log_u_BK[:, :1].expand_as(x.log_u_BK)))


def early_stop(rule: rules.Decide) -> rules.Decide:
    """The block rule, but all drafts from the first draft with u_i >= h_i on are rejected."""

    def passes(x: rules.RuleInputs, i: int) -> Tensor:
        log_u_BK = x.log_u_BK.clone()
        log_u_BK[:, i + 1 :] = torch.inf  # later drafts fail, so that draft i passes if u_i < h_i
        return rule(replace(x, log_u_BK=log_u_BK))[:, i]

    def mutant(x: rules.RuleInputs) -> Tensor:
        passes_BK = torch.stack([passes(x, i) for i in range(x.log_u_BK.shape[1])], dim=1)
        return passes_BK.long().cumprod(dim=1).bool()

    return mutant


def mass_of_the_row_before(rule: rules.Decide) -> rules.Decide:
    """The block rule computes h_i from the residual mass S_{i-1} instead of S_i."""

    def mutant(x: rules.RuleInputs) -> Tensor:
        if x.residual_mass_BK is None:
            return rule(x)
        return rule(replace(x, residual_mass_BK=x.residual_mass_BK.roll(1, dims=1)))

    return mutant


@contextmanager
def replaced_rule(rule: Rule, mutate: RuleMutant) -> Iterator[None]:
    """Replace one rule of `ops/rules.py` until the context ends."""
    original = rules.RULES[rule]
    rules.RULES[rule] = mutate(original)
    try:
        yield
    finally:
        rules.RULES[rule] = original


@dataclass(frozen=True)
class Mutant:
    """A mutation of the drafter (`propose`), of the backend or of the rule, and its test case."""

    mutation: str
    case: Case
    propose: Callable[[Propose], Propose] | None = None
    backend: Callable[[Backend], Backend] | None = None
    rule: RuleMutant | None = None
    trials: int = TRIALS

    @property
    def name(self) -> str:
        return f"{self.mutation}-{self.case.name}"


def check_mutant(mutant: Mutant, backend: Backend, device: torch.device) -> Finding:
    """The p-value of a mutant's tokens, which must be below `MUTANT_P`."""
    mutated = backend if mutant.backend is None else mutant.backend(backend)
    change = replaced_rule(mutant.case.rule, mutant.rule) if mutant.rule else nullcontext()
    with change:
        _, p = run_case(mutant.case, mutated, device, mutant.trials, mutant.propose)
    return Finding(f"mutant-{mutant.name}", "p_value", p, -1.0, MUTANT_P, mutant.trials)


def _real_q(rule: Rule, filters: str = "no_filter", rounds: int | None = 1) -> Case:
    return Case(rule, 3, "real", filters, False, rounds=rounds)


def mutants() -> list[Mutant]:
    """The mutants that apply to any backend."""
    lossless = (Rule.STANDARD, Rule.BLOCK)
    result = []
    for rule in lossless:
        result += [
            Mutant(propose.__name__, _real_q(rule), propose=propose)
            for propose in (hide_token, cut_before_token, cut_by_total, row_before_of_q)
        ]
        many_rounds = _real_q(rule, rounds=None)
        result += [
            Mutant("shared_stream", _real_q(rule), backend=shared_stream),
            Mutant("same_noise", many_rounds, backend=same_noise_every_round),
            Mutant("mask_drops_drafts", _real_q(rule, "grammar"), backend=mask_drops_drafts),
        ]
        result += [
            Mutant(f"residual_{name}", _real_q(rule), backend=residual_mutant(weights))
            for name, weights in RESIDUALS.items()
        ]
    for rule, filters in zip(
        (*lossless, Rule.COUPLED, *lossless),
        ("top_k", "top_p", "min_p", "penalties", "grammar"),
        strict=True,
    ):
        result.append(Mutant("unfiltered", _real_q(rule, filters), backend=unfiltered))
    for rule, filters in zip(lossless, ("penalties", "grammar"), strict=True):
        case = _real_q(rule, filters)
        result.append(Mutant("edits_before", case, backend=edits_of_the_row_before))
    for name, weights in BLOCK_RESIDUALS.items():
        mutant, case = residual_mutant(weights), _real_q(Rule.BLOCK)
        result.append(Mutant(f"residual_{name}", case, backend=mutant, trials=TRIALS_OF_SUBTLE))
    one_hot = residual_mutant(RESIDUALS["one_hot"])
    result.append(Mutant("residual_one_hot", _real_q(Rule.COUPLED), backend=one_hot))
    return result


def rule_mutants() -> list[Mutant]:
    """Mutants of rules, for the backends in `READ_RULES`."""
    pairs = [(Rule.STANDARD, one_uniform), (Rule.BLOCK, one_uniform)]
    pairs += [(Rule.BLOCK, early_stop), (Rule.BLOCK, mass_of_the_row_before)]
    return [Mutant(mutate.__name__, _real_q(rule), rule=mutate) for rule, mutate in pairs]
