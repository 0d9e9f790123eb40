"""Laws of drawing one token: large vocabularies, ties, nearly uniform rows, and far tails."""

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
    batches,
    emit,
    joint_p_value,
    random_chain,
)
from foretoken.lab.laws.findings import Finding, fit, none_finding, p_finding, z_finding
from foretoken.lab.laws.joint import RULES, Rules
from foretoken.ops import (
    TARGET,
    Backend,
    DraftBlock,
    DraftCache,
    Noise,
    Rows,
    SlotParams,
    Stream,
    VerifyBatch,
)

VOCABULARIES = (1, 999, 1024, 1025, 4097, 8193, 151_936)
CELLS = 64  # number of groups of tokens that are counted together

Draw = Callable[[Tensor, int, int], Tensor]
"""(logits_V, number of draws, index of the batch, which seeds the draws) -> token ids."""


def sampler(
    backend: Backend,
    setting: Setting = Setting(),  # noqa: B008
    streams: tuple[Stream, Stream] = TARGET,
) -> Draw:
    """A `Draw` through `Backend.sample`, with one slot per draw."""
    last_V: Tensor | None = None
    rows_NV = torch.empty(0)

    def draw(logits_V: Tensor, num_draws: int, batch_index: int) -> Tensor:
        nonlocal last_V, rows_NV  # kept for further batches with the same tensor `logits_V`
        if last_V is not logits_V or len(rows_NV) < num_draws:
            last_V, rows_NV = logits_V, logits_V.expand(num_draws, -1).contiguous()
        params = setting.params(num_draws, batch_index, logits_V.device)
        slot_N = torch.arange(num_draws, device=logits_V.device)
        zero_N = torch.zeros_like(slot_N)
        rows = Rows(rows_NV[:num_draws], params, slot_N)
        return backend.sample(rows, Noise(zero_N, zero_N, streams, setting.fp64_noise))

    return draw


def _draw_counts(draw: Draw, logits_V: Tensor, draws: int) -> Tensor:
    """The number of times that each token was drawn, [V] on the CPU."""
    vocabulary = len(logits_V)
    counts_V = torch.zeros(vocabulary, dtype=torch.int64, device=logits_V.device)
    for batch_index, num_draws in batches(draws, logits_V.device, 4 * vocabulary):
        token_N = draw(logits_V, num_draws, batch_index)
        counts_V += torch.bincount(token_N, minlength=vocabulary)
    return counts_V.cpu()


def _fit_cells(counts_V: Tensor, next_V: Tensor, cell_V: Tensor) -> float:
    """The p-value of counts that are summed by cell; `cell_V` is the cell of each token."""
    cells = int(cell_V.max()) + 1
    counts = torch.zeros(cells, dtype=torch.int64).index_add_(0, cell_V, counts_V)
    chance = torch.zeros(cells, dtype=torch.float64).index_add_(0, cell_V, next_V.double())
    return fit(counts, chance)


def vocabulary_law(
    backend: Backend, device: torch.device, vocabulary: int, trials: int, rules: Rules = RULES
) -> list[Finding]:
    """A round's first token has the target's distribution, and a valid id; each round has a draft.

    Kernels draw noise by blocks of ids. Cells of neighbouring ids test whether blocks differ; cells
    of ids that are equal modulo the number of cells test the noise within a block.
    """
    target_V = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    logits_V, next_V = target_V.to(device), target_V.double().softmax(0)
    cells = max(2, min(CELLS, trials // 20))
    id_V = torch.arange(vocabulary)
    findings = []
    for rule in rules:
        _, token_B = one_round(backend, logits_V, -logits_V, Setting(rule=rule), trials)
        name = f"vocabulary{vocabulary}-{rule.name.lower()}"
        outside = int(((token_B < 0) | (token_B >= vocabulary)).sum())
        findings.append(none_finding(name, "ids_out_of_range", outside, trials))
        if not outside:
            counts_V = torch.bincount(token_B.cpu(), minlength=vocabulary)
            for kind, cell_V in (("blocks", id_V * cells // vocabulary), ("tokens", id_V % cells)):
                p = _fit_cells(counts_V, next_V, cell_V)
                findings.append(p_finding(f"{name}-{kind}", p, trials))
    return findings


def masked_blocks(backend: Backend, device: torch.device, trials: int) -> list[Finding]:
    """Draws from a row in which two blocks of 1024 ids, and parts of two more, are all -inf.

    Filters keep many tokens; top-k is above the number of finite logits.
    """
    logits_V = torch.randn(5000, generator=torch.Generator().manual_seed(17))
    logits_V[900:3500] = -math.inf
    cell_V = torch.arange(len(logits_V)) % CELLS
    findings = []
    variants: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 3000}, {"min_p": 0.01}]
    for filters in variants:
        setting = Setting(**filters)
        next_V = setting.next_token(Chain(logits_V[None]))[0]
        counts_V = _draw_counts(sampler(backend, setting), logits_V.to(device), trials)
        name = f"masked_blocks-{'-'.join(filters) or 'unfiltered'}"
        without_mass = int(counts_V[next_V == 0].sum())
        findings.append(none_finding(name, "tokens_without_mass", without_mass, trials))
        findings.append(p_finding(name, _fit_cells(counts_V, next_V, cell_V), trials))
    return findings


def ties(backend: Backend, device: torch.device, trials: int = TRIALS) -> list[Finding]:
    """Filters keep all tokens that tie with the k-th token, or with the nucleus' last token."""
    findings = []
    variants: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 7, "top_p": 0.8}]
    for filters in variants:
        target, draft, setting = tied_chains(**filters)
        name = f"ties-{'-'.join(filters)}"
        next_CV = setting.next_token(target)
        kept_C = (next_CV > 0).sum(dim=1)
        share = float((kept_C > filters["top_k"]).double().mean()) if "top_k" in filters else 1.0
        findings.append(Finding(name, "rows_with_ties", share, 0.05, 1.01, len(kept_C)))
        make_propose = partial(TableDrafter, backend, draft.to(device), num_drafts=1)
        emission = emit(backend, target.to(device), make_propose, setting, trials=trials, seed=4)
        findings.append(p_finding(name, joint_p_value(emission.token_SL, next_CV), trials))
    return findings


