"""Laws of the synthetic rule: acceptance at the stated rates, whatever target and draft say.

Shapes as in `laws/__init__.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from foretoken.config import SpeculativeConfig
from foretoken.lab.laws.chain import Setting, random_chain
from foretoken.lab.laws.emission import Propose, TableDrafter, emit
from foretoken.lab.laws.findings import Finding, none_finding
from foretoken.ops import Backend, DraftBlock, Rule, SlotParams, VerifyBatch
from foretoken.sampling.synthetic import rates_of

TRIALS = 40_960
NEAR = 0.01
RATES = (0.9, 0.6, 1.0, 0.0)  # conditional
MEANS = tuple(i / 10 for i in range(11))
DRAFTS = (1, 2, 3, 5, 10)

Combination = tuple[float, bool, bool]
"""(temperature, with a real q, with ragged lengths)."""
COMBINATIONS: tuple[Combination, ...] = tuple(
    itertools.product((0.0, 1.0), (True, False), (False, True))
)


def observed_rates(
    backend: Backend,
    device: torch.device,
    rates: Sequence[float],
    combination: Combination = (1.0, True, False),
) -> tuple[list[float], list[int]]:
    """Per draft index, the share of requests with that draft that accepted it; how many had it.

    Ragged lengths have FP64 noise, and twice the trials.
    """
    temperature, real_q, ragged = combination
    target, draft = (chain.to(device) for chain in random_chain(16, 6, 0.5))
    setting = Setting(temperature, rule=Rule.SYNTHETIC, rates=tuple(rates), fp64_noise=ragged)

    def make(params: SlotParams) -> Propose:
        drafter = TableDrafter(backend, draft, params, len(rates), real_q, fp64_noise=ragged)
        return cut_by_slot(drafter) if ragged else drafter

    length, trials = len(rates) + 1, (1 + ragged) * TRIALS
    emission = emit(backend, target, make, setting, length=length, trials=trials, rounds=1)
    offered, accepted = emission.offered, emission.accepted
    return [a / max(o, 1) for a, o in zip(accepted, offered, strict=True)], offered


def cut_by_slot(propose: Propose) -> Propose:
    """Every other request has all its drafts, the others 0 to K."""

    def ragged(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        drafts = propose(prefix_BL, slot_B, position_B)
        num_B = torch.where(slot_B % 2 == 0, drafts.num_B, slot_B // 2 % (drafts.num_B + 1))
        return replace(drafts, num_B=num_B)

    return ragged


def rate_findings(
    case: str, observed: Sequence[float], offered: Sequence[int], rates: Sequence[float]
) -> list[Finding]:
    """|observed - stated| < 0.01 of the unconditional rate at each index."""
    stated = accumulate(rates, mul)
    return [
        Finding(f"{case}-{i}", "rate_error", abs(found - rate), -1e-9, NEAR, num)
        for i, (found, rate, num) in enumerate(zip(observed, stated, offered, strict=True))
    ]


def per_position(
    backend: Backend, device: torch.device, combinations: Sequence[Combination] = COMBINATIONS
) -> list[Finding]:
    """T in {0, 1}, with and without q, equal and ragged lengths."""
    findings = []
    for combination in combinations:
        temperature, real_q, ragged = combination
        case = f"synthetic-T{temperature:g}-{'real' if real_q else 'one_hot'}"
        case += "-ragged" if ragged else ""
        found = observed_rates(backend, device, RATES, combination)
        findings += rate_findings(case, *found, RATES)
    return findings


def mean_rates(
    backend: Backend,
    device: torch.device,
    means: Sequence[float] = MEANS,
    drafts: Sequence[int] = DRAFTS,
) -> list[Finding]:
    """A mean rate r through the solver: what is accepted of all drafts is r."""
    findings = []
    for num_drafts, mean in itertools.product(drafts, means):
        config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=num_drafts,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rate=mean,
        )
        observed, offered = observed_rates(backend, device, rates_of(config), (1.0, False, False))
        error = abs(sum(observed) / num_drafts - mean)
        case = f"synthetic_rate{mean:g}-K{num_drafts}"
        findings.append(Finding(case, "rate_error", error, -1e-9, NEAR, offered[0]))
    return findings


def greedy_rejections(
    backend: Backend, device: torch.device, trials: int = TRIALS
) -> list[Finding]:
    """At T=0 a rejection emits the argmax and counts as one even if the draft was just that."""
    rates = (0.7, 0.5)
    setting = Setting(0.0, rule=Rule.SYNTHETIC, rates=rates)
    generator = torch.Generator(device).manual_seed(1)
    logits_NV = torch.randn(3 * trials, 16, generator=generator, device=device)
    best_BK1 = logits_NV.argmax(dim=1).view(trials, 3)
    slot_B = torch.arange(trials, device=device)
    drafts = DraftBlock(best_BK1[:, :2].contiguous(), torch.full_like(slot_B, 2), None, slot_B < 0)
    params = setting.params(trials, 8, device)
    batch = VerifyBatch(logits_NV, params, slot_B, torch.zeros_like(slot_B), drafts)
    verdict = backend.verify(batch._replace(**setting.options(device)))
    behind_BK1 = torch.arange(3, device=device) > verdict.n_accept_B[:, None]
    wrong_BK1 = verdict.token_BK1 != best_BK1.masked_fill(behind_BK1, -1)
    wrong = int(wrong_BK1.any(dim=1).sum())
    observed = [float((verdict.n_accept_B > i).double().mean()) for i in range(2)]
    return [
        none_finding("synthetic-greedy-tokens", "wrong", wrong, trials),
        *rate_findings("synthetic-greedy", observed, [trials] * 2, rates),
    ]
