"""The model of the laws: a table of logits by the last two tokens, and its exact distribution.

The exact distribution comes from the reference backend, without any code of a fast backend. `emit`
drafts and verifies in thousands of slots; `joint_p_value` compares their tokens with it.

Shapes as in `laws/__init__.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import NonFiniteLogitsError
from foretoken.lab.laws.findings import fit
from foretoken.ops import (
    DRAFT,
    Backend,
    DraftBlock,
    DraftCache,
    Edits,
    Noise,
    Rows,
    Rule,
    SlotParams,
    VerifyBatch,
    get_backend,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Chain:
    """A model: logits of the next token for each context, that is, the last two tokens: [C, V].

    Context number = (last token but one) * (ids + 1) + last token; the id `ids` stands for "no
    token". A draft's chain has the target's contexts, but its vocabulary may differ.
    """

    logits_CV: Tensor

    @property
    def vocabulary(self) -> int:
        return self.logits_CV.shape[1]

    @property
    def ids(self) -> int:
        """Number of tokens that a context may contain: the target's vocabulary."""
        return math.isqrt(len(self.logits_CV)) - 1

    @property
    def start(self) -> int:
        """The context before the first token."""
        return len(self.logits_CV) - 1

    def to(self, device: torch.device) -> Chain:
        return Chain(self.logits_CV.to(device))

    def context(self, prefix_BL: Tensor, length_B: Tensor) -> Tensor:
        """The context of the token after the first `length` tokens of each prefix, [B]."""
        index_B = torch.arange(len(length_B), device=length_B.device)
        last_B, previous_B = (
            torch.where(
                length_B >= back, prefix_BL[index_B, (length_B - back).clamp(min=0)], self.ids
            )
            for back in (1, 2)
        )
        # An id that only the draft's vocabulary has is never accepted: any row may follow it.
        return previous_B.clamp(max=self.ids) * (self.ids + 1) + last_B.clamp(max=self.ids)


def random_chain(
    vocabulary: int, seed: int, spread: float = 1.0, draft_vocabulary: int | None = None
) -> tuple[Chain, Chain]:
    """A random target, and a draft with the target's logits negated.

    spread: standard deviation of the logits; with 0.5 and 16 tokens half of all drafts are accepted
    """
    generator = torch.Generator().manual_seed(seed)
    contexts = (vocabulary + 1) ** 2
    logits = torch.randn(contexts, vocabulary, generator=generator) * spread
    draft = torch.randn(contexts, draft_vocabulary or vocabulary, generator=generator) * spread
    shared = min(vocabulary, draft.shape[1])
    draft[:, :shared] = -logits[:, :shared]
    return Chain(logits), Chain(draft)


def edits_of_rows(edits: Edits, row_N: Tensor) -> Edits:
    """Select rows of edits, in the order of `row_N`; a row may occur more than once."""
    count_N = edits.start_N1.diff()[row_N]
    start_N1 = torch.cat([count_N.new_zeros(1), count_N.cumsum(0)])
    index_M = torch.arange(int(start_N1[-1]), device=row_N.device)
    index_M += (edits.start_N1[row_N] - start_N1[:-1]).repeat_interleave(count_N)
    mask_N = None if edits.mask_N is None else edits.mask_N[row_N]
    entries = (edits.token_M, edits.bias_M, edits.repetition_M, edits.subtract_M)
    return Edits(edits.mask_RW, mask_N, start_N1, *(entry[index_M] for entry in entries))


def _penalties(ids: int) -> Edits:
    """Edits that penalise the two tokens of each context, and ban the id after the last token."""
    rows: list[tuple[int, float, float, float]] = []
    start = [0]
    for context in range((ids + 1) ** 2):
        seen = [token for token in divmod(context, ids + 1) if token < ids]
        entries = {t: (t, 0.0, 1.4, 0.3 * seen.count(t) + 0.2) for t in seen}
        banned = (seen[-1] + 1) % ids if seen else 0
        _, _, repetition, subtract = entries.get(banned, (banned, 0.0, 1.0, 0.0))
        entries[banned] = (banned, -math.inf, repetition, subtract)
        rows += [entries[t] for t in sorted(entries)]
        start.append(len(rows))
    columns = map(torch.tensor, zip(*rows, strict=True))  # token, bias, repetition, subtract
    return Edits(None, None, torch.tensor(start), *columns)


