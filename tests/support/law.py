"""The law of what speculation emits, tested against the target's: many slots, a table as the model.

`count_sequences` drives any `propose(prefixes, slots, positions) -> DraftBlock` and a backend's
`verify` over thousands of slots per call until every slot has its tokens; `Chain` is the model,
with logits that depend on the two tokens before; `p_value` compares with the chain's joint law.

A mutant is a wrapped `propose` or a backend with one function replaced: it must be rejected at
`MUTANT_P`, where the correct one passes at `CORRECT_P`.

Shapes: S slots (trials of one call), B requests of a round, K drafts, V vocabulary, C contexts,
L tokens of a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from foretoken.ops import Backend, DraftBlock, SlotParams, Stream, Verdict, get_backend
from tests.support.cases import make_params

CORRECT_P, MUTANT_P = 1e-4, 1e-6
TRIALS = 200_000
WAVE = 25_000

Propose = Callable[[Tensor, Tensor, Tensor], DraftBlock]
"""(prefix_BL padded with -1, slot_B, position_B = length of each prefix) -> drafts."""

MakePropose = Callable[[SlotParams], Propose]
"""A drafter for one call's slots."""


@dataclass(frozen=True)
class Chain:
    """Logits of the next token given the last two, [C, V]; the id V stands for "no token"."""

    logits_CV: Tensor

    @property
    def vocabulary(self) -> int:
        return self.logits_CV.shape[1]

    def context(self, prefix_BL: Tensor, length_B: Tensor) -> Tensor:
        """The row of `logits_CV` that decides the token after the first `length` of a prefix."""
        index = torch.arange(len(length_B))
        last, previous = (
            torch.where(length_B >= back, prefix_BL[index, length_B - back], self.vocabulary)
            for back in (1, 2)
        )
        return previous * (self.vocabulary + 1) + last

    def joint(self, params: SlotParams, length: int) -> Tensor:
        """P(x_1..x_length) under slot 0's parameters, [V ** length] in float64."""
        oracle, slots = get_backend("reference"), torch.zeros(len(self.logits_CV), dtype=torch.long)
        next_CV = oracle.process_logits(self.logits_CV, params, slots, None).softmax(dim=1)
        prefix = torch.full((1, length + 1), -1)
        law = torch.ones(1, dtype=torch.float64)
        for done in range(length):
            step = next_CV[self.context(prefix, torch.full((len(prefix),), done))]
            law = (law[:, None] * step).flatten()
            prefix = prefix.repeat_interleave(self.vocabulary, dim=0)
            prefix[:, done] = torch.arange(self.vocabulary).repeat(len(step))
        return law


def random_chain(vocabulary: int, seed: int, spread: float = 1.0) -> tuple[Chain, Chain]:
    """A target and its draft, whose logits are the target's negated: as unlike as can be."""
    generator = torch.Generator().manual_seed(seed)
    contexts = (vocabulary + 1) ** 2
    logits = torch.randn(contexts, vocabulary, generator=generator) * spread
    return Chain(logits), Chain(-logits)


