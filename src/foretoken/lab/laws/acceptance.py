"""Laws of acceptance: how many drafts each rule accepts.

Shapes as in `laws/__init__.py`; P paths, that is, sequences of drafts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from foretoken.config import SpeculativeConfig
from foretoken.lab.laws.chain import (
    TRIALS,
    Chain,
    Propose,
    Setting,
    TableDrafter,
    batches,
    emit,
    random_chain,
)
from foretoken.lab.laws.findings import Finding, fit, none_finding, p_finding, z_finding
from foretoken.ops import (
    DRAFT,
    Backend,
    DraftBlock,
    DraftCache,
    Noise,
    Rows,
    Rule,
    SlotParams,
    VerifyBatch,
)
from foretoken.sampling.synthetic import rates_of

RATIO_RULES = (Rule.STANDARD, Rule.BLOCK)  # lossless rules that compare u with ratios of p and q
# Keys with which the first 32-bit word of acceptance noise (position 0, draft 0) is 0 or 2^32 - 1,
# found by trying all. u is then 2^-33 or, clamped, 1 - 2^-24; in FP64 within 2^-32 of 0 or of 1.
LOWEST_U, HIGHEST_U = 2059081754, 2564521510


def accepted_moments(
    p_CV: Tensor, q_CV: Tensor, chain: Chain, num_drafts: int, rule: Rule
) -> tuple[float, float]:
    """Exact mean and variance of the number tau of accepted drafts in a round, over all paths.

    `standard` (Leviathan et al. 2023): P(tau >= i | path) = prod_{j <= i} min(1, p / q). `block`
    (Sun et al. 2024, algorithm 2): P(tau = i | path) = h_i prod_{j > i} (1 - h_j).
    """
    vocabulary = p_CV.shape[1]
    path_PK = torch.cartesian_prod(*[torch.arange(vocabulary)] * num_drafts).view(-1, num_drafts)
    row_P = torch.arange(len(path_PK))
    context_P = [chain.context(path_PK, torch.full_like(row_P, i)) for i in range(num_drafts + 1)]
    chance_P, ratios = torch.ones(len(path_PK), dtype=torch.float64), []
    for i in range(num_drafts):
        p_P, q_P = (x_CV[context_P[i], path_PK[:, i]] for x_CV in (p_CV, q_CV))
        chance_P = chance_P * q_P
        ratios.append(torch.where(q_P > 0, p_P / q_P, 0.0))
    if rule is Rule.STANDARD:
        reached_PK = torch.stack(ratios, dim=1).clamp(max=1.0).cumprod(dim=1)
    else:
        weight_P, failures = torch.ones_like(chance_P), []
        for i, ratio_P in enumerate(ratios, 1):
            weight_P = (weight_P * ratio_P).clamp(max=1.0)
            h_P = weight_P  # for the last draft
            if i < num_drafts:
                weighted_PV = weight_P[:, None] * p_CV[context_P[i]]
                mass_P = (weighted_PV - q_CV[context_P[i]]).clamp(min=0).sum(dim=1)
                h_P = (mass_P / (mass_P + 1 - weight_P)).nan_to_num(nan=1.0)
            failures.append(1 - h_P)
        # tau < i only if u_j >= h_j for all j >= i.
        reached_PK = 1 - torch.stack(failures, dim=1).flip(1).cumprod(dim=1).flip(1)
    index_K = torch.arange(1, num_drafts + 1, dtype=torch.float64)
    mean = float((chance_P[:, None] * reached_PK).sum())
    mean_square = float((chance_P[:, None] * reached_PK * (2 * index_K - 1)).sum())
    return mean, mean_square - mean**2


def mean_accepted(
    backend: Backend, device: torch.device, trials: int = TRIALS, num_drafts: int = 3
) -> list[Finding]:
    """Rounds accept as many drafts on average as theory says, with any kind of q and noise."""
    target, draft = random_chain(5, 2, 0.7)
    device_target, device_draft = target.to(device), draft.to(device)
    best_C = target.logits_CV.argmax(dim=1)
    findings = []
    for rule, real_q in itertools.product(RATIO_RULES, (True, False)):
        name = f"mean_accepted-{rule.name.lower()}-{'real' if real_q else 'one_hot'}"
        means, error = [], 0.0
        for width, fp64 in (("fp32", False), ("fp64", True)):
            setting = Setting(0.8, rule=rule, fp64_noise=fp64)
            one_hot_CV = torch.nn.functional.one_hot(best_C, 5).double()
            q_CV = setting.next_token(draft) if real_q else one_hot_CV
            mean, variance = accepted_moments(
                setting.next_token(target), q_CV, target, num_drafts, rule
            )
            make_propose = partial(
                TableDrafter, backend, device_draft, num_drafts=num_drafts, real_q=real_q,
                lookup=None if real_q else best_C.to(device), fp64_noise=fp64,
            )  # fmt: skip
            emission = emit(
                backend, device_target, make_propose, setting,
                length=num_drafts + 1, trials=trials, seed=3 + fp64, rounds=1,
            )  # fmt: skip
            means.append(sum(emission.accepted) / trials)
            error = math.sqrt(variance / trials)
            findings.append(z_finding(f"{name}-{width}", means[-1], mean, error, trials))
        equal = z_finding(f"{name}-fp32=fp64", means[0], means[1], math.sqrt(2) * error, trials)
        findings.append(equal)
    return findings


def one_round(
    backend: Backend,
    target_V: Tensor,
    draft_V: Tensor,
    setting: Setting,
    trials: int,
    draft_setting: Setting | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw and verify one draft per request: (n_accept, first emitted token), [trials] each.

    draft_setting: how drafts are drawn; None: with `setting`
    """
    device = target_V.device
    accept_counts, first_tokens = [], []
    for batch_index, num in batches(trials, device, 12 * max(len(target_V), len(draft_V))):
        seed = 7_000_021 + batch_index
        params = setting.params(num, seed, device)
        draft_params = (draft_setting or setting).params(num, seed, device)
        slot_B = torch.arange(num, device=device)
        zero_B = torch.zeros_like(slot_B)
        cache = DraftCache.empty(num, 1, len(draft_V), draft_V.dtype, device)
        rows = Rows(draft_V.expand(num, -1).contiguous(), draft_params, slot_B)
        token_B = backend.draft(rows, Noise(zero_B, zero_B, DRAFT, setting.fp64_noise), cache)
        drafts = DraftBlock(token_B[:, None], zero_B + 1, cache, zero_B == 0)
        rows_NV = target_V.expand(2 * num, -1).contiguous()
        batch = VerifyBatch(rows_NV, params, slot_B, zero_B, drafts)
        verdict = backend.verify(batch._replace(**setting.options(device)))
        accept_counts.append(verdict.n_accept_B)
        first_tokens.append(verdict.token_BK1[:, 0])
    return torch.cat(accept_counts), torch.cat(first_tokens)


