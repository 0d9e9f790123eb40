"""Laws of drawing one token: large vocabularies, ties, nearly uniform rows, and far tails.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from foretoken.ops import (
    TARGET,
    Backend,
    DraftBlock,
    DraftCache,
    Noise,
    Rows,
    Rule,
    SlotParams,
    Stream,
    VerifyBatch,
)
from tests.support.law import TRIALS, TableDrafter, emit, law_p_value, p_value
from tests.support.law_accept import one_round, z_finding
from tests.support.law_cases import RULES, Finding, p_finding
from tests.support.law_model import Chain, Setting, random_chain

ONE_STREAM = (Stream.TARGET_TOKEN, Stream.TARGET_TOKEN)  # a mutant: block and token noise shared
VOCABULARIES = (1, 999, 1024, 1025, 4097, 8193, 151_936)
CELLS = 64
PER_SLOT = ("key_S", "temperature_S", "top_k_S", "top_p_S", "min_p_S", "rule_S")

Draw = Callable[[Tensor, int, int], Tensor]
"""(logits_V, how many, wave) -> token ids."""


def sampler(
    backend: Backend,
    setting: Setting = Setting(),  # noqa: B008
    streams: tuple[Stream, Stream] = TARGET,
) -> Draw:
    """Draws through `Backend.sample`, one slot per draw; rows are kept from wave to wave."""
    kept: dict[str, Tensor] = {}

    def draw(logits_V: Tensor, num: int, wave: int) -> Tensor:
        device = logits_V.device
        if kept.get("of") is not logits_V or len(kept["rows"]) < num:
            kept.update(of=logits_V, rows=logits_V.expand(num, -1).contiguous())
        params = setting.params(num, wave, device)
        slot_N = torch.arange(num, device=device)
        zero_N = torch.zeros_like(slot_N)
        return backend.sample(
            Rows(kept["rows"][:num], params, slot_N),
            Noise(zero_N, zero_N, streams, fp64=setting.fp64_noise),
        )

    return draw


def capped_gumbel(logits_V: Tensor, num: int, wave: int) -> Tensor:
    """Mutant: argmax of logits - log(-log u) in FP32, which cannot exceed 16.6."""
    generator = torch.Generator(logits_V.device).manual_seed(wave)
    u = torch.rand(num, len(logits_V), generator=generator, device=logits_V.device)
    return (logits_V - (-u.clamp(min=2.0**-32).log()).log()).argmax(dim=1)


def _waves(logits_V: Tensor, trials: int) -> Iterator[tuple[int, int]]:
    """(wave, how many draws): as many rows at once as fill 256 MiB, on a GPU 8 GiB."""
    budget = 2**28 if logits_V.device.type == "cpu" else 2**33
    size = max(1, min(trials, budget // (4 * len(logits_V))))
    for wave, start in enumerate(range(0, trials, size)):
        yield wave, min(size, trials - start)


def vocabulary_law(
    backend: Backend,
    device: torch.device,
    vocabulary: int,
    trials: int,
    rules: tuple[Rule, ...] = RULES,
) -> list[Finding]:
    """A draft and its verification over one vocabulary: the first token's law, by two groupings.

    Groups of neighbouring ids (blocks of 1024 or less) and ids modulo a number: noise of blocks and
    of tokens within a block. Every id is in the vocabulary.
    """
    generator = torch.Generator().manual_seed(vocabulary)
    target_V = torch.randn(vocabulary, generator=generator)
    cells = max(2, min(CELLS, trials // 20))
    ids = torch.arange(vocabulary)
    findings = []
    for rule in rules:
        _, first = one_round(
            backend, target_V.to(device), -target_V.to(device), Setting(rule=rule), trials
        )
        first = first.cpu()
        name = f"vocabulary{vocabulary}-{rule.name.lower()}"
        outside = int(((first < 0) | (first >= vocabulary)).sum())
        findings.append(Finding(name, "ids_out_of_range", outside, -1, 1, trials))
        if outside:
            continue
        law_V = target_V.double().softmax(0)
        for how, cell_V in (("blocks", ids * cells // vocabulary), ("tokens", ids % cells)):
            law = torch.zeros(cells, dtype=torch.float64).index_add_(0, cell_V, law_V)
            counts = torch.bincount(cell_V[first], minlength=cells)
            findings.append(p_finding(f"{name}-{how}", p_value(counts, law), trials))
    return findings


def masked_blocks(backend: Backend, device: torch.device, trials: int) -> list[Finding]:
    """Draws from a row of which two whole blocks have no finite logit, and parts of two others.

    Without filters, and with such as keep much: a nucleus, and a top-k beyond what is left.
    """
    logits_V = torch.randn(5000, generator=torch.Generator().manual_seed(17))
    logits_V[900:3500] = -math.inf
    cell_V = torch.arange(len(logits_V)) % CELLS
    findings = []
    for filters in ({}, {"top_p": 0.9}, {"top_k": 3000}, {"min_p": 0.01}):
        setting = Setting(**filters)
        law_V = setting.next_law(Chain(logits_V[None]))[0]
        draw, on_device = sampler(backend, setting), logits_V.to(device)
        waves = [draw(on_device, num, wave).cpu() for wave, num in _waves(logits_V, trials)]
        token_N = torch.cat(waves)
        name = f"masked_blocks-{'-'.join(filters) or 'unfiltered'}"
        without_mass = int((law_V[token_N] == 0).sum())
        findings.append(Finding(name, "tokens_without_mass", without_mass, -1, 1, trials))
        law = torch.zeros(CELLS, dtype=torch.float64).index_add_(0, cell_V, law_V)
        counts = torch.bincount(cell_V[token_N], minlength=CELLS)
        findings.append(p_finding(name, p_value(counts, law), trials))
    return findings


def ties(backend: Backend, device: torch.device, trials: int = TRIALS) -> list[Finding]:
    """bf16 logits on a coarse grid, ties at the k-th value and the nucleus' edge: all are kept."""
    findings = []
    for filters in ({"top_k": 5}, {"top_p": 0.7}, {"top_k": 7, "top_p": 0.8}):
        target, draft, setting = tied(**filters)
        name = f"ties-{'-'.join(filters)}"
        next_CV = setting.next_law(target)
        kept = (next_CV > 0).sum(dim=1)
        extra = float((kept > filters["top_k"]).double().mean()) if "top_k" in filters else 1.0
        findings.append(Finding(name, "rows_with_ties", extra, 0.05, 1.01, len(kept)))
        on_device = draft.to(device)

        def make(params: Any, draft: Chain = on_device) -> TableDrafter:
            return TableDrafter(backend, draft, params, 1)

        outcome = emit(backend, target.to(device), make, setting, length=3, trials=trials, seed=4)
        findings.append(p_finding(name, law_p_value(outcome.token_SL, next_CV), trials))
    return findings


