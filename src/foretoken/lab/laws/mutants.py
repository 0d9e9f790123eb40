"""Ways to break losslessness by replacing one thing, on any backend; a law must reject each.

Mutants of a drafter wrap its `propose`; mutants of drafting and of verification wrap a backend.
Mutants of the decision itself replace a rule in `ops/rules.py`, for backends that read rules there.
`mutants` and `rule_mutants` list which mutant must be rejected in which case of the joint
distribution.

Shapes as in `laws/__init__.py`; R rejected requests.
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

TRIALS = 20_000  # with these, all mutants except two are rejected at p < 1e-100
TRIALS_OF_SUBTLE = 200_000  # for mutants that differ only after several accepted drafts
READ_RULES = ("torch",)  # backends that take their rules from `ops/rules.py`


def replaced(backend: Backend, **functions: Callable[..., Any]) -> Backend:
    """A copy of the backend with some of its functions replaced."""
    mutant = copy(backend)
    vars(mutant).update(functions)
    return mutant


# Drafters -----------------------------------------------------------------------------------------


def _proposal_mutant(change: Callable[[DraftBlock], DraftBlock]) -> Callable[[Propose], Propose]:
    """Make a mutant of drafters: `change` is applied to each proposal."""

    @wraps(change)
    def mutant(propose: Propose) -> Propose:
        return lambda *arguments: change(propose(*arguments))

    return mutant


@_proposal_mutant
def hide_token(drafts: DraftBlock) -> DraftBlock:
    """Drafts of a certain token become placeholders."""
    return replace(drafts, token_BK=drafts.token_BK.masked_fill(drafts.token_BK == 2, -1))


@_proposal_mutant
def cut_before_token(drafts: DraftBlock) -> DraftBlock:
    """Drafts end before the first one that is a certain token."""
    kept_BK = (drafts.token_BK != 2).long().cumprod(dim=1)
    return replace(drafts, num_B=torch.minimum(kept_BK.sum(dim=1), drafts.num_B))


@_proposal_mutant
def cut_by_total(drafts: DraftBlock) -> DraftBlock:
    """The drafts of two neighbouring requests end before the first index at which either has a
    certain token.
    """
    pair_B = torch.arange(len(drafts.num_B), device=drafts.num_B.device) // 2
    sampled_BK = (drafts.token_BK == 2).long()
    total_BK = torch.zeros_like(sampled_BK).index_add(0, pair_B, sampled_BK)[pair_B]
    kept_BK = (total_BK < 1).long().cumprod(dim=1)
    return replace(drafts, num_B=torch.minimum(kept_BK.sum(dim=1), drafts.num_B))


@_proposal_mutant
def row_before_of_q(drafts: DraftBlock) -> DraftBlock:
    """Every draft is verified with the q of the draft before it."""
    q = drafts.cache
    if q is None:
        return drafts
    rolled = (tensor.roll(1, dims=1) for tensor in (q.logits_SKV, q.threshold_SK, q.lse_SK))
    return replace(drafts, cache=DraftCache(*rolled))


# Backends -----------------------------------------------------------------------------------------


def shared_stream(backend: Backend) -> Backend:
    """Drafts are drawn with the residual's noise; the q in the cache is right."""

    def draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
        backend.draft(rows, noise, cache)
        zero_N = torch.zeros_like(noise.draft_index_N)
        return backend.sample(rows, noise._replace(draft_index_N=zero_N, streams=RESIDUAL))

    return replaced(backend, draft=draft)


def asking(change: Callable[[VerifyBatch], VerifyBatch]) -> Callable[[Backend], Backend]:
    """Make a mutant of backends: `change` is applied to each batch before `verify` gets it."""

    @wraps(change)
    def mutant(backend: Backend) -> Backend:
        return replaced(backend, verify=lambda batch: backend.verify(change(batch)))

    return mutant


@asking
def same_noise_every_round(x: VerifyBatch) -> VerifyBatch:
    """Verification ignores positions: each round uses the same uniforms and residual noise."""
    return x._replace(position_B=torch.zeros_like(x.position_B))


@asking
def unfiltered(x: VerifyBatch) -> VerifyBatch:
    """Drafts are verified against the target without its filters and edits."""
    return x._replace(params=without_filters(x.params), edits=None)


@asking
def edits_of_the_row_before(x: VerifyBatch) -> VerifyBatch:
    """Each row gets the edits of the row before it."""
    if x.edits is None:
        return x
    row_N = torch.arange(len(x.logits_NV), device=x.logits_NV.device)
    return x._replace(edits=edits_of_rows(x.edits, (row_N - 1).clamp(min=0)))