def tied_chains(**filters: Any) -> tuple[Chain, Chain, Setting]:
    """A target and a draft with logits in steps of 0.5, and a setting with these filters."""
    target, draft = (
        Chain(((chain.logits_CV * 2).round() / 2).bfloat16()) for chain in random_chain(16, 5)
    )
    return target, draft, Setting(**filters)


def near_uniform(
    draw: Draw, device: torch.device, vocabulary: int, draws: int, case: str = "near_uniform"
) -> list[Finding]:
    """Draws from a nearly uniform row: their distribution, and the number of distinct tokens."""
    logits_V = torch.randn(vocabulary, generator=torch.Generator().manual_seed(9)) * 0.1
    counts_V = _draw_counts(draw, logits_V.to(device), draws)
    next_V = logits_V.double().softmax(0)
    missed_V = torch.exp(draws * torch.log1p(-next_V))
    expected = float((1 - missed_V).sum())
    # The variance of the number of distinct tokens, with the tokens' covariance (Weiss 1958).
    variance = float((missed_V * (1 - missed_V)).sum() - draws * (next_V * missed_V).sum() ** 2)
    error, distinct = math.sqrt(max(variance, 1.0)), int((counts_V > 0).sum())
    cell_V = torch.arange(vocabulary) // max(1, 8 * vocabulary // draws)  # 8+ draws per cell
    case = f"{case}-V{vocabulary}"
    distribution = p_finding(case, _fit_cells(counts_V, next_V, cell_V), draws)
    return [distribution, z_finding(f"{case}-coverage", distinct, expected, error, draws)]


def tail_counts(draw: Draw, device: torch.device, vocabulary: int, draws: int) -> tuple[int, float]:
    """How many draws were tokens 18 to 20.5 logits below the likeliest, and the expected number.

    The first number is Poisson distributed.
    """
    logits_V = torch.linspace(-18.0, -20.5, vocabulary, device=device)
    likeliest = vocabulary // 2
    logits_V[likeliest] = 0.0
    observed = draws - int(_draw_counts(draw, logits_V, draws)[likeliest])
    next_V = logits_V.double().softmax(0)
    return observed, float(draws * (next_V.sum() - next_V[likeliest]))


def tail(
    draw: Draw, device: torch.device, vocabulary: int, draws: int, case: str = "tail"
) -> list[Finding]:
    """Tokens of a far tail are drawn as often as expected: FP32 noise has enough bits."""
    observed, expected = tail_counts(draw, device, vocabulary, draws)
    case = f"{case}-V{vocabulary}"
    enough = Finding(f"{case}-expected", "draws", expected, 10.0, math.inf, draws)
    return [enough, z_finding(case, observed, expected, math.sqrt(expected), draws)]


def far_rows(
    backend: Backend, device: torch.device, vocabulary: int = 151_936, requests: int = 3100
) -> list[Finding]:
    """The last requests of a huge batch get the same tokens as in a batch of their own.

    Logits and cached draft logits then have indices beyond 2^31: 15 500 rows (5 per request) or
    4 133 slots of 4 drafts, with a vocabulary of 151 936, have over 2.3e9 elements.
    """
    drafts, slots, last = 4, requests * 4 // 3, 16
    generator = torch.Generator(device).manual_seed(3)

    def normal(*shape: int) -> Tensor:
        result = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for start in range(0, shape[0], 256):  # in parts: a whole float32 copy would be too large
            part = result[start : start + 256]
            part.copy_(torch.randn(part.shape, generator=generator, device=device))
        return result

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

    def verify_and_sample(
        rows_NV: Tensor, slots_B: Tensor, slot_params: SlotParams, q_cache: DraftCache
    ) -> tuple[Tensor, Tensor]:
        """The verified tokens of the last len(slots_B) requests, and a token sampled per row."""
        num, zero_B = len(slots_B), torch.zeros_like(slots_B)
        block = DraftBlock(token_BK[-num:], num_B[-num:], q_cache, torch.ones_like(slots_B).bool())
        verdict = backend.verify(VerifyBatch(rows_NV, slot_params, slots_B, zero_B, block))
        slot_N = slots_B.repeat_interleave(drafts + 1)
        zero_N = torch.zeros_like(slot_N)
        rows = Rows(rows_NV, slot_params, slot_N)
        return verdict.token_BK1, backend.sample(rows, Noise(zero_N, zero_N, TARGET))

    in_batch = verify_and_sample(logits_NV, slot_B, params, cache)
    last_NV = logits_NV[-last * (drafts + 1) :].clone()  # the copy has low indices
    last_slots = torch.arange(last, device=device)
    alone = verify_and_sample(
        last_NV, last_slots, _last_slots_of(params, last), _last_slots_of(cache, last)
    )
    name = f"far_rows-V{vocabulary}"
    return [
        none_finding(name, f"different_{kind}", int((far[-len(near) :] != near).sum()), len(near))
        for kind, far, near in zip(("verdicts", "tokens"), in_batch, alone, strict=True)
    ]


def _last_slots_of(record: Any, last: int) -> Any:
    """A copy of a dataclass in which tensors have only the last `last` slots."""
    tensors = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(
        record, **{n: x[-last:].clone() for n, x in tensors.items() if isinstance(x, Tensor)}
    )
