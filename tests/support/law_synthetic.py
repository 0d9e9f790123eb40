"""Laws of the synthetic rule: acceptance at the stated rates, whatever target and draft say.

Shapes: B requests, K drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from foretoken.config import SpeculativeConfig
from foretoken.ops import Backend, DraftBlock, Rule, VerifyBatch
from foretoken.sampling.synthetic import rates_of
from tests.support.law import Propose, TableDrafter, emit
from tests.support.law_cases import Finding
from tests.support.law_model import Setting, random_chain

TRIALS = 40_960
NEAR = 0.01
RATES = (0.9, 0.6, 1.0, 0.0)  # conditional
MEANS = tuple(i / 10 for i in range(11))
DRAFTS = (1, 2, 3, 5, 10)


def observed_rates(
    backend: Backend,
    device: torch.device,
    rates: Sequence[float],
    *,
    temperature: float = 1.0,
    real_q: bool = True,
    ragged: bool = False,
    fp64_noise: bool = False,
    trials: int = TRIALS,
) -> tuple[list[float], list[int]]:
    """Per draft index, the share of requests with that draft that accepted it; how many had it."""
    target, draft = (chain.to(device) for chain in random_chain(16, 6, 0.5))
    setting = Setting(temperature, rule=Rule.SYNTHETIC, rates=tuple(rates), fp64_noise=fp64_noise)

    def make(params: Any) -> Any:
        drafter = TableDrafter(backend, draft, params, len(rates), real_q, fp64_noise=fp64_noise)
        return cut_by_slot(drafter) if ragged else drafter

    outcome = emit(backend, target, make, setting, length=len(rates) + 1, trials=trials, rounds=1)
    return [a / max(o, 1) for a, o in zip(outcome.accepted, outcome.offered, strict=True)], (
        outcome.offered
    )


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


COMBINATIONS = tuple(itertools.product((0.0, 1.0), (True, False), (False, True)))
SELECTED = ((0.0, True, True), (0.0, False, False), (1.0, True, False), (1.0, False, True))


def per_position(
    backend: Backend,
    device: torch.device,
    combinations: Sequence[tuple[float, bool, bool]] = COMBINATIONS,
) -> list[Finding]:
    """T in {0, 1}, with and without q, equal and ragged lengths; the latter with FP64 noise."""
    findings = []
    for temperature, real_q, ragged in combinations:
        case = f"synthetic-T{temperature:g}-{'real' if real_q else 'one_hot'}"
        case += "-ragged" if ragged else ""
        observed, offered = observed_rates(
            backend, device, RATES, temperature=temperature, real_q=real_q, ragged=ragged,
            fp64_noise=ragged, trials=(1 + ragged) * TRIALS,
        )  # fmt: skip
        findings += rate_findings(case, observed, offered, RATES)
    return findings


def mean_rates(
    backend: Backend,
    device: torch.device,
    means: Sequence[float] = MEANS,
    drafts: Sequence[int] = DRAFTS,
) -> list[Finding]:
    """A mean rate r through the solver: what is accepted of all drafts is r."""
    findings = []
    for num_drafts in drafts:
        for mean in means:
            config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=num_drafts,
                rejection_sample_method="synthetic",
                synthetic_acceptance_rate=mean,
            )
            rates = rates_of(config)
            observed, offered = observed_rates(backend, device, rates, real_q=False)
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
    logits_NV = torch.randn(
        3 * trials, 16, generator=torch.Generator(device).manual_seed(1), device=device
    )
    best_BK1 = logits_NV.argmax(dim=1).view(trials, 3)
    slot_B = torch.arange(trials, device=device)
    drafts = DraftBlock(best_BK1[:, :2].contiguous(), torch.full_like(slot_B, 2), None, slot_B < 0)
    verdict = backend.verify(
        VerifyBatch(
            logits_NV,
            setting.params(trials, 8, device),
            slot_B,
            torch.zeros_like(slot_B),
            drafts,
            synthetic_rate_K=torch.tensor(rates, dtype=torch.float64, device=device),
        )
    )
    index_K1 = torch.arange(3, device=device)
    expected_BK1 = best_BK1.masked_fill(index_K1 > verdict.n_accept_B[:, None], -1)
    wrong = int((verdict.token_BK1 != expected_BK1).any(dim=1).sum())
    findings = [Finding("synthetic-greedy-tokens", "wrong", wrong, -1, 1, trials)]
    observed = [float((verdict.n_accept_B > i).double().mean()) for i in range(2)]
    return findings + rate_findings("synthetic-greedy", observed, [trials] * 2, rates)