@asking
def mask_drops_drafts(x: VerifyBatch) -> VerifyBatch:
    """A sampled draft that the grammar forbids becomes a placeholder before it is verified."""
    if x.edits is None or x.edits.mask_N is None or x.edits.mask_RW is None:
        return x
    mask_RW, token_BK = x.edits.mask_RW, x.drafts.token_BK.clamp(min=0)
    index_K = torch.arange(token_BK.shape[1], device=token_BK.device)
    row_BK = (first_row(x.drafts)[:, None] + index_K).clamp(max=len(x.logits_NV) - 1)
    word_BK = (token_BK // 32).clamp(max=mask_RW.shape[1] - 1)
    word_BK = mask_RW[x.edits.mask_N[row_BK], word_BK].long()
    forbidden_BK = (word_BK >> (token_BK % 32)) & 1 == 0
    token_BK = x.drafts.token_BK.masked_fill(forbidden_BK, -1)
    return x._replace(drafts=replace(x.drafts, token_BK=token_BK))


def without_filters(params: SlotParams) -> SlotParams:
    """The parameters with top-k, top-p and min-p switched off in all slots."""
    return replace(
        params,
        top_k_S=torch.zeros_like(params.top_k_S),
        top_p_S=torch.ones_like(params.top_p_S),
        min_p_S=torch.zeros_like(params.min_p_S),
    )


# Residuals ----------------------------------------------------------------------------------------


Weights = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(p_RV, q_RV, one-hot of the draft [R, V], weight w_tau, weight w_{tau-1}) -> masses [R, V], which
replace the residual."""

RESIDUALS: dict[str, Weights] = {
    "no_subtraction": lambda p, q, x, w, before: p,
    "one_hot": lambda p, q, x, w, before: p * (1 - x),
    "other_way_round": lambda p, q, x, w, before: q - p,
    "half_the_draft": lambda p, q, x, w, before: p - q / 2,
}
BLOCK_RESIDUALS: dict[str, Weights] = {
    "weight_one": lambda p, q, x, w, before: p - q,
    "weight_before": lambda p, q, x, w, before: before[:, None] * p - q,
}


def residual(masses: Weights) -> Callable[[Backend], Backend]:
    """A function that breaks a backend: it draws replacements of drafts from other masses.

    The noise of the draw stays the residual's.
    """

    def mutant(backend: Backend) -> Backend:
        return replaced(
            backend, verify=lambda batch: _redraw(backend, batch, backend.verify(batch), masses)
        )

    return mutant


def _redraw(backend: Backend, x: VerifyBatch, verdict: Verdict, masses: Weights) -> Verdict:
    """The verdict with the tokens in place of rejected drafts drawn again, from `masses`."""
    b_R = torch.nonzero(verdict.n_accept_B < x.drafts.num_B).flatten()
    i_R = verdict.n_accept_B[b_R]
    slot_N = x.slot_B.repeat_interleave(x.drafts.num_B + 1)
    p_NV = _softmax(backend, Rows(x.logits_NV, x.params, slot_N, x.edits))
    p_RV = p_NV[first_row(x.drafts)[b_R] + i_R]
    x_RV = torch.zeros_like(p_RV).scatter_(1, x.drafts.token_BK[b_R, i_R][:, None], 1.0)
    q_RV = _draft_distribution(backend, x, b_R, i_R, x_RV)
    weight_BK1 = _block_weights(backend, x, p_NV)
    mass_RV = masses(
        p_RV, q_RV, x_RV, weight_BK1[b_R, i_R], weight_BK1[b_R, (i_R - 1).clamp(min=0)]
    ).clamp(min=0)
    mass_RV = torch.where(mass_RV.sum(dim=1, keepdim=True) > 0, mass_RV, p_RV)
    plain = without_filters(x.params)
    plain = replace(plain, temperature_S=torch.ones_like(plain.temperature_S))
    token_BK1 = verdict.token_BK1.clone()
    token_R = backend.sample(
        Rows(mass_RV.log().float(), plain, x.slot_B[b_R]),
        Noise(x.position_B[b_R] + i_R, torch.zeros_like(i_R), RESIDUAL),
    )
    token_BK1[b_R, i_R] = token_R.to(token_BK1.dtype)
    return verdict._replace(token_BK1=token_BK1)


def _softmax(backend: Backend, rows: Rows) -> Tensor:
    return backend.process_logits(rows).double().softmax(dim=1)


def _draft_distribution(
    backend: Backend, x: VerifyBatch, b_R: Tensor, i_R: Tensor, x_RV: Tensor
) -> Tensor:
    """q of draft i_R of request b_R; without a cache it is `x_RV`, one-hot at the draft."""
    if x.drafts.cache is None:
        return x_RV
    slot_R = x.slot_B[b_R]
    rows_RV = x.drafts.cache.logits_SKV[slot_R, i_R]
    return _softmax(backend, Rows(rows_RV, x.params, slot_R))


def _block_weights(backend: Backend, x: VerifyBatch, p_NV: Tensor) -> Tensor:
    """Weights of the block rule, [B, K + 1]: p_0 = 1, p_i = min(1, p_{i-1} p(x_i) / q(x_i)).

    All requests must have K drafts.
    """
    num_drafts = x.drafts.token_BK.shape[1]
    b_B = torch.arange(len(x.slot_B), device=x.slot_B.device)
    p_BKV = p_NV.view(len(b_B), num_drafts + 1, -1)
    columns = [torch.ones(len(b_B), dtype=torch.float64, device=b_B.device)]
    for i in range(num_drafts):
        x_B1 = x.drafts.token_BK[:, i : i + 1]
        x_BV = torch.zeros_like(p_BKV[:, i]).scatter_(1, x_B1, 1.0)
        q_BV = _draft_distribution(backend, x, b_B, torch.full_like(b_B, i), x_BV)
        ratio_B = (p_BKV[:, i].gather(1, x_B1) / q_BV.gather(1, x_B1)).flatten()
        columns.append((columns[-1] * ratio_B).clamp(max=1.0))
    return torch.stack(columns, dim=1)


# Rules --------------------------------------------------------------------------------------------


RuleMutant = Callable[[rules.Decide], rules.Decide]


def one_uniform(rule: rules.Decide) -> rules.Decide:
    """The first draft's uniform decides all drafts of a round."""
    return lambda x: rule(replace(x, log_u_BK=x.log_u_BK[:, :1].expand_as(x.log_u_BK)))


def early_stop(rule: rules.Decide) -> rules.Decide:
    """The block rule with its h_i, but drafts after the first with u_i >= h_i are rejected."""

    def passes(x: rules.RuleInputs, i: int) -> Tensor:
        """Whether u_i < h_i: the rule's decision on draft i if no later draft can be accepted."""
        log_u_BK = x.log_u_BK.clone()
        log_u_BK[:, i + 1 :] = torch.inf
        return rule(replace(x, log_u_BK=log_u_BK))[:, i]

    def mutant(x: rules.RuleInputs) -> Tensor:
        passes_BK = torch.stack([passes(x, i) for i in range(x.log_u_BK.shape[1])], dim=1)
        return passes_BK.long().cumprod(dim=1).bool()

    return mutant


def mass_of_the_row_before(rule: rules.Decide) -> rules.Decide:
    """h_i is computed from S_{i-1} instead of S_i."""

    def mutant(x: rules.RuleInputs) -> Tensor:
        if x.residual_mass_BK is None:
            return rule(x)
        return rule(replace(x, residual_mass_BK=x.residual_mass_BK.roll(1, dims=1)))

    return mutant


@contextmanager
def replaced_rule(rule: Rule, mutate: RuleMutant) -> Iterator[None]:
    """Replace one rule in `ops/rules.py` until the context ends."""
    original = rules.RULES[rule]
    rules.RULES[rule] = mutate(original)
    try:
        yield
    finally:
        rules.RULES[rule] = original


# Cases --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A case with one mutation: of the proposal (`propose`), of the backend, or of the rule.

    what: name of the mutation
    """

    what: str
    case: Case
    propose: Callable[[Propose], Propose] | None = None
    backend: Callable[[Backend], Backend] | None = None
    rule: RuleMutant | None = None
    trials: int = TRIALS

    @property
    def name(self) -> str:
        return f"{self.what}-{self.case.name}"


def check_mutant(mutant: Mutant, backend: Backend, device: torch.device) -> Finding:
    """The p-value of the mutant's tokens, which must be below `MUTANT_P`."""
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
            Mutant(f"residual_{name}", _real_q(rule), backend=residual(masses))
            for name, masses in RESIDUALS.items()
        ]
    for rule, filters in zip(
        (*lossless, Rule.COUPLED, *lossless),
        ("top_k", "top_p", "min_p", "penalties", "grammar"),
        strict=True,
    ):
        result.append(Mutant("unfiltered", _real_q(rule, filters), backend=unfiltered))
    for rule, filters in zip(lossless, ("penalties", "grammar"), strict=True):
        edits_before = _real_q(rule, filters)
        result.append(Mutant("edits_before", edits_before, backend=edits_of_the_row_before))
    for name, masses in BLOCK_RESIDUALS.items():
        subtle, block = residual(masses), _real_q(Rule.BLOCK)
        result.append(Mutant(f"residual_{name}", block, backend=subtle, trials=TRIALS_OF_SUBTLE))
    coupled = residual(RESIDUALS["one_hot"])
    result.append(Mutant("residual_one_hot", _real_q(Rule.COUPLED), backend=coupled))
    return result


def rule_mutants() -> list[Mutant]:
    """Mutants of the decision, for the backends in `READ_RULES`."""
    return [
        Mutant(mutate.__name__, _real_q(rule), rule=mutate)
        for rule, mutate in (
            (Rule.STANDARD, one_uniform),
            (Rule.BLOCK, one_uniform),
            (Rule.BLOCK, early_stop),
            (Rule.BLOCK, mass_of_the_row_before),
        )
    ]