@dataclass(frozen=True)
class TableDrafter:
    """Drafts `num_drafts` tokens from a chain through a backend's `process_logits` and `sample`.

    real_q: False hides q, so that drafts are verified as one-hot
    lookup: drafts a function of the prefix instead, as an n-gram drafter does; needs real_q False
    streams, draft_indices: the noise; other values than these make mutants
    """

    backend: Backend
    chain: Chain
    params: SlotParams
    num_drafts: int = 3
    real_q: bool = True
    lookup: bool = False
    fp64_noise: bool = False
    streams: tuple[Stream, Stream] = (Stream.DRAFT_TOKEN, Stream.DRAFT_BLOCK)
    draft_indices: bool = True

    def __call__(self, prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        num_slots, num_requests = len(self.params.key_S), len(slot_B)
        q_SKV = torch.full((num_slots, self.num_drafts, self.chain.vocabulary), torch.nan)
        token_BK = torch.empty((num_requests, self.num_drafts), dtype=torch.int64)
        pad = torch.full((num_requests, self.num_drafts), -1)
        prefix_BL = torch.cat([prefix_BL, pad], dim=1)
        for i in range(self.num_drafts):
            context_B = self.chain.context(prefix_BL, position_B + i)
            raw = self.chain.logits_CV[context_B]
            logits = self.backend.process_logits(raw, self.params, slot_B, None)
            drawn = self._draw(logits, slot_B, position_B + i, i)
            token_BK[:, i] = context_B % self.chain.vocabulary if self.lookup else drawn
            prefix_BL[torch.arange(num_requests), position_B + i] = token_BK[:, i]
            q_SKV[slot_B, i] = logits.float()
        return DraftBlock(
            token_BK,
            torch.full((num_requests,), self.num_drafts),
            q_SKV if self.real_q else None,
            torch.full((num_requests,), self.real_q),
        )

    def _draw(self, logits: Tensor, slot_B: Tensor, position_B: Tensor, i: int) -> Tensor:
        index_B = torch.full_like(slot_B, i if self.draft_indices else 0)
        return self.backend.sample(
            logits,
            self.params,
            slot_B,
            position_B,
            index_B,
            self.streams,
            fp64_noise=self.fp64_noise,
        )


@dataclass
class Outcome:
    """How often each sequence was emitted, [V ** length], and what became of the drafts."""

    counts: Tensor
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted


def count_sequences(
    backend: Backend,
    target: Chain,
    make_propose: MakePropose,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    length: int = 3,
    trials: int = TRIALS,
    seed: int = 0,
    fp64_noise: bool = False,
) -> Outcome:
    """Emit `length` tokens in each of `trials` slots, a wave of slots at a time."""
    outcome = Outcome(torch.zeros(target.vocabulary**length, dtype=torch.int64))
    digits = target.vocabulary ** torch.arange(length - 1, -1, -1)
    for wave, start in enumerate(range(0, trials, WAVE)):
        slots = min(WAVE, trials - start)
        params = make_params(slots, temperature, top_k, top_p, seed=1_000_003 * seed + wave)
        verify = partial(backend.verify, fp64_noise=fp64_noise)
        propose = make_propose(params)
        tokens = _run(backend, verify, target, propose, params, length, outcome)
        outcome.counts += torch.bincount(tokens @ digits, minlength=len(outcome.counts))
    return outcome


def _run(
    backend: Backend,
    verify: Callable[..., Verdict],
    target: Chain,
    propose: Propose,
    params: SlotParams,
    length: int,
    outcome: Outcome,
) -> Tensor:
    """Rounds of propose and verify until every slot has emitted `length` tokens, [S, length]."""
    num_slots = len(params.key_S)
    token_SL = torch.full((num_slots, length), -1)
    done_S = torch.zeros(num_slots, dtype=torch.int64)
    order = torch.Generator().manual_seed(num_slots)
    while len(slot_B := torch.nonzero(done_S < length).flatten()):
        slot_B = slot_B[torch.randperm(len(slot_B), generator=order)]  # slots are not batch order
        position_B = done_S[slot_B]
        drafts = propose(token_SL[slot_B], slot_B, position_B)
        wide_BL = torch.cat([token_SL[slot_B], torch.full_like(drafts.token_BK, -1)], dim=1)
        columns = position_B[:, None] + torch.arange(drafts.token_BK.shape[1])
        wide_BL.scatter_(1, columns, drafts.token_BK.clamp(min=0))
        b_N = torch.arange(len(slot_B)).repeat_interleave(drafts.num_B + 1)
        row_N = torch.arange(len(b_N)) - ((drafts.num_B + 1).cumsum(0) - drafts.num_B - 1)[b_N]
        raw = target.logits_CV[target.context(wide_BL[b_N], position_B[b_N] + row_N)]
        logits = backend.process_logits(raw, params, slot_B[b_N], None)
        verdict = verify(logits, params, slot_B, position_B, drafts)
        assert bool(verdict.finite_B.all())
        outcome.drafted += int(drafts.num_B.sum())
        outcome.accepted += int(verdict.n_accept_B.sum())
        new_B = torch.minimum(verdict.n_accept_B + 1, length - position_B)
        for i in range(int(new_B.max())):
            b = torch.nonzero(new_B > i).flatten()
            token_SL[slot_B[b], position_B[b] + i] = verdict.token_BK1[b, i]
        done_S[slot_B] += new_B
    return token_SL


def p_value(counts: Tensor, law: Tensor, least: float = 5.0) -> float:
    """Pearson's chi-square of counts against a law; cells expected below `least` are pooled."""
    law = law.double()
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


def hide_token(propose: Propose, token: int) -> Propose:
    """Mutant: a sampled draft becomes a placeholder because of what it is."""

    def mutant(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        drafts = propose(prefix_BL, slot_B, position_B)
        hidden = drafts.token_BK.masked_fill(drafts.token_BK == token, -1)
        return replace(drafts, token_BK=hidden)

    return mutant


def cut_by_prefix(propose: Propose) -> Propose:
    """Legitimate: a draft's length, 0 included, depends on what was known before it was drafted."""

    def ragged(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        drafts = propose(prefix_BL, slot_B, position_B)
        most = drafts.token_BK.shape[1]
        num_B = (prefix_BL.sum(dim=1) + position_B) % (most + 1)
        return replace(drafts, num_B=torch.minimum(num_B, drafts.num_B))

    return ragged


def cut_before_token(propose: Propose, token: int) -> Propose:
    """Mutant: a draft ends before a token because that token was sampled there."""

    def mutant(prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        drafts = propose(prefix_BL, slot_B, position_B)
        kept_BK = (drafts.token_BK != token).long().cumprod(dim=1)
        return replace(drafts, num_B=torch.minimum(kept_BK.sum(dim=1), drafts.num_B))

    return mutant