def tied(**filters: Any) -> tuple[Chain, Chain, Setting]:
    """Target and draft with logits in steps of a half, in bf16."""
    target, draft = random_chain(16, 5, 1.0)
    coarse = [(chain.logits_CV * 2).round() / 2 for chain in (target, draft)]
    return Chain(coarse[0].bfloat16()), Chain(coarse[1].bfloat16()), Setting(**filters)


def near_uniform(
    draw: Draw, device: torch.device, vocabulary: int, draws: int, case: str = "near_uniform"
) -> list[Finding]:
    """Chi-square over every token of a flat row, and how many tokens were drawn at all.

    Where draws are too few for a cell each, neighbouring tokens share one.
    """
    generator = torch.Generator().manual_seed(9)
    logits_V = (torch.randn(vocabulary, generator=generator) * 0.1).to(device)
    counts_V = torch.zeros(vocabulary, dtype=torch.int64, device=device)
    for wave, num in _waves(logits_V, draws):
        counts_V += torch.bincount(draw(logits_V, num, wave), minlength=vocabulary)
    law_V = logits_V.double().softmax(0)
    missed_V = torch.exp(draws * torch.log1p(-law_V))
    expected = float((1 - missed_V).sum())
    # Occupancy's variance, with the covariance of tokens that share the draws (Weiss 1958).
    variance = float((missed_V * (1 - missed_V)).sum() - draws * (law_V * missed_V).sum() ** 2)
    drawn = int((counts_V > 0).sum())
    cell_V = torch.arange(vocabulary) // max(1, 8 * vocabulary // draws)
    cells = int(cell_V[-1]) + 1
    counts = torch.zeros(cells, dtype=torch.int64).index_add_(0, cell_V, counts_V.cpu())
    law = torch.zeros(cells, dtype=torch.float64).index_add_(0, cell_V, law_V.cpu())
    case = f"{case}-V{vocabulary}"
    return [
        p_finding(case, p_value(counts, law), draws),
        z_finding(f"{case}-coverage", drawn, expected, math.sqrt(max(variance, 1.0)), draws),
    ]


