"""Thousands of slots emit tokens: propose, verify, and again, with a table as the model.

`emit` drives any `propose` and a backend's `verify` until every slot has its tokens, and
`joint_p_value` compares these with the exact distribution, alone and in windows of several tokens.
Everything runs on the target's device. Shapes as in `laws/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.errors import NonFiniteLogitsError
from foretoken.lab.laws.chain import Chain, Setting, edits_of_rows, window
from foretoken.lab.laws.findings import fit
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

TRIALS = 200_000
SLOTS = {"cpu": 25_000, "cuda": 50_000}  # most of one call
BYTES = {"cpu": 2**28, "cuda": 2**33}  # of logits that one call reads, about
CELLS = 5000  # outcomes at most of tokens that are compared together

Propose = Callable[[Tensor, Tensor, Tensor], DraftBlock]
"""(prefix_BL, slot_B, position_B = length of each prefix) -> drafts; L may exceed the longest."""

MakePropose = Callable[[SlotParams], Propose]
"""A drafter for one call's slots."""


def waves(trials: int, device: torch.device, row_bytes: int = 1) -> Iterator[tuple[int, int]]:
    """(number, slots) of each call, if a slot reads `row_bytes` of logits."""
    size = max(1, min(SLOTS[device.type], BYTES[device.type] // row_bytes))
    for number, start in enumerate(range(0, trials, size)):
        yield number, min(size, trials - start)


@dataclass(frozen=True)
class TableDrafter:
    """A `Propose`: drafts `num_drafts` tokens of a chain through a backend's `draft`.

    Attributes:
        real_q: False hides q, so that drafts are verified as one-hot.
        lookup: drafts a function of the last two tokens instead, as an n-gram drafter's are; [C].
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
                index_B = torch.full_like(slot_B, i)
                token_BK[:, i] = self.backend.draft(
                    Rows(logits_CV[context_B], self.params, slot_B),
                    Noise(position_B + i, index_B, DRAFT, self.fp64_noise),
                    cache,
                )
            else:
                token_BK[:, i] = self.lookup[context_B]
            prefix_BL[row_B, position_B + i] = token_BK[:, i]
        num_B = torch.full_like(slot_B, self.num_drafts)
        return DraftBlock(token_BK, num_B, cache, torch.full_like(num_B, self.real_q).bool())


@dataclass
class Emission:
    """What every slot emitted, [trials, length], and what became of the drafts at each index.

    `first_S` is how many drafts each slot accepted in its first round.
    """

    token_SL: Tensor
    first_S: Tensor
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Share of all drafts."""
        return sum(self.accepted) / max(sum(self.offered), 1)

    def count(self, num_B: Tensor, n_accept_B: Tensor, width: int) -> None:
        """Add one round: draft i was offered if a request had it, accepted if n_accept > i."""
        for counts, most_B in ((self.offered, num_B), (self.accepted, n_accept_B)):
            counts += [0] * (width - len(counts))
            for i in range(width):
                counts[i] += int((most_B > i).sum())


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
) -> Emission:
    """Emit `length` tokens in each of `trials` slots, a wave of slots at a time.

    Args:
        rounds: after so many, what is missing is drawn from the exact distribution instead. The
            whole has the target's distribution if and only if what those rounds emit is lossless:
            it is the definition by which the papers prove losslessness, and costs less. None: as
            many as it takes.
    """
    device = target.logits_CV.device
    none = torch.empty(0, dtype=torch.int64, device=device)
    emission = Emission(none.view(0, length), none)
    most, cumulative_CV = length, None  # a round emits at least one token
    if rounds is not None:
        most, cumulative_CV = rounds, setting.next_token(target).cumsum(dim=1).to(device)
    waves_run = []
    for number, num_slots in waves(trials, device):
        params = setting.params(num_slots, 1_000_003 * seed + number, device)
        wave = _Wave(backend, target, setting, params, make_propose(params), length, number)
        for _ in range(most):
            wave.round(emission)
        if cumulative_CV is not None:
            wave.complete(cumulative_CV)
        waves_run.append(wave)
    emission.token_SL = torch.cat([wave.token_SL for wave in waves_run])
    emission.first_S = torch.cat([wave.first_S for wave in waves_run])
    return emission


class _Wave:
    """The slots of one call, each with the tokens that it has emitted."""

    def __init__(
        self,
        backend: Backend,
        target: Chain,
        setting: Setting,
        params: SlotParams,
        propose: Propose,
        length: int,
        number: int,
    ) -> None:
        device, num_slots = target.logits_CV.device, len(params.key_S)
        self.backend, self.target, self.setting = backend, target, setting
        self.params, self.propose = params, propose
        self.random = torch.Generator(device).manual_seed(number)
        self.edits, self.options = setting.edits_of(target, device), setting.options(device)
        self.token_SL = torch.full((num_slots, length), -1, device=device)
        self.done_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.first_S = torch.zeros_like(self.done_S)

    def round(self, emission: Emission) -> None:
        """Draft and verify once in every slot that lacks tokens."""
        length = self.token_SL.shape[1]
        slot_B = torch.nonzero(self.done_S < length).flatten()
        if len(slot_B) == 0:
            return
        device = slot_B.device
        # Slots are not batch order.
        slot_B = slot_B[torch.randperm(len(slot_B), generator=self.random, device=device)]
        prefix_BL, position_B = self.token_SL[slot_B], self.done_S[slot_B]
        drafts = self.propose(prefix_BL, slot_B, position_B)
        width = drafts.token_BK.shape[1]
        wide_BL = torch.cat([prefix_BL, prefix_BL.new_zeros(len(slot_B), width + 1)], dim=1)
        index_BK1 = position_B[:, None] + torch.arange(width + 1, device=device)
        wide_BL.scatter_(1, index_BK1[:, :width], drafts.token_BK.clamp(min=0))
        b_N = torch.arange(len(slot_B), device=device).repeat_interleave(drafts.num_B + 1)
        i_N = torch.arange(len(b_N), device=device) - first_row(drafts)[b_N]
        context_N = self.target.context(wide_BL[b_N], position_B[b_N] + i_N)
        edits = None if self.edits is None else edits_of_rows(self.edits, context_N)
        logits_NV = self.target.logits_CV[context_N]
        batch = VerifyBatch(logits_NV, self.params, slot_B, position_B, drafts, edits)
        verdict = self.backend.verify(batch._replace(**self.options))
        if not bool(verdict.finite_B.all()):
            raise NonFiniteLogitsError("`verify` reports rows that are not finite: there are none")
        emission.count(drafts.num_B, verdict.n_accept_B, width)
        wide_BL.scatter_(1, index_BK1, verdict.token_BK1)
        self.first_S[slot_B] += torch.where(position_B == 0, verdict.n_accept_B, 0)
        self.token_SL[slot_B] = wide_BL[:, :length]
        self.done_S[slot_B] = (position_B + verdict.n_accept_B + 1).clamp(max=length)

    def complete(self, cumulative_CV: Tensor) -> None:
        """Draw what is missing from the exact distribution, given as its sums over tokens."""
        for i in range(self.token_SL.shape[1]):
            slot_B = torch.nonzero(self.done_S <= i).flatten()
            context_B = self.target.context(self.token_SL[slot_B], torch.full_like(slot_B, i))
            u_B = torch.empty(len(slot_B), 1, dtype=torch.float64, device=slot_B.device)
            u_B.uniform_(generator=self.random)
            drawn_B = torch.searchsorted(cumulative_CV[context_B], u_B).flatten()
            self.token_SL[slot_B, i] = drawn_B.clamp(max=self.target.vocabulary - 1)


def first_row(drafts: DraftBlock) -> Tensor:
    """Where the rows of each request begin, [B]."""
    return (drafts.num_B + 1).cumsum(0) - drafts.num_B - 1


def joint_p_value(token_SL: Tensor, next_CV: Tensor) -> float:
    """Of every position alone, and of the first and the last few together; Bonferroni's bound.

    Together are as many as give `CELLS` outcomes at most: three of 16 tokens, six of 4.

    Args:
        next_CV: `Setting.next_token` of the chain that the tokens should come from.
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
        p_values.append(fit(counts, window(next_CV, start, width)))
    return min(1.0, len(p_values) * min(p_values))
