"""Laws of acceptance: how many drafts each rule accepts, against exact enumeration, and never what.

Shapes: B requests, K drafts, V vocabulary, C contexts, P paths of drafts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.ops import DRAFT, Backend, DraftBlock, DraftCache, Noise, Rows, Rule, VerifyBatch
from tests.support.law import TRIALS, WAVE, TableDrafter, emit, p_value
from tests.support.law_cases import Finding, p_finding
from tests.support.law_model import Chain, Setting, random_chain

LOSSLESS = (Rule.STANDARD, Rule.BLOCK)
SIGMAS = 4.0
# Keys whose first ACCEPT word at position 0, draft 0 is 0 and 2^32 - 1, found by trying them all:
# the acceptance uniform is 2^-33 and, clamped, 1 - 2^-24 (in FP64, below 2^-32 of either end).
LOWEST_U, HIGHEST_U = 2059081754, 2564521510


def z_finding(case: str, found: float, expected: float, error: float, trials: int) -> Finding:
    """A mean within four standard errors; one without any spread must be met exactly."""
    z = (found - expected) / error if error > 0 else (found != expected) * math.inf
    return Finding(case, "z", 0.0 if math.isnan(z) else z, -SIGMAS, SIGMAS, trials)


def accepted_moments(
    p_CV: Tensor, q_CV: Tensor, chain: Chain, num_drafts: int, rule: Rule
) -> tuple[float, float]:
    """Mean and variance of the accepted drafts of one round, over every path of drafts.

    `standard` (Leviathan et al. 2023): P(tau >= i | path) = prod_{j <= i} min(1, p / q). `block`
    (Sun et al. 2024, algorithm 2): P(tau = i | path) = h_i prod_{j > i} (1 - h_j).
    """
    vocabulary = p_CV.shape[1]
    path_PK = torch.cartesian_prod(*[torch.arange(vocabulary)] * num_drafts).view(-1, num_drafts)
    row_P = torch.arange(len(path_PK))
    chance_P, weight_P, h = torch.ones(len(path_PK), dtype=torch.float64), [], []
    ratios, contexts = [], []
    for i in range(num_drafts + 1):
        context_P = chain.context(path_PK, torch.full_like(row_P, i))
        contexts.append(context_P)
        if i < num_drafts:
            p_P, q_P = p_CV[context_P, path_PK[:, i]], q_CV[context_P, path_PK[:, i]]
            chance_P = chance_P * q_P
            ratios.append(torch.where(q_P > 0, p_P / q_P, 0.0))
    if rule is Rule.STANDARD:
        reached = torch.stack(ratios, dim=1).clamp(max=1.0).cumprod(dim=1)
    else:
        weight_P = torch.ones_like(chance_P)
        for i, ratio_P in enumerate(ratios):
            weight_P = (weight_P * ratio_P).clamp(max=1.0)
            if i == num_drafts - 1:
                h.append(weight_P)
                break
            mass_P = (weight_P[:, None] * p_CV[contexts[i + 1]] - q_CV[contexts[i + 1]]).clamp(
                min=0
            )
            h_P = mass_P.sum(dim=1) / (mass_P.sum(dim=1) + 1 - weight_P)
            h.append(h_P.nan_to_num(nan=1.0))
        # tau >= i unless every u_j fails from i on
        failed = torch.stack([1 - x for x in h], dim=1).flip(1).cumprod(dim=1).flip(1)
        reached = 1 - failed
    index = torch.arange(1, num_drafts + 1, dtype=torch.float64)
    mean = float((chance_P[:, None] * reached).sum())
    second = float((chance_P[:, None] * reached * (2 * index - 1)).sum())
    return mean, second - mean**2


def one_hot_of(lookup_C: Tensor, vocabulary: int) -> Tensor:
    return torch.nn.functional.one_hot(lookup_C, vocabulary).double()


def mean_accepted(
    backend: Backend, device: torch.device, trials: int = TRIALS, num_drafts: int = 3
) -> list[Finding]:
    """Accepted drafts per round of both rules, real and one-hot q, both widths of noise."""
    target, draft = random_chain(5, 2, 0.7)
    findings = []
    for rule in LOSSLESS:
        for real_q in (True, False):
            means = []
            for fp64 in (False, True):
                setting = Setting(0.8, rule=rule, fp64_noise=fp64)
                lookup_C = None if real_q else target.logits_CV.argmax(dim=1)
                q_CV = setting.next_law(draft) if lookup_C is None else one_hot_of(lookup_C, 5)
                mean, variance = accepted_moments(
                    setting.next_law(target), q_CV, target, num_drafts, rule
                )
                drafter_of = _drafter(backend, draft.to(device), setting, num_drafts, lookup_C)
                outcome = emit(
                    backend, target.to(device), drafter_of, setting,
                    length=num_drafts + 1, trials=trials, seed=3 + fp64, rounds=1,
                )  # fmt: skip
                found, error = sum(outcome.accepted) / trials, math.sqrt(variance / trials)
                means.append(found)
                name = f"mean_accepted-{rule.name.lower()}-{'real' if real_q else 'one_hot'}"
                width = "fp64" if fp64 else "fp32"
                findings.append(z_finding(f"{name}-{width}", found, mean, error, trials))
            equal = z_finding(f"{name}-fp32=fp64", *means, math.sqrt(2) * error, trials)
            findings.append(equal)
    return findings


def _drafter(
    backend: Backend, draft: Chain, setting: Setting, num_drafts: int, lookup_C: Tensor | None
):
    if lookup_C is not None:
        lookup_C = lookup_C.to(draft.logits_CV.device)
    return lambda params: TableDrafter(
        backend, draft, params, num_drafts, lookup_C is None, lookup_C, setting.fp64_noise
    )


def one_round(
    backend: Backend,
    target_V: Tensor,
    draft_V: Tensor,
    setting: Setting,
    trials: int,
    *,
    draft_setting: Setting | None = None,
    seed: int = 7,
) -> tuple[Tensor, Tensor]:
    """One draft per request, drawn and verified: (n_accept, first token emitted), [trials].

    draft_setting: the filters of the draft, if not the target's.
    """
    device = target_V.device
    row_bytes = 12 * max(len(target_V), len(draft_V))
    size = max(1, min(WAVE[device.type], (2**28 if device.type == "cpu" else 2**33) // row_bytes))
    accepts, firsts = [], []
    for wave, start in enumerate(range(0, trials, size)):
        num = min(size, trials - start)
        params = setting.params(num, seed * 1_000_003 + wave, device)
        drafting = (draft_setting or setting).params(num, seed * 1_000_003 + wave, device)
        slot_B = torch.arange(num, device=device)
        zero_B = torch.zeros_like(slot_B)
        cache = DraftCache.empty(num, 1, len(draft_V), draft_V.dtype, device)
        token_B = backend.draft(
            Rows(draft_V.expand(num, -1).contiguous(), drafting, slot_B),
            Noise(zero_B, zero_B, DRAFT, fp64=setting.fp64_noise),
            cache,
        )
        drafts = DraftBlock(token_B[:, None], zero_B + 1, cache, zero_B == 0)
        rows_NV = target_V.expand(2 * num, -1).contiguous()
        verdict = backend.verify(
            VerifyBatch(rows_NV, params, slot_B, zero_B, drafts, fp64_noise=setting.fp64_noise)
        )
        accepts.append(verdict.n_accept_B)
        firsts.append(verdict.token_BK1[:, 0])
    return torch.cat(accepts), torch.cat(firsts)


def _counts(token_B: Tensor, vocabulary: int) -> Tensor:
    return torch.bincount(token_B, minlength=vocabulary)


def overlap(backend: Backend, device: torch.device, trials: int = TRIALS) -> list[Finding]:
    """`standard` accepts one draft with probability sum_x min(p(x), q(x)); so does `block`."""
    findings = []
    for seed, rule in enumerate(LOSSLESS * 2):
        generator = torch.Generator().manual_seed(seed)
        target_V, draft_V = torch.randn(2, 12, generator=generator)
        expected = float(torch.minimum(target_V.softmax(0), draft_V.softmax(0)).sum())
        error = math.sqrt(expected * (1 - expected) / trials)
        setting = Setting(rule=rule, fp64_noise=seed >= 2)
        n_accept, first = one_round(
            backend, target_V.to(device), draft_V.to(device), setting, trials
        )
        name = f"overlap-{rule.name.lower()}-{'fp64' if seed >= 2 else 'fp32'}"
        found = float(n_accept.double().mean())
        findings.append(z_finding(name, found, expected, error, trials))
        p = p_value(_counts(first, 12), target_V.softmax(0))
        findings.append(p_finding(f"{name}-law", p, trials))
    return findings


def exact_share(case: str, n_accept: Tensor, expected: float) -> Finding:
    """Acceptance without exception, or none at all."""
    found = float(n_accept.double().mean())
    return Finding(case, "accepted", found, expected - 1e-9, expected + 1e-9, len(n_accept))


def always_and_never(backend: Backend, device: torch.device, trials: int = TRIALS) -> list[Finding]:
    """Draft = target accepts everything at any T; disjoint supports accept nothing and emit p."""
    findings = []
    generator = torch.Generator().manual_seed(0)
    equal_V = (torch.randn(12, generator=generator) * 5).to(device)
    target_V, draft_V = torch.full((2, 12), -torch.inf, device=device)
    target_V[:6], draft_V[6:] = torch.arange(6, device=device) / 3, 0.0
    for rule in LOSSLESS:
        name = rule.name.lower()
        for temperature in (0.0, 0.3, 1.0, 2.0):
            setting = Setting(temperature, rule=rule)
            n_accept, _ = one_round(backend, equal_V, equal_V, setting, trials // 4)
            findings.append(exact_share(f"draft=target-{name}-T{temperature:g}", n_accept, 1.0))
        n_accept, first = one_round(backend, target_V, draft_V, Setting(rule=rule), trials)
        findings.append(exact_share(f"disjoint-{name}", n_accept, 0.0))
        p = p_value(_counts(first, 12), target_V.cpu().softmax(0))
        findings.append(p_finding(f"disjoint-{name}-law", p, trials))
    return findings


def outside_the_nucleus(
    backend: Backend, device: torch.device, trials: int = TRIALS
) -> list[Finding]:
    """The draft samples unfiltered: what the target's filters dropped is never accepted."""
    findings = []
    target_V = torch.randn(12, generator=torch.Generator().manual_seed(3))
    for rule in LOSSLESS:
        for filters in ({"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.3}):
            setting = Setting(rule=rule, **filters)
            law_V = setting.next_law(Chain(target_V[None]))[0]
            n_accept, first = one_round(
                backend, target_V.to(device), -target_V.to(device) / 2, setting, trials,
                draft_setting=Setting(rule=rule),
            )  # fmt: skip
            name = f"nucleus-{rule.name.lower()}-{next(iter(filters))}"
            p = p_value(_counts(first, 12), law_V)  # 0 if anything outside was emitted
            findings.append(p_finding(f"{name}-law", p, trials))
            share = float(n_accept.double().mean())
            findings.append(Finding(name, "accepted", share, 0.01, 0.99, trials))
    return findings


def ends_of_u(backend: Backend, device: torch.device) -> list[Finding]:
    """u at both ends of its range: p = 0 is never accepted, p = q always."""
    findings = []
    dropped_V = torch.zeros(8, device=device)
    dropped_V[5] = -torch.inf  # the draft below
    filtered_V = torch.linspace(3.0, 0.0, 8, device=device)  # token 5 is outside its top 3
    same_V = torch.linspace(0.0, 3.0, 8, device=device)
    for key, rule, fp64 in (
        (key, rule, fp64)
        for key in (LOWEST_U, HIGHEST_U)
        for rule in LOSSLESS
        for fp64 in (False, True)
    ):
        for name, logits_V, top_k, expected in (
            ("p=0", dropped_V, 0, 0),
            ("outside", filtered_V, 3, 0),
            ("p=q", same_V, 0, 1),
        ):
            setting = Setting(top_k=top_k, rule=rule, fp64_noise=fp64)
            params = replace(setting.params(1, 0, device), key_S=torch.tensor([key], device=device))
            zero_B = torch.zeros(1, dtype=torch.int64, device=device)
            cache = DraftCache.empty(1, 1, 8, same_V.dtype, device)
            plain = Setting(rule=rule).params(1, 0, device)
            backend.draft(Rows(same_V[None], plain, zero_B), Noise(zero_B, zero_B, DRAFT), cache)
            drafts = DraftBlock(zero_B[:, None] + 5, zero_B + 1, cache, zero_B == 0)
            verdict = backend.verify(
                VerifyBatch(logits_V.repeat(2, 1), params, zero_B, zero_B, drafts, fp64_noise=fp64)
            )
            end = "lowest" if key == LOWEST_U else "highest"
            case = f"u_{end}-{name}-{rule.name.lower()}-{'fp64' if fp64 else 'fp32'}"
            findings.append(exact_share(case, verdict.n_accept_B, expected))
    return findings
