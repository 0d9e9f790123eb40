"""Ways to break the law, each by one replaced function, on any backend: a test must notice them.

Mutants of the drafter wrap a `propose`; mutants of verification and of drafting wrap a backend;
what neither can reach, the decision itself, is a mutant of a rule in `ops/rules.py` and runs on the
backends that read those. `law_mutant_cases.py` lists which must be noticed in which case.

Shapes: B requests, K drafts, N rows, R rejected requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.ops import (
    RESIDUAL,
    Backend,
    DraftBlock,
    Noise,
    Rows,
    Rule,
    SlotParams,
    Verdict,
    VerifyBatch,
    rules,
)
from tests.support.law import Propose


class Replaced:
    """A backend with some functions replaced."""

    def __init__(self, backend: Backend, **functions: Callable[..., Any]) -> None:
        self._backend = backend
        for name, function in functions.items():
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


# Drafters -----------------------------------------------------------------------------------------


def hide_token(propose: Propose, token: int = 2) -> Propose:
    """A sampled draft becomes a placeholder because of what it is."""

    def mutant(*args: Tensor) -> DraftBlock:
        drafts = propose(*args)
        return replace(drafts, token_BK=drafts.token_BK.masked_fill(drafts.token_BK == token, -1))

    return mutant


def cut_by_prefix(propose: Propose) -> Propose:
    """Legitimate: a draft's length, 0 included, depends on what was known before it was drafted."""

    def ragged(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        drafts = propose(prefix_BL, slot_B, position_B)
        most = drafts.token_BK.shape[1]
        num_B = (prefix_BL.sum(dim=1) + position_B) % (most + 1)
        return replace(drafts, num_B=torch.minimum(num_B, drafts.num_B))

    return ragged


def without_drafts(propose: Propose) -> Propose:
    """Legitimate: no request has a draft, and the block of drafts no column."""

    def none(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        no_BK = slot_B.new_zeros(len(slot_B), 0)
        return DraftBlock(no_BK, torch.zeros_like(slot_B), None, slot_B < 0)

    return none


def cut_before_token(propose: Propose, token: int = 2) -> Propose:
    """A draft ends before a token because that token was sampled there."""

    def mutant(*args: Tensor) -> DraftBlock:
        drafts = propose(*args)
        kept_BK = (drafts.token_BK != token).long().cumprod(dim=1)
        return replace(drafts, num_B=torch.minimum(kept_BK.sum(dim=1), drafts.num_B))

    return mutant


def row_before_of_q(propose: Propose) -> Propose:
    """Every draft is verified against the q of the one before."""

    def mutant(*args: Tensor) -> DraftBlock:
        drafts = propose(*args)
        cache = drafts.cache
        assert cache is not None
        rolled = {
            name: getattr(cache, name).roll(1, dims=1)
            for name in ("logits_SKV", "threshold_SK", "lse_SK")
        }
        return replace(drafts, cache=replace(cache, **rolled))

    return mutant


# Backends -----------------------------------------------------------------------------------------


def shared_stream(backend: Backend) -> Replaced:
    """Drafts are drawn with the residual's noise; the q that is kept is right."""

    def draft(rows: Rows, noise: Noise, cache: Any) -> Tensor:
        backend.draft(rows, noise, cache)
        zero_N = torch.zeros_like(noise.draft_index_N)
        return backend.sample(rows, noise._replace(draft_index_N=zero_N, streams=RESIDUAL))

    return Replaced(backend, draft=draft)


def same_noise_every_round(backend: Backend) -> Replaced:
    """Verification forgets where it is: uniforms and residual noise come again each round."""

    def verify(batch: VerifyBatch) -> Verdict:
        return backend.verify(batch._replace(position_B=torch.zeros_like(batch.position_B)))

    return Replaced(backend, verify=verify)


def unfiltered(backend: Backend) -> Replaced:
    """Drafts are verified against the target without its filters and edits."""

    def verify(batch: VerifyBatch) -> Verdict:
        params = batch.params
        off = replace(
            params,
            top_k_S=torch.zeros_like(params.top_k_S),
            top_p_S=torch.ones_like(params.top_p_S),
            min_p_S=torch.zeros_like(params.min_p_S),
        )
        return backend.verify(batch._replace(params=off, edits=None))

    return Replaced(backend, verify=verify)


def edits_of_the_row_before(backend: Backend) -> Replaced:
    """Off by one inside the draft: each row's edits are those of the row before it."""

    def verify(batch: VerifyBatch) -> Verdict:
        logits_NV, edits = batch.logits_NV, batch.edits
        assert edits is not None
        before_N = (torch.arange(len(logits_NV), device=logits_NV.device) - 1).clamp(min=0)
        count_N = edits.start_N1.diff()[before_N]
        start_N1 = torch.cat([count_N.new_zeros(1), count_N.cumsum(0)])
        index_M = torch.arange(int(start_N1[-1]), device=logits_NV.device)
        index_M += (edits.start_N1[before_N] - start_N1[:-1]).repeat_interleave(count_N)
        moved = replace(
            edits,
            mask_N=None if edits.mask_N is None else edits.mask_N[before_N],
            start_N1=start_N1,
            **{n: getattr(edits, n)[index_M] for n in _ENTRIES},
        )
        return backend.verify(batch._replace(edits=moved))

    return Replaced(backend, verify=verify)


_ENTRIES = ("token_M", "bias_M", "repetition_M", "subtract_M")


def mask_drops_drafts(backend: Backend) -> Replaced:
    """A sampled draft that the grammar forbids becomes a placeholder before it is verified."""

    def verify(batch: VerifyBatch) -> Verdict:
        drafts, edits = batch.drafts, batch.edits
        assert edits is not None
        assert edits.mask_N is not None
        assert edits.mask_RW is not None
        token_BK = drafts.token_BK.clamp(min=0)
        index_K = torch.arange(token_BK.shape[1], device=token_BK.device)
        row_BK = _first_row(drafts)[:, None] + index_K
        mask_BK = edits.mask_N[row_BK.clamp(max=len(batch.logits_NV) - 1)]
        word_BK = edits.mask_RW[mask_BK, (token_BK // 32).clamp(max=edits.mask_RW.shape[1] - 1)]
        forbidden_BK = (word_BK.long() >> (token_BK % 32)) & 1 == 0
        drafts = replace(drafts, token_BK=drafts.token_BK.masked_fill(forbidden_BK, -1))
        return backend.verify(batch._replace(drafts=drafts))

    return Replaced(backend, verify=verify)


def _first_row(drafts: DraftBlock) -> Tensor:
    return (drafts.num_B + 1).cumsum(0) - drafts.num_B - 1


Weights = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(p_RV, q_RV, one-hot of the draft [R, V], weight w_tau, weight w_{tau-1}) -> masses [R, V]."""


def residual(masses: Weights) -> Callable[[Backend], Replaced]:
    """Rejected requests draw their token from other masses, with the residual's noise."""

    def build(backend: Backend) -> Replaced:
        def verify(batch: VerifyBatch) -> Verdict:
            verdict = backend.verify(batch)
            logits_NV, params, slot_B, position_B, drafts, edits, *_ = batch
            b_R = torch.nonzero(verdict.n_accept_B < drafts.num_B).flatten()
            i_R = verdict.n_accept_B[b_R]
            slot_N = slot_B.repeat_interleave(drafts.num_B + 1)
            processed_NV = backend.process_logits(Rows(logits_NV, params, slot_N, edits))
            p_NV = processed_NV.double().softmax(dim=1)
            p_RV = p_NV[_first_row(drafts)[b_R] + i_R]
            x_RV = torch.zeros_like(p_RV).scatter_(1, drafts.token_BK[b_R, i_R][:, None], 1.0)
            q_RV = _draft_law(backend, params, slot_B[b_R], drafts, i_R, x_RV)
            weight_BK1 = _block_weights(backend, params, slot_B, drafts, p_NV)
            mass_RV = masses(
                p_RV, q_RV, x_RV, weight_BK1[b_R, i_R], weight_BK1[b_R, (i_R - 1).clamp(min=0)]
            ).clamp(min=0)
            mass_RV = torch.where(mass_RV.sum(dim=1, keepdim=True) > 0, mass_RV, p_RV)
            token_R = backend.sample(
                Rows(mass_RV.log().float(), _plain(params), slot_B[b_R]),
                Noise(position_B[b_R] + i_R, torch.zeros_like(i_R), RESIDUAL),
            )
            token_BK1 = verdict.token_BK1.clone()
            token_BK1[b_R, i_R] = token_R.to(token_BK1.dtype)
            return replace(verdict, token_BK1=token_BK1)

        return Replaced(backend, verify=verify)

    return build


def _plain(params: SlotParams) -> SlotParams:
    """T = 1, no filter."""
    return replace(
        params,
        temperature_S=torch.ones_like(params.temperature_S),
        top_k_S=torch.zeros_like(params.top_k_S),
        top_p_S=torch.ones_like(params.top_p_S),
        min_p_S=torch.zeros_like(params.min_p_S),
    )


def _draft_law(
    backend: Backend,
    params: SlotParams,
    slot_R: Tensor,
    drafts: DraftBlock,
    i_R: Tensor,
    x_RV: Tensor,
) -> Tensor:
    if drafts.cache is None:
        return x_RV
    rows = drafts.cache.logits_SKV[slot_R, i_R]
    return backend.process_logits(Rows(rows, params, slot_R)).double().softmax(dim=1)


def _block_weights(
    backend: Backend, params: SlotParams, slot_B: Tensor, drafts: DraftBlock, p_NV: Tensor
) -> Tensor:
    """p_0 = 1, p_i = min(1, p_{i-1} p(x_i) / q(x_i)), for drafts of one length: [B, K + 1]."""
    most = drafts.token_BK.shape[1]
    p_BKV = p_NV.view(len(slot_B), most + 1, -1)
    columns = [torch.ones(len(slot_B), dtype=torch.float64, device=slot_B.device)]
    for i in range(most):
        x_B1 = drafts.token_BK[:, i : i + 1]
        x_BV = torch.zeros_like(p_BKV[:, i]).scatter_(1, x_B1, 1.0)
        q_BV = _draft_law(backend, params, slot_B, drafts, torch.full_like(slot_B, i), x_BV)
        ratio = (p_BKV[:, i].gather(1, x_B1) / q_BV.gather(1, x_B1)).flatten()
        columns.append((columns[-1] * ratio).clamp(max=1.0))
    return torch.stack(columns, dim=1)


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


# Rules --------------------------------------------------------------------------------------------


RuleMutant = Callable[[rules.Decide], rules.Decide]


def one_uniform(rule: rules.Decide) -> rules.Decide:
    """All drafts of a round are decided by the first one's uniform."""
    return lambda x: rule(replace(x, log_u_BK=x.log_u_BK[:, :1].expand_as(x.log_u_BK)))


def early_stop(rule: rules.Decide) -> rules.Decide:
    """The block rule's h_i, but stopping at the first that fails."""

    def mutant(x: Any) -> Tensor:
        alone = torch.stack([_reached(rule, x, i) for i in range(x.log_u_BK.shape[1])], dim=1)
        return alone.long().cumprod(dim=1).bool()

    return mutant


def _reached(rule: rules.Decide, x: Any, i: int) -> Tensor:
    """Whether u_i < h_i: what the rule says once every later uniform fails."""
    log_u_BK = x.log_u_BK.clone()
    log_u_BK[:, i + 1 :] = torch.inf
    return rule(replace(x, log_u_BK=log_u_BK))[:, i]


def mass_of_the_row_before(rule: rules.Decide) -> rules.Decide:
    """h_i is made of S_{i-1} instead of S_i."""

    def mutant(x: Any) -> Tensor:
        return rule(replace(x, residual_mass_BK=x.residual_mass_BK.roll(1, dims=1)))

    return mutant


@contextmanager
def replaced_rule(rule: Rule, mutate: RuleMutant) -> Iterator[None]:
    """`ops/rules.py` with one rule changed, for the backends that read it there."""
    real = rules.RULES[rule]
    rules.RULES[rule] = mutate(real)
    try:
        yield
    finally:
        rules.RULES[rule] = real
