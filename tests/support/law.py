"""The law of what speculation emits, tested against the target's: many slots, a table as the model.

`emit` drives any `propose(prefixes, slots, positions) -> DraftBlock` and a backend's `verify` over
thousands of slots per call until every slot has its tokens; `Chain` is the model, with logits that
depend on the two tokens before; `law_p_value` compares positions and windows of three tokens with
the exact law. Everything runs on the device it is given.

A mutant is a wrapped `propose` or a backend with one function replaced (`law_mutants.py`): it must
be rejected at `MUTANT_P`, where the correct one passes at `CORRECT_P`.

Shapes: S slots (trials of one call), B requests of a round, K drafts, N rows, V vocabulary,
C contexts, L tokens of a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.ops import (
    DRAFT,
    Backend,
    DraftBlock,
    DraftCache,
    Noise,
    Rows,
    SlotParams,
    VerifyBatch,
)
from tests.support.law_model import Chain, Setting, random_chain, window_law

__all__ = ["Chain", "Setting", "random_chain"]

CORRECT_P, MUTANT_P = 1e-4, 1e-6
TRIALS = 200_000
WAVE = {"cpu": 25_000, "cuda": 50_000}
CELLS = 5000  # of the widest window of tokens that are tested together

Propose = Callable[[Tensor, Tensor, Tensor], DraftBlock]
"""(prefix_BL, slot_B, position_B = length of each prefix) -> drafts; L may exceed the longest."""

MakePropose = Callable[[SlotParams], Propose]
"""A drafter for one call's slots."""