def first_token_finding(case: str, token_B: Tensor, next_V: Tensor) -> Finding:
    """The p-value of the first emitted tokens under P(token), `next_V`."""
    p = fit(torch.bincount(token_B, minlength=len(next_V)), next_V)
    return p_finding(f"{case}-law", p, len(token_B))


def overlap(backend: Backend, device: torch.device, trials: int = TRIALS) -> list[Finding]:
    """`standard` and `block` accept a single draft with probability sum_x min(p(x), q(x))."""
    findings = []
    for seed, rule in enumerate(RATIO_RULES * 2):
        generator = torch.Generator().manual_seed(seed)
        target_V, draft_V = torch.randn(2, 12, generator=generator)
        expected = float(torch.minimum(target_V.softmax(0), draft_V.softmax(0)).sum())
        error = math.sqrt(expected * (1 - expected) / trials)
        setting = Setting(rule=rule, fp64_noise=seed >= 2)
        n_accept, token_B = one_round(
            backend, target_V.to(device), draft_V.to(device), setting, trials
        )
        name = f"overlap-{rule.name.lower()}-{'fp64' if seed >= 2 else 'fp32'}"
        share = float(n_accept.double().mean())
        findings.append(z_finding(name, share, expected, error, trials))
        findings.append(first_token_finding(name, token_B, target_V.softmax(0)))
    return findings


def share_finding(case: str, n_accept: Tensor, expected: float) -> Finding:
    """The share of accepted drafts, which must be the expected share (0 or 1) exactly."""
    share = float(n_accept.double().mean())
    return Finding(case, "accepted", share, expected - 1e-9, expected + 1e-9, len(n_accept))


