"""The model of the laws: a table of logits by the last two tokens, and what it must emit.

`Chain` is the model, `Setting` how a request samples from it; together they have an exact
distribution, computed by the oracle's `process_logits`, with nothing of a fast backend in it.

Shapes as in `laws/__init__.py`; a, b are the last two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foretoken.ops import Edits, Rows, Rule, SlotParams, get_backend

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Chain:
    """Logits of the next token given the last two, [C, V].

    Context = previous * (ids + 1) + last, where the id `ids` stands for "no token". A draft's chain
    has the target's contexts, and may have another vocabulary.
    """

    logits_CV: Tensor

    @property
    def vocabulary(self) -> int:
        """Tokens that it can emit."""
        return self.logits_CV.shape[1]

    @property
    def ids(self) -> int:
        """Tokens that its contexts tell apart: the target's vocabulary."""
        return math.isqrt(len(self.logits_CV)) - 1

    @property
    def start(self) -> int:
        """The context before the first token."""
        return len(self.logits_CV) - 1

    def to(self, device: torch.device) -> Chain:
        """The same on a device."""
        return Chain(self.logits_CV.to(device))

    def context(self, prefix_BL: Tensor, length_B: Tensor) -> Tensor:
        """The row of `logits_CV` that decides the token after the first `length` of a prefix."""
        index_B = torch.arange(len(length_B), device=length_B.device)
        last_B, previous_B = (
            torch.where(
                length_B >= back, prefix_BL[index_B, (length_B - back).clamp(min=0)], self.ids
            )
            for back in (1, 2)
        )
        # An id that only the draft's vocabulary has is never accepted: any row will do after it.
        return previous_B.clamp(max=self.ids) * (self.ids + 1) + last_B.clamp(max=self.ids)


def random_chain(
    vocabulary: int, seed: int, spread: float = 1.0, draft_vocabulary: int | None = None
) -> tuple[Chain, Chain]:
    """A target and its draft, whose logits are the target's negated.

    Args:
        spread: standard deviation of the logits; .5 of 16 tokens has half of the drafts accepted.
        draft_vocabulary: if it is not the target's.
    """
    generator = torch.Generator().manual_seed(seed)
    contexts = (vocabulary + 1) ** 2
    logits = torch.randn(contexts, vocabulary, generator=generator) * spread
    draft = torch.randn(contexts, draft_vocabulary or vocabulary, generator=generator) * spread
    shared = min(vocabulary, draft.shape[1])
    draft[:, :shared] = -logits[:, :shared]
    return Chain(logits), Chain(draft)


# Edits as a function of the last two tokens, so that what is emitted stays a chain: one row of
# edits per context.


def edits_of_rows(edits: Edits, row_N: Tensor) -> Edits:
    """The edits of these rows, in this order; a row may be taken more than once."""
    count_N = edits.start_N1.diff()[row_N]
    start_N1 = torch.cat([count_N.new_zeros(1), count_N.cumsum(0)])
    index_M = torch.arange(int(start_N1[-1]), device=row_N.device)
    index_M += (edits.start_N1[row_N] - start_N1[:-1]).repeat_interleave(count_N)
    mask_N = None if edits.mask_N is None else edits.mask_N[row_N]
    entries = (edits.token_M, edits.bias_M, edits.repetition_M, edits.subtract_M)
    return Edits(edits.mask_RW, mask_N, start_N1, *(entry[index_M] for entry in entries))


def _penalties(ids: int) -> Edits:
    """Each context's own two tokens are penalised, the token after the last is a bad word."""
    rows: list[tuple[int, float, float, float]] = []
    start = [0]
    for context in range((ids + 1) ** 2):
        seen = [token for token in divmod(context, ids + 1) if token < ids]
        entries = {t: (t, 0.0, 1.4, 0.3 * seen.count(t) + 0.2) for t in seen}
        bad = (seen[-1] + 1) % ids if seen else 0
        _, _, repetition, subtract = entries.get(bad, (bad, 0.0, 1.0, 0.0))
        entries[bad] = (bad, -math.inf, repetition, subtract)
        rows += [entries[t] for t in sorted(entries)]
        start.append(len(rows))
    token, *numbers = zip(*rows, strict=True)
    return Edits(None, None, torch.tensor(start), torch.tensor(token), *map(torch.tensor, numbers))


