"""Laws of drawing one token: large vocabularies, ties, nearly uniform rows, and far tails.

Shapes as in `laws/__init__.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foretoken.lab.laws.acceptance import one_round
from foretoken.lab.laws.chain import (
    TRIALS,
    Chain,
    Setting,
    TableDrafter,
    emit,
    joint_p_value,
    random_chain,
    waves,
)
from foretoken.lab.laws.findings import Finding, fit, none_finding, p_finding, z_finding
from foretoken.lab.laws.joint import RULES
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

VOCABULARIES = (1, 999, 1024, 1025, 4097, 8193, 151_936)
CELLS = 64

Draw = Callable[[Tensor, int, int], Tensor]
"""(logits_V, how many, wave) -> token ids."""


def sampler(
    backend: Backend,
    setting: Setting = Setting(),  # noqa: B008
    streams: tuple[Stream, Stream] = TARGET,
) -> Draw:
    """Draws through `Backend.sample`, one slot per draw; rows are kept from wave to wave."""
    last_V: Tensor | None = None
    rows_NV = torch.empty(0)

    def draw(logits_V: Tensor, num: int, wave: int) -> Tensor:
        nonlocal last_V, rows_NV
        if last_V is not logits_V or len(rows_NV) < num:
            last_V, rows_NV = logits_V, logits_V.expand(num, -1).contiguous()
        params = setting.params(num, wave, logits_V.device)
        slot_N = torch.arange(num, device=logits_V.device)
        zero_N = torch.zeros_like(slot_N)
        rows = Rows(rows_NV[:num], params, slot_N)
        return backend.sample(rows, Noise(zero_N, zero_N, streams, setting.fp64_noise))

    return draw


def _draw_counts(draw: Draw, logits_V: Tensor, draws: int) -> Tensor:
    """How often each token was drawn, [V] on the CPU."""
    vocabulary = len(logits_V)
    counts_V = torch.zeros(vocabulary, dtype=torch.int64, device=logits_V.device)
    for wave, num in waves(draws, logits_V.device, 4 * vocabulary):
        counts_V += torch.bincount(draw(logits_V, num, wave), minlength=vocabulary)
    return counts_V.cpu()


def _fit_cells(counts_V: Tensor, next_V: Tensor, cell_V: Tensor) -> float:
    """p-value of counts that are pooled by cell."""
    cells = int(cell_V.max()) + 1
    return fit(
        torch.zeros(cells, dtype=torch.int64).index_add_(0, cell_V, counts_V),
        torch.zeros(cells, dtype=torch.float64).index_add_(0, cell_V, next_V.double()),
    )


def vocabulary_law(
    backend: Backend,
    device: torch.device,
    vocabulary: int,
    trials: int,
    rules: tuple[Rule, ...] = RULES,
) -> list[Finding]:
    """The first token after one draft and its verification, counted in two groupings.

    Groups of neighbouring ids (blocks of 1024 or less) test the noise of blocks, ids modulo a
    number that of tokens within a block. Every emitted id must be in the vocabulary.
    """
    target_V = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    target_on, next_V = target_V.to(device), target_V.double().softmax(0)
    cells = max(2, min(CELLS, trials // 20))
    id_V = torch.arange(vocabulary)
    findings = []
    for rule in rules:
        _, first = one_round(backend, target_on, -target_on, Setting(rule=rule), trials)
        name = f"vocabulary{vocabulary}-{rule.name.lower()}"
        outside = int(((first < 0) | (first >= vocabulary)).sum())
        findings.append(none_finding(name, "ids_out_of_range", outside, trials))
        if not outside:
            counts_V = torch.bincount(first.cpu(), minlength=vocabulary)
            for how, cell_V in (("blocks", id_V * cells // vocabulary), ("tokens", id_V % cells)):
                p = _fit_cells(counts_V, next_V, cell_V)
                findings.append(p_finding(f"{name}-{how}", p, trials))
    return findings


def masked_blocks(backend: Backend, device: torch.device, trials: int) -> list[Finding]:
    """Draws from a row in which two whole blocks and parts of two others have no finite logit.

    Without filters, and with filters that keep much: a nucleus, a top-k above the finite logits.
    """
    logits_V = torch.randn(5000, generator=torch.Generator().manual_seed(17))
    logits_V[900:3500] = -math.inf
    cell_V = torch.arange(len(logits_V)) % CELLS
    findings = []
    each: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 3000}, {"min_p": 0.01}]
    for filters in each:
        setting = Setting(**filters)
        next_V = setting.next_token(Chain(logits_V[None]))[0]
        counts_V = _draw_counts(sampler(backend, setting), logits_V.to(device), trials)
        name = f"masked_blocks-{'-'.join(filters) or 'unfiltered'}"
        without_mass = int(counts_V[next_V == 0].sum())
        findings.append(none_finding(name, "tokens_without_mass", without_mass, trials))
        findings.append(p_finding(name, _fit_cells(counts_V, next_V, cell_V), trials))
    return findings


def ties(backend: Backend, device: torch.device, trials: int = TRIALS) -> list[Finding]:
    """bf16 logits on a coarse grid: all tokens tied at the k-th value or nucleus edge are kept."""
    findings = []
    each: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 7, "top_p": 0.8}]
    for filters in each:
        target, draft, setting = tied(**filters)
        name = f"ties-{'-'.join(filters)}"
        next_CV = setting.next_token(target)
        kept_C = (next_CV > 0).sum(dim=1)
        extra = float((kept_C > filters["top_k"]).double().mean()) if "top_k" in filters else 1.0
        findings.append(Finding(name, "rows_with_ties", extra, 0.05, 1.01, len(kept_C)))
        make = partial(TableDrafter, backend, draft.to(device), num_drafts=1)
        emission = emit(backend, target.to(device), make, setting, trials=trials, seed=4)
        findings.append(p_finding(name, joint_p_value(emission.token_SL, next_CV), trials))
    return findings


def tied(**filters: Any) -> tuple[Chain, Chain, Setting]:
    """Target and draft with logits in steps of a half, in bf16, and a setting with filters."""
    target, draft = (
        Chain(((chain.logits_CV * 2).round() / 2).bfloat16()) for chain in random_chain(16, 5)
    )
    return target, draft, Setting(**filters)


def near_uniform(
    draw: Draw, device: torch.device, vocabulary: int, draws: int, case: str = "near_uniform"
) -> list[Finding]:
    """Chi-square over every token of a flat row, and the number of distinct tokens drawn.

    Where there are too few draws for one cell per token, neighbouring tokens share a cell.
    """
    logits_V = torch.randn(vocabulary, generator=torch.Generator().manual_seed(9)) * 0.1
    counts_V = _draw_counts(draw, logits_V.to(device), draws)
    next_V = logits_V.double().softmax(0)
    missed_V = torch.exp(draws * torch.log1p(-next_V))
    expected = float((1 - missed_V).sum())
    # Occupancy's variance, with the covariance of tokens that share the draws (Weiss 1958).
    variance = float((missed_V * (1 - missed_V)).sum() - draws * (next_V * missed_V).sum() ** 2)
    error, drawn = math.sqrt(max(variance, 1.0)), int((counts_V > 0).sum())
    cell_V = torch.arange(vocabulary) // max(1, 8 * vocabulary // draws)
    case = f"{case}-V{vocabulary}"
    return [
        p_finding(case, _fit_cells(counts_V, next_V, cell_V), draws),
        z_finding(f"{case}-coverage", drawn, expected, error, draws),
    ]


def tail_counts(draw: Draw, device: torch.device, vocabulary: int, draws: int) -> tuple[int, float]:
    """Tokens drawn 18 to 20.5 logits below the head, and the expected number (Poisson)."""
    logits_V = torch.linspace(-18.0, -20.5, vocabulary, device=device)
    head = vocabulary // 2
    logits_V[head] = 0.0
    seen = draws - int(_draw_counts(draw, logits_V, draws)[head])
    next_V = logits_V.double().softmax(0)
    return seen, float(draws * (next_V.sum() - next_V[head]))


def tail(
    draw: Draw, device: torch.device, vocabulary: int, draws: int, case: str = "tail"
) -> list[Finding]:
    """Tokens of a far tail are drawn at their rate: FP32 noise must reach them."""
    seen, expected = tail_counts(draw, device, vocabulary, draws)
    case = f"{case}-V{vocabulary}"
    return [
        Finding(f"{case}-expected", "draws", expected, 10.0, math.inf, draws),
        z_finding(case, seen, expected, math.sqrt(expected), draws),
    ]


def far_rows(
    backend: Backend, device: torch.device, vocabulary: int = 151_936, requests: int = 3100
) -> list[Finding]:
    """Rows and cached q beyond index 2^31: the last requests get the tokens that they get alone.

    5 rows per request; 15 500 rows of 151 936 bfloat16 logits reach 2.4e9, and so do 4 drafts each
    of 4 000 slots.
    """
    drafts, slots, last = 4, requests * 4 // 3, 16
    generator = torch.Generator(device).manual_seed(3)

    def normal(*shape: int) -> Tensor:
        whole = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for start in range(0, shape[0], 256):  # no float32 copy of the whole
            part = whole[start : start + 256]
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
        drawn_N = backend.sample(Rows(rows, own_params, slot_N), Noise(zero_N, zero_N, TARGET))
        return verdict.token_BK1, drawn_N

    far = both(logits_NV, slot_B, params, cache)
    own_rows = logits_NV[-last * (drafts + 1) :].clone()  # in memory of their own
    own_slots = torch.arange(last, device=device)
    near = both(own_rows, own_slots, _tail_of(params, last), _tail_of(cache, last))
    name = f"far_rows-V{vocabulary}"
    return [
        none_finding(name, f"different_{what}", int((there[-len(here) :] != here).sum()), len(here))
        for what, there, here in zip(("verdicts", "tokens"), far, near, strict=True)
    ]


def _tail_of(record: Any, last: int) -> Any:
    """A record of tensors by slot, cut to copies of its last slots."""
    tensors = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(
        record, **{n: x[-last:].clone() for n, x in tensors.items() if isinstance(x, Tensor)}
    )