def _grammar(ids: int) -> Edits:
    """Masks that allow about 60 % of the tokens in each context, at least two tokens."""
    contexts, words = (ids + 1) ** 2, -(-ids // 32)
    random = torch.rand(contexts, ids, generator=torch.Generator().manual_seed(ids))
    allowed = (random < 0.6) | (random <= random.kthvalue(2, dim=1, keepdim=True).values)
    bits = torch.zeros(contexts, words * 32, dtype=torch.int64)
    bits[:, :ids] = allowed.long()
    mask_RW = (bits.view(contexts, words, 32) << torch.arange(32)).sum(dim=2)
    mask_RW = torch.where(mask_RW >= 2**31, mask_RW - 2**32, mask_RW).to(torch.int32)
    start, empty = torch.zeros(contexts + 1, dtype=torch.int64), torch.zeros(0)
    return Edits(mask_RW, torch.arange(contexts), start, empty.long(), empty, empty, empty)


# Functions from `Chain.ids` to edits with one row per context: the edited model is still a chain.
EDITS = {"penalties": cache(_penalties), "grammar": cache(_grammar)}


@dataclass(frozen=True)
class Setting:
    """How a request samples, and how it is verified."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    edits: str | None = None  # a key of `EDITS`, or None
    rule: Rule = Rule.STANDARD
    rates: tuple[float, ...] | None = None  # conditional acceptance rates of the synthetic rule
    fp64_noise: bool = False  # whether noise has 53 random bits instead of 32

    def params(self, num_slots: int, seed: int, device: torch.device) -> SlotParams:
        """Parameters of slots: all slots are equal, except that each has a random 64-bit key."""

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        generator = torch.Generator().manual_seed(seed)
        key_S = torch.randint(-(2**63), 2**63 - 1, (num_slots,), generator=generator)
        return SlotParams(
            key_S.to(device),
            column(self.temperature, torch.float32),
            column(self.top_k, torch.int64),
            column(self.top_p, torch.float32),
            column(self.min_p, torch.float32),
            column(self.rule, torch.int64),
            has_filters=self.top_k > 0 or self.top_p < 1 or self.min_p > 0,
        )

    def options(self, device: torch.device) -> dict[str, Any]:
        """Fields of a `VerifyBatch`: the width of the noise, and any synthetic rates."""
        if self.rates is None:
            return {"fp64_noise": self.fp64_noise}
        rate_K = torch.tensor(self.rates, dtype=torch.float64, device=device)
        return {"fp64_noise": self.fp64_noise, "synthetic_rate_K": rate_K}

    def edits_of(self, chain: Chain, device: torch.device) -> Edits | None:
        """Edits with one row per context of the chain; None without `edits`."""
        if self.edits is None:
            return None
        edits = EDITS[self.edits](chain.ids)
        tensors = [getattr(edits, field.name) for field in fields(edits)]
        moved: list[Any] = [None if tensor is None else tensor.to(device) for tensor in tensors]
        return Edits(*moved)

    def next_token(self, chain: Chain) -> Tensor:
        """P(token | context) of a chain, float64 [C, V] on the CPU, by the reference backend."""
        logits_CV = chain.logits_CV.cpu()
        slot_C = torch.zeros(len(logits_CV), dtype=torch.int64)
        processed_CV = get_backend("reference").process_logits(
            Rows(logits_CV, self.params(1, 0, CPU), slot_C, self.edits_of(chain, CPU))
        )
        if self.temperature == 0:
            one_hot = torch.nn.functional.one_hot
            return one_hot(processed_CV.argmax(dim=1), chain.vocabulary).double()
        return processed_CV.double().softmax(dim=1)


def window(next_CV: Tensor, start: int, width: int) -> Tensor:
    """The joint distribution of tokens start .. start + width - 1, float64 [V ** width].

    `next_CV` is P(token | context). In names, a and b are the last two tokens, x and y the next.
    """
    vocabulary = next_CV.shape[1]
    ids = vocabulary + 1
    next_abV = next_CV.double().view(ids, ids, vocabulary)
    state_ab = torch.zeros(ids, ids, dtype=torch.float64)
    state_ab[-1, -1] = 1.0
    for _ in range(start):
        moved_ab = torch.zeros_like(state_ab)
        moved_ab[:, :vocabulary] = torch.einsum("ab,abx->bx", state_ab, next_abV)
        state_ab = moved_ab
    joint = torch.einsum("ab,abx->bx", state_ab, next_abV)  # P(last token, next token)
    if width == 1:
        return joint.sum(dim=0)
    joint = torch.einsum("bx,bxy->xy", joint, next_abV[:, :vocabulary])
    inner = next_abV[:vocabulary, :vocabulary]
    for _ in range(width - 2):
        joint = joint.view(-1, vocabulary, vocabulary, 1) * inner
    return joint.flatten()


TRIALS = 200_000
SLOTS = {"cpu": 25_000, "cuda": 50_000}  # upper bound of the slots of one call
BYTES = {"cpu": 2**28, "cuda": 2**33}  # upper bound of the bytes of logits that one call reads
CELLS = 5000  # upper bound of the number of outcomes of a window of tokens

Propose = Callable[[Tensor, Tensor, Tensor], DraftBlock]
"""A drafter: (prefix_BL, slot_B, position_B) -> drafts after position_B tokens of each prefix."""
MakePropose = Callable[[SlotParams], Propose]
"""Makes a drafter for the slots of one batch, from their parameters."""


def batches(trials: int, device: torch.device, row_bytes: int = 1) -> Iterator[tuple[int, int]]:
    """Split trials into batches of slots; yields (index, number of slots) of each batch."""
    size = max(1, min(SLOTS[device.type], BYTES[device.type] // row_bytes))
    for number, start in enumerate(range(0, trials, size)):
        yield number, min(size, trials - start)


@dataclass(frozen=True)
class TableDrafter:
    """A `Propose`: drafts `num_drafts` tokens of a chain through a backend's `draft`."""

    backend: Backend
    chain: Chain
    params: SlotParams
    num_drafts: int = 3
    real_q: bool = True  # False: the block has no q, and its drafts are verified with a one-hot q
    lookup: Tensor | None = None  # the draft after each context, [C]; None: drafts are sampled
    fp64_noise: bool = False

    def __call__(self, prefix_BL: Tensor, slot_B: Tensor, position_B: Tensor) -> DraftBlock:
        """Draft after the first `position_B` tokens of each prefix."""
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
                rows = Rows(logits_CV[context_B], self.params, slot_B)
                index_B = torch.full_like(slot_B, i)
                noise = Noise(position_B + i, index_B, DRAFT, self.fp64_noise)
                token_BK[:, i] = self.backend.draft(rows, noise, cache)
            else:
                token_BK[:, i] = self.lookup[context_B]
            prefix_BL[row_B, position_B + i] = token_BK[:, i]
        num_B = torch.full_like(slot_B, self.num_drafts)
        return DraftBlock(token_BK, num_B, cache, torch.full_like(num_B, self.real_q).bool())


@dataclass
class Emission:
    """Emitted tokens, and numbers of accepted drafts."""

    token_SL: Tensor  # the tokens of every slot, [trials, length]
    first_accepted_S: Tensor  # number of accepted drafts in each slot's first round
    offered: list[int] = field(default_factory=list)  # number of verified drafts, by draft index
    accepted: list[int] = field(default_factory=list)  # number of accepted drafts, by draft index

    def count(self, num_B: Tensor, n_accept_B: Tensor, width: int) -> None:
        """Add one round: a request had draft i if num > i, and accepted it if n_accept > i."""
        for counts, limit_B in ((self.offered, num_B), (self.accepted, n_accept_B)):
            counts += [0] * (width - len(counts))
            for i in range(width):
                counts[i] += int((limit_B > i).sum())


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
    """Emit `length` tokens in each of `trials` slots, one batch of slots after another.

    rounds: number of rounds, after which missing tokens are drawn from the exact distribution, to
        save time; None: as many rounds as needed. In both cases all tokens together have the
        target's distribution if and only if the rounds are lossless.
    """
    device = target.logits_CV.device
    empty = torch.empty(0, dtype=torch.int64, device=device)
    emission = Emission(empty.view(0, length), empty)
    max_rounds, cumulative_CV = length, None  # a round emits at least one token
    if rounds is not None:
        max_rounds, cumulative_CV = rounds, setting.next_token(target).cumsum(dim=1).to(device)
    slot_batches = []
    for number, num_slots in batches(trials, device):
        params = setting.params(num_slots, 1_000_003 * seed + number, device)
        batch = _SlotBatch(backend, target, setting, params, make_propose(params), length, number)
        for _ in range(max_rounds):
            batch.round(emission)
        if cumulative_CV is not None:
            batch.complete(cumulative_CV)
        slot_batches.append(batch)
    emission.token_SL = torch.cat([batch.token_SL for batch in slot_batches])
    emission.first_accepted_S = torch.cat([batch.first_accepted_S for batch in slot_batches])
    return emission


@dataclass
class _SlotBatch:
    """Slots that draft and verify together, with the tokens that each slot has emitted."""

    backend: Backend
    target: Chain
    setting: Setting
    params: SlotParams
    propose: Propose
    length: int
    number: int

    def __post_init__(self) -> None:
        device, num_slots = self.target.logits_CV.device, len(self.params.key_S)
        self.random = torch.Generator(device).manual_seed(self.number)
        self.edits = self.setting.edits_of(self.target, device)
        self.options = self.setting.options(device)
        self.token_SL = torch.full((num_slots, self.length), -1, device=device)
        self.num_tokens_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.first_accepted_S = torch.zeros_like(self.num_tokens_S)

    def round(self, emission: Emission) -> None:
        """Draft and verify once in every slot that lacks tokens; count the drafts in `emission`."""
        slot_B = torch.nonzero(self.num_tokens_S < self.length).flatten()
        if len(slot_B) == 0:
            return
        device = slot_B.device
        # Random order: the order of requests in a batch should differ from the order of slots.
        slot_B = slot_B[torch.randperm(len(slot_B), generator=self.random, device=device)]
        prefix_BL, position_B = self.token_SL[slot_B], self.num_tokens_S[slot_B]
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
            raise NonFiniteLogitsError("`verify` reports non-finite logits, but all are finite")
        emission.count(drafts.num_B, verdict.n_accept_B, width)
        wide_BL.scatter_(1, index_BK1, verdict.token_BK1)
        self.first_accepted_S[slot_B] += torch.where(position_B == 0, verdict.n_accept_B, 0)
        self.token_SL[slot_B] = wide_BL[:, : self.length]
        self.num_tokens_S[slot_B] = (position_B + verdict.n_accept_B + 1).clamp(max=self.length)

    def complete(self, cumulative_CV: Tensor) -> None:
        """Draw all missing tokens from cumulative sums of P(token | context)."""
        for i in range(self.length):
            slot_B = torch.nonzero(self.num_tokens_S <= i).flatten()
            context_B = self.target.context(self.token_SL[slot_B], torch.full_like(slot_B, i))
            u_B = torch.empty(len(slot_B), 1, dtype=torch.float64, device=slot_B.device)
            u_B.uniform_(generator=self.random)
            drawn_B = torch.searchsorted(cumulative_CV[context_B], u_B).flatten()
            self.token_SL[slot_B, i] = drawn_B.clamp(max=self.target.vocabulary - 1)


def first_row(drafts: DraftBlock) -> Tensor:
    """Index of each request's first row of logits, [B]."""
    return (drafts.num_B + 1).cumsum(0) - drafts.num_B - 1


def joint_p_value(token_SL: Tensor, next_CV: Tensor) -> float:
    """p-value of tokens under the distribution of a chain with P(token | context) = next_CV.

    Each position is tested alone, then the first and the last window of positions. A window is as
    wide as `CELLS` outcomes allow: three positions for 16 tokens, six for 4 tokens. The result is
    Bonferroni's bound: the least p-value times the number of tests.
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
