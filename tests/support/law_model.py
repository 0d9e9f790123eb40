"""The model of the law tests: a table of logits by the last two tokens, and its exact law.

`Chain` is the model, `Setting` how a request samples from it, `window_law` what must come out. The
oracle's `process_logits` gives the law; nothing of a fast backend is used here.

Shapes: S slots, N rows, V vocabulary, C contexts, M entries of edits, L tokens of a prefix; a, b
the last two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.ops import Edits, Rows, Rule, SlotParams, get_backend


@dataclass(frozen=True)
class Chain:
    """Logits of the next token given the last two, [C, V].

    Context = previous * (ids + 1) + last, where the id `ids` stands for "no token". A draft's chain
    has the target's contexts, and may have another vocabulary.
    """

    logits_CV: Tensor

    @property
    def vocabulary(self) -> int:
        return self.logits_CV.shape[1]

    @property
    def ids(self) -> int:
        return math.isqrt(len(self.logits_CV)) - 1

    @property
    def start(self) -> int:
        """The context before the first token."""
        return len(self.logits_CV) - 1

    def to(self, device: torch.device) -> Chain:
        return Chain(self.logits_CV.to(device))

    def context(self, prefix_BL: Tensor, length_B: Tensor) -> Tensor:
        """The row of `logits_CV` that decides the token after the first `length` of a prefix."""
        index = torch.arange(len(length_B), device=length_B.device)
        last, previous = (
            torch.where(
                length_B >= back, prefix_BL[index, (length_B - back).clamp(min=0)], self.ids
            )
            for back in (1, 2)
        )
        # An id that only the draft's vocabulary has is never accepted: any row will do after it.
        return previous.clamp(max=self.ids) * (self.ids + 1) + last.clamp(max=self.ids)


def random_chain(
    vocabulary: int, seed: int, spread: float = 1.0, draft_vocabulary: int | None = None
) -> tuple[Chain, Chain]:
    """A target and its draft, whose logits are the target's negated: as unlike as can be."""
    generator = torch.Generator().manual_seed(seed)
    contexts = (vocabulary + 1) ** 2
    logits = torch.randn(contexts, vocabulary, generator=generator) * spread
    draft = torch.randn(contexts, draft_vocabulary or vocabulary, generator=generator) * spread
    shared = min(vocabulary, draft.shape[1])
    draft[:, :shared] = -logits[:, :shared]
    return Chain(logits), Chain(draft)


@dataclass(frozen=True)
class ContextEdits:
    """Edits as a function of the last two tokens, so that what is emitted stays a chain."""

    every_context: Edits  # its N rows are the C contexts

    def of(self, context_N: Tensor) -> Edits:
        every = self.every_context
        count_N = every.start_N1.diff()[context_N]
        start_N1 = torch.cat([count_N.new_zeros(1), count_N.cumsum(0)])
        first_N = every.start_N1[context_N] - start_N1[:-1]
        index_M = torch.arange(int(start_N1[-1]), device=context_N.device)
        index_M += first_N.repeat_interleave(count_N)
        mask_N = None if every.mask_N is None else every.mask_N[context_N]
        entries = (every.token_M, every.bias_M, every.repetition_M, every.subtract_M)
        return Edits(every.mask_RW, mask_N, start_N1, *(e[index_M] for e in entries))


def penalties(ids: int) -> Edits:
    """Each context's own two tokens are penalised, the token after the last is a bad word."""
    rows: list[tuple[int, int, float, float, float]] = []
    start = [0]
    for context in range((ids + 1) ** 2):
        seen = [token for token in divmod(context, ids + 1) if token < ids]
        entries = {t: (t, 0.0, 1.4, 0.3 * seen.count(t) + 0.2) for t in seen}
        bad = (seen[-1] + 1) % ids if seen else 0
        _, _, repetition, subtract = entries.get(bad, (bad, 0.0, 1.0, 0.0))
        entries[bad] = (bad, -math.inf, repetition, subtract)
        rows += [(context, *entries[t]) for t in sorted(entries)]
        start.append(len(rows))
    _, tokens, bias, repetition_M, subtract_M = zip(*rows, strict=True)
    floats = [torch.tensor(x, dtype=torch.float32) for x in (bias, repetition_M, subtract_M)]
    return Edits(None, None, torch.tensor(start), torch.tensor(tokens), *floats)