def always_and_never(backend: Backend, device: torch.device, trials: int = TRIALS) -> list[Finding]:
    """Every draft is accepted if q equals p, and no draft if p and q have no token in common."""
    findings = []
    generator = torch.Generator().manual_seed(0)
    equal_V = (torch.randn(12, generator=generator) * 5).to(device)
    target_V, draft_V = torch.full((2, 12), -torch.inf, device=device)
    target_V[:6], draft_V[6:] = torch.arange(6, device=device) / 3, 0.0
    for rule in RATIO_RULES:
        name = rule.name.lower()
        for temperature in (0.0, 0.3, 1.0, 2.0):
            setting = Setting(temperature, rule=rule)
            n_accept, _ = one_round(backend, equal_V, equal_V, setting, trials // 4)
            findings.append(share_finding(f"draft=target-{name}-T{temperature:g}", n_accept, 1.0))
        n_accept, token_B = one_round(backend, target_V, draft_V, Setting(rule=rule), trials)
        case, next_V = f"disjoint-{name}", target_V.cpu().softmax(0)
        findings.append(share_finding(case, n_accept, 0.0))
        findings.append(first_token_finding(case, token_B, next_V))
    return findings


def outside_the_nucleus(
    backend: Backend, device: torch.device, trials: int = TRIALS
) -> list[Finding]:
    """Unfiltered drafts for a filtered target: some drafts are accepted, but not all, and emitted
    tokens have the filtered distribution."""
    findings = []
    target_V = torch.randn(12, generator=torch.Generator().manual_seed(3))
    device_V = target_V.to(device)
    variants: list[dict[str, Any]] = [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.3}]
    for rule, filters in itertools.product(RATIO_RULES, variants):
        setting = Setting(rule=rule, **filters)
        n_accept, token_B = one_round(
            backend, device_V, -device_V / 2, setting, trials, Setting(rule=rule)
        )
        name = f"nucleus-{rule.name.lower()}-{next(iter(filters))}"
        findings.append(
            first_token_finding(name, token_B, setting.next_token(Chain(target_V[None]))[0])
        )
        share = float(n_accept.double().mean())
        findings.append(Finding(name, "accepted", share, 0.01, 0.99, trials))
    return findings


def ends_of_u(backend: Backend, device: torch.device) -> list[Finding]:
    """With u at both ends of its range, a draft with p = 0 is never accepted, with p = q always."""
    draft = 5
    draft_V = torch.linspace(0.0, 3.0, 8, device=device)
    banned_V = torch.zeros(8, device=device)
    banned_V[draft] = -torch.inf
    filtered_V = draft_V.flip(0)  # token 5 is outside its top 3
    # (name, logits of the target, top-k, expected share of accepted drafts)
    cases = (("p=0", banned_V, 0, 0.0), ("outside", filtered_V, 3, 0.0), ("p=q", draft_V, 0, 1.0))
    ends = (("lowest", LOWEST_U), ("highest", HIGHEST_U))
    findings = []
    for (end, key), rule, fp64 in itertools.product(ends, RATIO_RULES, (False, True)):
        for name, logits_V, top_k, expected in cases:
            setting = Setting(top_k=top_k, rule=rule, fp64_noise=fp64)
            params = replace(setting.params(1, 0, device), key_S=torch.tensor([key], device=device))
            zero_B = torch.zeros(1, dtype=torch.int64, device=device)
            cache = DraftCache.empty(1, 1, 8, draft_V.dtype, device)
            draft_params = Setting(rule=rule).params(1, 0, device)
            rows = Rows(draft_V[None], draft_params, zero_B)
            backend.draft(rows, Noise(zero_B, zero_B, DRAFT), cache)
            drafts = DraftBlock(zero_B[:, None] + draft, zero_B + 1, cache, zero_B == 0)
            batch = VerifyBatch(logits_V.repeat(2, 1), params, zero_B, zero_B, drafts)
            verdict = backend.verify(batch._replace(fp64_noise=fp64))
            case = f"u_{end}-{name}-{rule.name.lower()}-{'fp64' if fp64 else 'fp32'}"
            findings.append(share_finding(case, verdict.n_accept_B, expected))
    return findings


SYNTHETIC_TRIALS = 40_960
RATE_ERROR = 0.01  # four standard errors of a rate of 0.5
RATES = (0.9, 0.6, 1.0, 0.0)  # of each draft index, given that earlier drafts are accepted
MEANS = tuple(i / 10 for i in range(11))
DRAFTS = (1, 2, 3, 5, 10)