@dataclass(frozen=True)
class TableDrafter:
    """Drafts `num_drafts` tokens from a chain through a backend's `draft`.

    real_q: False hides q, so that drafts are verified as one-hot
    lookup: drafts a function of the last two tokens instead, as an n-gram drafter's are; [C]
    """

    backend: Backend
    chain: Chain
    params: SlotParams
    num_drafts: int = 3
    real_q: bool = True
    lookup: Tensor | None = None
    fp64_noise: bool = False

    def __call__(self, prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        num, device = len(slot_B), slot_B.device
        logits_CV = self.chain.logits_CV
        shape = (len(self.params.key_S), self.num_drafts, self.chain.vocabulary)
        cache = DraftCache.empty(*shape, logits_CV.dtype, device) if self.real_q else None
        row_B = torch.arange(num, device=device)
        tail_BK = prefix_BL.new_zeros(num, self.num_drafts)
        prefix_BL = torch.cat([prefix_BL, tail_BK], dim=1)
        token_BK = torch.empty_like(tail_BK)
        for i in range(self.num_drafts):
            context_B = self.chain.context(prefix_BL, position_B + i)
            if self.lookup is None:
                token_BK[:, i] = self.backend.draft(
                    Rows(logits_CV[context_B], self.params, slot_B),
                    Noise(position_B + i, torch.full_like(slot_B, i), DRAFT, fp64=self.fp64_noise),
                    cache,
                )
            else:
                token_BK[:, i] = self.lookup[context_B]
            prefix_BL[row_B, position_B + i] = token_BK[:, i]
        num_B = torch.full_like(slot_B, self.num_drafts)
        return DraftBlock(token_BK, num_B, cache, torch.full_like(num_B, self.real_q).bool())


@dataclass
class Outcome:
    """What every slot emitted, [trials, length], and what became of the drafts at each index."""

    token_SL: Tensor
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        return sum(self.accepted) / max(sum(self.offered), 1)

    def count(self, num_B: Tensor, n_accept_B: Tensor, width: int) -> None:
        """Add one round: draft i was offered if a request had it, accepted if n_accept > i."""
        self.offered += [0] * (width - len(self.offered))
        self.accepted += [0] * (width - len(self.accepted))
        for i in range(width):
            self.offered[i] += int((num_B > i).sum())
            self.accepted[i] += int((n_accept_B > i).sum())


def emit(
    backend: Backend,
    target: Chain,
    make_propose: MakePropose,
    setting: Setting,
    *,
    length: int = 3,
    trials: int = TRIALS,
    seed: int = 0,
    rounds: int | None = None,
) -> Outcome:
    """Emit `length` tokens in each of `trials` slots, a wave of slots at a time.

    rounds: after so many, what is missing is drawn from the exact law instead. If what those rounds
        emit is lossless, and only then, the whole still has the target's law: it is the definition
        by which the papers prove losslessness, and costs less.
    """
    device = target.logits_CV.device
    outcome = Outcome(torch.empty(0, length, dtype=torch.int64, device=device))
    run = _Run(backend, target, setting, length, rounds, device)
    waves = []
    size = WAVE[device.type]
    for wave, start in enumerate(range(0, trials, size)):
        params = setting.params(min(size, trials - start), 1_000_003 * seed + wave, device)
        waves.append(run.wave(params, make_propose(params), outcome, wave))
    outcome.token_SL = torch.cat(waves)
    return outcome


class _Run:
    """One wave after another of propose and verify."""

    def __init__(
        self,
        backend: Backend,
        target: Chain,
        setting: Setting,
        length: int,
        rounds: int | None,
        device: torch.device,
    ) -> None:
        self.backend, self.target, self.setting, self.length = backend, target, setting, length
        self.device, self.edits = device, setting.edits_of(target, device)
        self.rounds = length if rounds is None else rounds  # a round emits at least one token
        self.options: dict[str, Any] = {"fp64_noise": setting.fp64_noise}
        if setting.rates is not None:
            rates = torch.tensor(setting.rates, dtype=torch.float64, device=device)
            self.options["synthetic_rate_K"] = rates
        self.cumulative_CV = None
        if rounds is not None:
            self.cumulative_CV = setting.next_law(target).cumsum(dim=1).to(device)

    def wave(self, params: SlotParams, propose: Propose, outcome: Outcome, wave: int) -> Tensor:
        """Rounds until every slot has emitted `length` tokens, [S, length]."""
        num_slots, length = len(params.key_S), self.length
        random = torch.Generator(self.device).manual_seed(wave)
        token_SL = torch.full((num_slots, length), -1, device=self.device)
        done_S = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        for _ in range(self.rounds):
            slot_B = torch.nonzero(done_S < length).flatten()
            if len(slot_B) == 0:
                break
            shuffle = torch.randperm(len(slot_B), generator=random, device=self.device)
            slot_B = slot_B[shuffle]  # slots are not batch order
            new_B = self._round(params, propose, slot_B, done_S[slot_B], token_SL, outcome)
            done_S[slot_B] = (done_S[slot_B] + new_B).clamp(max=length)
        if self.cumulative_CV is not None:
            self._complete(token_SL, done_S, random)
        return token_SL

    def _round(
        self,
        params: SlotParams,
        propose: Propose,
        slot_B: Tensor,
        position_B: Tensor,
        token_SL: Tensor,
        outcome: Outcome,
    ) -> Tensor:
        prefix_BL, length = token_SL[slot_B], self.length
        drafts = propose(prefix_BL, slot_B, position_B)
        width = drafts.token_BK.shape[1]
        wide_BL = torch.cat([prefix_BL, prefix_BL.new_zeros(len(slot_B), width + 1)], dim=1)
        index_K1 = torch.arange(width + 1, device=self.device)
        wide_BL.scatter_(1, position_B[:, None] + index_K1[:width], drafts.token_BK.clamp(min=0))
        b_N = torch.arange(len(slot_B), device=self.device).repeat_interleave(drafts.num_B + 1)
        first_B = (drafts.num_B + 1).cumsum(0) - drafts.num_B - 1
        i_N = torch.arange(len(b_N), device=self.device) - first_B[b_N]
        context_N = self.target.context(wide_BL[b_N], position_B[b_N] + i_N)
        logits_NV = self.target.logits_CV[context_N]
        edits = None if self.edits is None else self.edits.of(context_N)
        batch = VerifyBatch(logits_NV, params, slot_B, position_B, drafts, edits, **self.options)
        verdict = self.backend.verify(batch)
        assert bool(verdict.finite_B.all())
        outcome.count(drafts.num_B, verdict.n_accept_B, width)
        wide_BL.scatter_(1, position_B[:, None] + index_K1, verdict.token_BK1)
        token_SL[slot_B] = wide_BL[:, :length]
        return verdict.n_accept_B + 1

    def _complete(self, token_SL: Tensor, done_S: Tensor, random: torch.Generator) -> None:
        assert self.cumulative_CV is not None
        for i in range(self.length):
            slot_B = torch.nonzero(done_S <= i).flatten()
            context_B = self.target.context(token_SL[slot_B], torch.full_like(slot_B, i))
            u_B = torch.rand(
                len(slot_B), 1, generator=random, dtype=torch.float64, device=self.device
            )
            drawn_B = torch.searchsorted(self.cumulative_CV[context_B], u_B).flatten()
            token_SL[slot_B, i] = drawn_B.clamp(max=self.target.vocabulary - 1)


def law_p_value(token_SL: Tensor, next_CV: Tensor) -> float:
    """Of every position alone, and of the first and the last few together; Bonferroni's bound.

    Together are as many as give `CELLS` outcomes at most: three of 16 tokens, six of 4.
    """
    length, vocabulary = token_SL.shape[1], next_CV.shape[1]
    widest = 1
    while widest < length and vocabulary ** (widest + 1) <= CELLS:
        widest += 1
    windows = [(i, 1) for i in range(length)]
    windows += [(i, widest) for i in sorted({0, length - widest})]
    p_values = []
    for start, width in windows:
        digits = vocabulary ** torch.arange(width - 1, -1, -1, device=token_SL.device)
        code_S = (token_SL[:, start : start + width] * digits).sum(dim=1)
        counts = torch.bincount(code_S, minlength=vocabulary**width)
        p_values.append(p_value(counts, window_law(next_CV, start, width)))
    return min(1.0, len(p_values) * min(p_values))


def p_value(counts: Tensor, law: Tensor, least: float = 5.0) -> float:
    """Pearson's chi-square of counts against a law; cells expected below `least` are pooled."""
    counts, law = counts.cpu(), law.double().cpu()
    if bool((counts[law == 0] > 0).any()):
        return 0.0  # something impossible was emitted
    expected = law * counts.sum()
    rare = expected < least
    observed = torch.cat([counts[~rare].double(), counts[rare].sum().double()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) > 1 and expected[-1] < least:  # the pool itself is rare
        observed = torch.cat([observed[:-2], observed[-2:].sum()[None]])
        expected = torch.cat([expected[:-2], expected[-2:].sum()[None]])
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))