def _grammar(ids: int) -> Edits:
    """Each context allows about 60 % of the tokens, at least two: drafts know nothing of it."""
    contexts, words = (ids + 1) ** 2, -(-ids // 32)
    random = torch.rand(contexts, ids, generator=torch.Generator().manual_seed(ids))
    allowed = (random < 0.6) | (random <= random.kthvalue(2, dim=1, keepdim=True).values)
    bits = torch.zeros(contexts, words * 32, dtype=torch.int64)
    bits[:, :ids] = allowed.long()
    mask_RW = (bits.view(contexts, words, 32) << torch.arange(32)).sum(dim=2)
    mask_RW = torch.where(mask_RW >= 2**31, mask_RW - 2**32, mask_RW).to(torch.int32)
    start, none = torch.zeros(contexts + 1, dtype=torch.int64), torch.zeros(0)
    return Edits(mask_RW, torch.arange(contexts), start, none.long(), none, none, none)


EDITS: dict[str, Callable[[int], Edits]] = {
    "penalties": cache(_penalties),
    "grammar": cache(_grammar),
}
"""By name, the edits of every context of a chain with so many ids."""


@dataclass(frozen=True)
class Setting:
    """How a request samples, and how it is verified.

    Attributes:
        edits: a name in `EDITS`.
        rates: conditional acceptance rates of the synthetic rule.
        fp64_noise: noise of 53 bits instead of 32.
    """

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

    def options(self, device: torch.device) -> dict[str, Any]:
        """The fields of a `VerifyBatch` beside parameters, drafts and edits."""
        if self.rates is None:
            return {"fp64_noise": self.fp64_noise}
        rate_K = torch.tensor(self.rates, dtype=torch.float64, device=device)
        return {"fp64_noise": self.fp64_noise, "synthetic_rate_K": rate_K}

    def edits_of(self, chain: Chain, device: torch.device) -> Edits | None:
        """The edits of every context (`edits_of_rows` takes those of a batch), or None."""
        if self.edits is None:
            return None
        made = EDITS[self.edits](chain.ids)
        tensors = [getattr(made, field.name) for field in fields(made)]
        moved: list[Any] = [None if tensor is None else tensor.to(device) for tensor in tensors]
        return Edits(*moved)

    def next_token(self, chain: Chain) -> Tensor:
        """P(token | context) of the target, float64 [C, V] on the CPU, by the oracle."""
        logits_CV = chain.logits_CV.cpu()
        slot_C = torch.zeros(len(logits_CV), dtype=torch.int64)
        processed_CV = get_backend("reference").process_logits(
            Rows(logits_CV, self.params(1, 0, CPU), slot_C, self.edits_of(chain, CPU))
        )
        if self.temperature == 0:
            hot_CV = torch.nn.functional.one_hot(processed_CV.argmax(dim=1), chain.vocabulary)
            return hot_CV.double()
        return processed_CV.double().softmax(dim=1)


def window(next_CV: Tensor, start: int, width: int) -> Tensor:
    """P(tokens start .. start + width - 1) of the chain, float64 [V ** width]."""
    vocabulary = next_CV.shape[1]
    ids = vocabulary + 1
    next_abV = next_CV.double().view(ids, ids, vocabulary)
    state_ab = torch.zeros(ids, ids, dtype=torch.float64)
    state_ab[-1, -1] = 1.0
    for _ in range(start):
        moved_ab = torch.zeros_like(state_ab)
        moved_ab[:, :vocabulary] = torch.einsum("ab,abx->bx", state_ab, next_abV)
        state_ab = moved_ab
    joint = torch.einsum("ab,abx->bx", state_ab, next_abV)  # the last token before, x
    if width == 1:
        return joint.sum(dim=0)
    joint = torch.einsum("bx,bxy->xy", joint, next_abV[:, :vocabulary])
    inner = next_abV[:vocabulary, :vocabulary]
    for _ in range(width - 2):
        joint = joint.view(-1, vocabulary, vocabulary, 1) * inner
    return joint.flatten()