def tail(
    draw: Draw, device: torch.device, vocabulary: int, draws: int, case: str = "tail"
) -> list[Finding]:
    """Tokens 18 to 20.5 logits below the head are drawn at their rate; FP32 noise reaches them."""
    logits_V = torch.linspace(-18.0, -20.5, vocabulary, device=device)
    head = vocabulary // 2
    logits_V[head] = 0.0
    seen = 0
    for wave, num in _waves(logits_V, draws):
        seen += int((draw(logits_V, num, wave) != head).sum())
    law_V = logits_V.double().softmax(0)
    expected = float(draws * (law_V.sum() - law_V[head]))
    case = f"{case}-V{vocabulary}"
    return [
        Finding(f"{case}-expected", "draws", expected, 10.0, math.inf, draws),
        z_finding(case, seen, expected, math.sqrt(expected), draws),
    ]


def poisson_tail(seen: int, expected: float) -> float:
    """P(X <= seen) of a Poisson variable: how unlikely so few are."""
    return float(torch.special.gammaincc(torch.tensor(seen + 1.0), torch.tensor(expected)))


def far_rows(
    backend: Backend, device: torch.device, vocabulary: int = 151_936, requests: int = 3100
) -> list[Finding]:
    """Rows and cached q behind 2^31 numbers: the last requests get what they get alone.

    5 rows per request; 15 500 rows of 151 936 bfloat16 logits reach 2.4e9, and so do 4 drafts each
    of 4 000 slots.
    """
    drafts, slots, last = 4, requests * 4 // 3, 16
    generator = torch.Generator(device).manual_seed(3)

    def normal(*shape: int) -> Tensor:
        whole = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for part in whole.split(256):  # no float32 copy of the whole
            part.copy_(torch.randn(part.shape, generator=generator, device=device))
        return whole

    cache = DraftCache.empty(slots, drafts, vocabulary, torch.bfloat16, device)
    cache.logits_SKV.copy_(normal(slots, drafts, vocabulary))
    for slot in range(slots):
        cache.lse_SK[slot] = cache.logits_SKV[slot].float().logsumexp(1)
    cache.threshold_SK.fill_(-math.inf)
    logits_NV = normal(requests * (drafts + 1), vocabulary)
    params = Setting().params(slots, 0, device)
    slot_B = torch.arange(slots - requests, slots, device=device)
    token_BK = torch.randint(vocabulary, (requests, drafts), generator=generator, device=device)
    num_B = torch.full_like(slot_B, drafts)

    def both(
        rows: Tensor, own: Tensor, own_params: SlotParams, own_cache: DraftCache
    ) -> tuple[Tensor, Tensor]:
        num = len(own)
        block = DraftBlock(token_BK[-num:], num_B[-num:], own_cache, torch.ones_like(own).bool())
        verdict = backend.verify(VerifyBatch(rows, own_params, own, torch.zeros_like(own), block))
        slot_N = own.repeat_interleave(drafts + 1)
        zero_N = torch.zeros_like(slot_N)
        return verdict.token_BK1, backend.sample(
            Rows(rows, own_params, slot_N), Noise(zero_N, zero_N, TARGET)
        )

    verdicts, tokens = both(logits_NV, slot_B, params, cache)
    alone = DraftCache(*(x[-last:].clone() for x in astuple(cache)))  # in memory of its own
    alone_params = replace(params, **{f: getattr(params, f)[-last:].clone() for f in PER_SLOT})
    rows, slots_alone = logits_NV[-last * (drafts + 1) :].clone(), torch.arange(last, device=device)
    verdicts_alone, tokens_alone = both(rows, slots_alone, alone_params, alone)
    name = f"far_rows-V{vocabulary}"
    return [
        Finding(name, f"different_{what}", int((far[-len(near) :] != near).sum()), -1, 1, len(near))
        for what, far, near in (
            ("verdicts", verdicts, verdicts_alone),
            ("tokens", tokens, tokens_alone),
        )
    ]