def grammar(ids: int) -> Edits:
    """Each context allows about 60 % of the tokens, at least two: drafts know nothing of it."""
    contexts, words = (ids + 1) ** 2, -(-ids // 32)
    random = torch.rand(contexts, ids, generator=torch.Generator().manual_seed(ids))
    allowed = (random < 0.6) | (random <= random.kthvalue(2, dim=1, keepdim=True).values)
    bits = torch.zeros(contexts, words * 32, dtype=torch.int64)
    bits[:, :ids] = allowed.long()
    weight = 1 << torch.arange(32)
    mask_RW = (bits.view(contexts, words, 32) * weight).sum(dim=2)
    mask_RW = torch.where(mask_RW >= 2**31, mask_RW - 2**32, mask_RW).to(torch.int32)
    start, none = torch.zeros(contexts + 1, dtype=torch.int64), torch.zeros(0)
    return Edits(mask_RW, torch.arange(contexts), start, none.long(), none, none, none)


EDITS: dict[str, Callable[[int], Edits]] = {"penalties": penalties, "grammar": grammar}


@dataclass(frozen=True)
class Setting:
    """How a request samples, and how it is verified. `rates`: of the synthetic rule."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    edits: str | None = None
    rule: Rule = Rule.STANDARD
    rates: tuple[float, ...] | None = None
    fp64_noise: bool = False

    def params(self, num_slots: int, seed: int, device: torch.device) -> SlotParams:
        """Every slot alike; keys are random 64-bit numbers."""

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

    def edits_of(self, chain: Chain, device: torch.device) -> ContextEdits | None:
        if self.edits is None:
            return None
        made = EDITS[self.edits](chain.ids)
        names = Edits.__dataclass_fields__
        fields = {name: getattr(made, name) for name in names}
        return ContextEdits(
            Edits(**{n: None if x is None else x.to(device) for n, x in fields.items()})
        )

    def next_law(self, chain: Chain) -> Tensor:
        """P(token | context) of the target, float64 [C, V] on the CPU, by the oracle."""
        cpu = torch.device("cpu")
        logits_CV = chain.logits_CV.cpu()
        edits = self.edits_of(chain, cpu)
        slot_C = torch.zeros(len(logits_CV), dtype=torch.int64)
        processed_CV = get_backend("reference").process_logits(
            Rows(logits_CV, self.params(1, 0, cpu), slot_C, edits.every_context if edits else None)
        )
        if self.temperature == 0:
            hot = torch.nn.functional.one_hot(processed_CV.argmax(dim=1), chain.vocabulary)
            return hot.double()
        return processed_CV.double().softmax(dim=1)


def window_law(next_CV: Tensor, start: int, width: int) -> Tensor:
    """P(tokens start .. start + width - 1) of the chain, float64 [V ** width]."""
    vocabulary = next_CV.shape[1]
    ids = vocabulary + 1
    next_abV = next_CV.double().view(ids, ids, vocabulary)
    state_ab = torch.zeros(ids, ids, dtype=torch.float64)
    state_ab[-1, -1] = 1.0
    for _ in range(start):
        moved = torch.zeros_like(state_ab)
        moved[:, :vocabulary] = torch.einsum("ab,abx->bx", state_ab, next_abV)
        state_ab = moved
    law = torch.einsum("ab,abx->bx", state_ab, next_abV)  # the last token before, x
    if width == 1:
        return law.sum(dim=0)
    law = torch.einsum("bx,bxy->xy", law, next_abV[:, :vocabulary])
    inner = next_abV[:vocabulary, :vocabulary]
    for _ in range(width - 2):
        law = law.view(-1, vocabulary, vocabulary, 1) * inner
    return law.flatten()
