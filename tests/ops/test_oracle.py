"""The fast backends give the oracle's tokens and counts for equal logits and noise.

A row is a near-tie if the oracle itself decides otherwise once its logits move by about `BOUND`:
such rows are excluded, and counted, and their share is bounded. FP32 arithmetic on logits of size
10 errs by about 2e-6, so `BOUND` = 1e-5 nats leaves a factor of five.

Shapes: B requests, K drafts, N rows, V vocabulary, S slots.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.ops import (
    BACKENDS,
    Backend,
    DraftBlock,
    SlotParams,
    Stream,
    Verdict,
    get_backend,
    unavailable,
)
from foretoken.ops.backends import reference
from tests.support.cases import make_edits

BOUND = 1e-5
MOST_EXCLUDED = 0.01
PERTURBATIONS = 4
ORACLE = get_backend("reference")
FAST = [get_backend(name) for name in BACKENDS if name != "reference" and not unavailable(name)]
VOCABULARIES = [1, 5, 999, 1024, 1025, 4097]
DRAFT = (Stream.DRAFT_TOKEN, Stream.DRAFT_BLOCK)


class Case:
    """A random batch: ragged K, placeholders, one-hot and real q, slots in any order."""

    num_requests, most, num_slots = 5, 3, 7

    def __init__(self, vocabulary: int, seed: int, **fixed: float) -> None:
        self.vocabulary = vocabulary
        self.random = torch.Generator().manual_seed(seed)
        self.params = SlotParams(
            torch.randint(-(2**63), 2**63 - 1, (self.num_slots,), generator=self.random),
            self.choose("temperature", [0.0, 0.7, 1.0], fixed),
            self.choose("top_k", [0, 1, 3, 50, 2000], fixed).long(),
            self.choose("top_p", [1.0, 0.9, 0.5], fixed),
            self.choose("min_p", [0.0, 0.1], fixed),
        )
        self.slot_B = torch.randperm(self.num_slots, generator=self.random)[: self.num_requests]
        self.position_B = self.integers(10_000, self.num_requests)
        self.num_B = self.integers(self.most + 1, self.num_requests)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.random)

    def choose(self, name: str, values: list[float], fixed: dict[str, float]) -> Tensor:
        if name in fixed:
            values = [fixed[name]]
        return torch.tensor(values)[self.integers(len(values), self.num_slots)]

    def logits(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.vocabulary, generator=self.random) * 3

    def drafts(self, processed_SKV: Tensor, token_BK: Tensor, dtype: torch.dtype) -> DraftBlock:
        token_BK = token_BK.masked_fill(self.integers(8, *token_BK.shape) == 0, -1)
        real_q_B = self.integers(2, self.num_requests).bool()
        return DraftBlock(token_BK.to(dtype), self.num_B, processed_SKV, real_q_B)


def sample_drafts(ops: Backend, case: Case, q_SKV: Tensor, fp64_noise: bool) -> Tensor:
    """Each request's drafts from its slot's rows, [B * K]."""
    slot_N = case.slot_B.repeat_interleave(case.most)
    index_N = torch.arange(case.most).repeat(case.num_requests)
    position_N = case.position_B.repeat_interleave(case.most) + index_N
    rows = q_SKV[case.slot_B].flatten(0, 1)
    return ops.sample(rows, case.params, slot_N, position_N, index_N, DRAFT, fp64_noise=fp64_noise)


def perturbed(logits: Tensor, trial: int) -> Tensor:
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(trial))
    return logits.double() + BOUND * noise


def agree_or_near_tie(oracle: Tensor, fast: list[Tensor], others: list[Tensor]) -> tuple[int, int]:
    """Compare by leading dimension; returns (rows, rows excluded as near-ties)."""
    excluded = 0
    for n in range(len(oracle)):
        if any(not torch.equal(oracle[n], other[n]) for other in others):
            excluded += 1
        else:
            assert [f[n].tolist() for f in fast] == [oracle[n].tolist()] * len(fast)
    return len(oracle), excluded


def flat_verdict(verdict: Verdict) -> Tensor:
    columns = [verdict.n_accept_B[:, None], verdict.finite_B[:, None].long(), verdict.token_BK1]
    return torch.cat(columns, dim=1)


def compare(case: Case, fp64_noise: bool, dtype: torch.dtype) -> tuple[int, int]:
    """Filters, drafts and verdicts of one batch; returns (decisions, near-ties)."""
    params = case.params
    slot_N = case.slot_B.repeat_interleave(case.num_B + 1)
    raw_NV, raw_SKV = case.logits(len(slot_N)), case.logits(case.num_slots, case.most)
    row = 0
    for slot, num in zip(case.slot_B.tolist(), case.num_B.tolist(), strict=True):
        raw_SKV[slot, :num] = raw_NV[row : row + num] + raw_SKV[slot, :num] / 6  # often accepted
        row += num + 1
    masks = [
        ops.process_logits(x, params, slot_N, None) > -torch.inf
        for ops, x in [(ORACLE, raw_NV)]
        + [(fast, raw_NV) for fast in FAST]
        + [(ORACLE, perturbed(raw_NV, t)) for t in range(PERTURBATIONS)]
    ]
    end = 1 + len(FAST)
    tally = [agree_or_near_tie(masks[0], masks[1:end], masks[end:])]

    slot_SK = torch.arange(case.num_slots).repeat_interleave(case.most)
    p_NV = FAST[0].process_logits(raw_NV, params, slot_N, None)
    q_SKV = FAST[0].process_logits(raw_SKV.flatten(0, 1), params, slot_SK, None).view_as(raw_SKV)
    tokens = sample_drafts(ORACLE, case, q_SKV, fp64_noise)
    others = [
        sample_drafts(ORACLE, case, perturbed(q_SKV, t), fp64_noise) for t in range(PERTURBATIONS)
    ]
    drawn = [sample_drafts(fast, case, q_SKV, fp64_noise) for fast in FAST]
    tally.append(agree_or_near_tie(tokens, drawn, others))

    drafts = case.drafts(q_SKV, tokens.view(case.num_requests, case.most), dtype)
    verdicts = [
        flat_verdict(
            ops.verify(
                p, params, case.slot_B, case.position_B, replace(drafts, logits_SKV=q),
                fp64_noise=fp64_noise,
            )
        )
        for ops, p, q in [(ORACLE, p_NV, q_SKV)]
        + [(fast, p_NV, q_SKV) for fast in FAST]
        + [
            (ORACLE, perturbed(p_NV, t), perturbed(q_SKV, t + 100)) for t in range(PERTURBATIONS)
        ]
    ]  # fmt: skip
    tally.append(agree_or_near_tie(verdicts[0], verdicts[1:end], verdicts[end:]))
    return sum(t[0] for t in tally), sum(t[1] for t in tally)


PAIRWISE = [
    {"top_k": 3, "top_p": 0.9, "temperature": 0.7},
    {"top_k": 50, "min_p": 0.1, "temperature": 1.0},
    {"top_k": 0, "top_p": 0.5, "min_p": 0.1, "temperature": 1.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 0.7},
    {},
]


@pytest.mark.parametrize("fp64_noise", [False, True])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_tokens_and_counts_are_the_oracles(vocabulary: int, fp64_noise: bool) -> None:
    total = excluded = 0
    dtypes = itertools.cycle([torch.int64, torch.int32])
    for seed, fixed in enumerate(PAIRWISE * (3 if vocabulary < 999 else 1)):
        case = Case(vocabulary, seed, **fixed)
        counted, near = compare(case, fp64_noise, next(dtypes))
        total, excluded = total + counted, excluded + near
    assert total > 100
    assert excluded <= MOST_EXCLUDED * total


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(0, 2**31), st.booleans())
def test_small_vocabularies_at_random(vocabulary: int, seed: int, fp64_noise: bool) -> None:
    total, excluded = compare(Case(vocabulary, seed), fp64_noise, torch.int64)
    assert excluded <= 0.2 * total  # of one batch, so a single near-tie weighs much


@pytest.mark.law
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_many_batches(vocabulary: int) -> None:
    total = excluded = 0
    for seed in range(200 if vocabulary < 999 else 40):
        counted, near = compare(Case(vocabulary, 1000 + seed), bool(seed % 2), torch.int64)
        total, excluded = total + counted, excluded + near
    assert excluded <= MOST_EXCLUDED * total


@settings(max_examples=30)
@given(st.integers(0, 2**31))
def test_edits_are_the_oracles(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows, vocabulary = 4, 50

    def pairs(count: int) -> tuple[list[int], list[int]]:
        flat = torch.randperm(rows * vocabulary, generator=random)[:count]
        return (flat // vocabulary).tolist(), (flat % vocabulary).tolist()

    def values(count: int, low: float, high: float) -> list[float]:
        return (torch.rand(count, generator=random) * (high - low) + low).tolist()

    fields: dict[str, list[float]] = {}
    for name, count in (("bias", 9), ("allow", 60), ("ban_early", 5), ("penalty", 40)):
        fields[f"{name}_row_M"], fields[f"{name}_token_M"] = pairs(count)  # type: ignore[assignment]
    fields["ban_late_row_M"], fields["ban_late_token_M"] = [0, 0, 3], [7, 7, 1]
    fields["bias_value_M"] = values(9, -5, 5)
    fields["penalty_count_M"] = torch.randint(0, 4, (40,), generator=random).tolist()
    fields["penalty_repetition_M"] = values(40, 0.5, 2)
    fields["penalty_frequency_M"] = values(40, -2, 2)
    fields["penalty_presence_M"] = values(40, -2, 2)
    edits, case = make_edits(**fields), Case(vocabulary, seed, top_k=0, top_p=1.0, min_p=0.0)
    raw, slot = case.logits(rows), torch.arange(rows)
    oracle = ORACLE.process_logits(raw, case.params, slot, edits)
    for backend in FAST:
        fast = backend.process_logits(raw, case.params, slot, edits).double()
        torch.testing.assert_close(fast, oracle, rtol=1e-5, atol=1e-5)


def test_the_oracle_is_independent() -> None:
    """It imports neither the shared rules nor another backend."""
    for name in ("noise", "process", "sample", "verify"):
        module = inspect.getmodule(getattr(reference, name, None)) or getattr(reference, name)
        imported = [
            node.module or ""
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.ImportFrom)
        ]
        assert not [m for m in imported if "rules" in m or "_cpu" in m]