Combination = tuple[float, bool, bool]
"""(temperature, whether q is real, whether requests have different numbers of drafts)."""
COMBINATIONS = tuple(itertools.product((0.0, 1.0), (True, False), (False, True)))


def observed_rates(
    backend: Backend,
    device: torch.device,
    rates: Sequence[float],
    combination: Combination = (1.0, True, False),
) -> tuple[list[float], list[int]]:
    """By draft index: the share of accepted drafts, and the number of drafts.

    Requests with different numbers of drafts use FP64 noise, and twice as many trials.
    """
    temperature, real_q, ragged = combination
    target, draft = (chain.to(device) for chain in random_chain(16, 6, 0.5))
    setting = Setting(temperature, rule=Rule.SYNTHETIC, rates=tuple(rates), fp64_noise=ragged)

    def make_propose(params: SlotParams) -> Propose:
        drafter = TableDrafter(backend, draft, params, len(rates), real_q, fp64_noise=ragged)
        return cut_by_slot(drafter) if ragged else drafter

    length, trials = len(rates) + 1, (1 + ragged) * SYNTHETIC_TRIALS
    emission = emit(backend, target, make_propose, setting, length=length, trials=trials, rounds=1)
    offered, accepted = emission.offered, emission.accepted
    return [a / max(o, 1) for a, o in zip(accepted, offered, strict=True)], offered


def cut_by_slot(propose: Propose) -> Propose:
    """Cut the drafts of slots with odd numbers to lengths from 0 to K."""

    def ragged(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        drafts = propose(prefix_BL, slot_B, position_B)
        num_B = torch.where(slot_B % 2 == 0, drafts.num_B, slot_B // 2 % (drafts.num_B + 1))
        return replace(drafts, num_B=num_B)

    return ragged


def rate_findings(
    case: str, observed: Sequence[float], offered: Sequence[int], rates: Sequence[float]
) -> list[Finding]:
    """By draft index: the error of the share of accepted drafts must be below `RATE_ERROR`.

    The expected share is the product of the conditional `rates` up to that index.
    """
    expected = accumulate(rates, mul)
    return [
        Finding(f"{case}-{i}", "rate_error", abs(share - goal), -1e-9, RATE_ERROR, num)
        for i, (share, goal, num) in enumerate(zip(observed, expected, offered, strict=True))
    ]


def per_position(
    backend: Backend, device: torch.device, combinations: Sequence[Combination] = COMBINATIONS
) -> list[Finding]:
    """Drafts are accepted at the rate of each draft index, in each combination."""
    findings = []
    for combination in combinations:
        temperature, real_q, ragged = combination
        case = f"synthetic-T{temperature:g}-{'real' if real_q else 'one_hot'}"
        case += "-ragged" if ragged else ""
        observed, offered = observed_rates(backend, device, RATES, combination)
        findings += rate_findings(case, observed, offered, RATES)
    return findings


def mean_rates(
    backend: Backend,
    device: torch.device,
    means: Sequence[float] = MEANS,
    drafts: Sequence[int] = DRAFTS,
) -> list[Finding]:
    """The share of accepted drafts is the configured `synthetic_acceptance_rate`."""
    findings = []
    for num_drafts, mean in itertools.product(drafts, means):
        config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=num_drafts,
            rejection_sample_method="synthetic", synthetic_acceptance_rate=mean,
        )  # fmt: skip
        observed, offered = observed_rates(backend, device, rates_of(config), (1.0, False, False))
        error = abs(sum(observed) / num_drafts - mean)
        case = f"synthetic_rate{mean:g}-K{num_drafts}"
        findings.append(Finding(case, "rate_error", error, -1e-9, RATE_ERROR, offered[0]))
    return findings


def greedy_rejections(
    backend: Backend, device: torch.device, trials: int = SYNTHETIC_TRIALS
) -> list[Finding]:
    """At T = 0 drafts of the argmax are rejected at the configured rates; argmaxes are emitted."""
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
    unused_BK1 = torch.arange(3, device=device) > verdict.n_accept_B[:, None]
    wrong_BK1 = verdict.token_BK1 != best_BK1.masked_fill(unused_BK1, -1)
    num_wrong = int(wrong_BK1.any(dim=1).sum())
    observed = [float((verdict.n_accept_B > i).double().mean()) for i in range(2)]
    findings = rate_findings("synthetic-greedy", observed, [trials] * 2, rates)
    return [none_finding("synthetic-greedy-tokens", "wrong", num_wrong, trials), *findings]
