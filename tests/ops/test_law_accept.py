"""How many drafts are accepted: exact enumeration, overlap, always, never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.ops import DraftBlock, Rule, SlotParams, VerifyBatch
from foretoken.ops.backends.reference import noise
from foretoken.ops.types import Stream
from tests.support.law import TRIALS
from tests.support.law_accept import (
    HIGHEST_U,
    LOWEST_U,
    accepted_moments,
    always_and_never,
    ends_of_u,
    mean_accepted,
    one_hot_of,
    outside_the_nucleus,
    overlap,
    z_finding,
)
from tests.support.law_backends import On, each_backend, fastest
from tests.support.law_cases import require
from tests.support.law_model import Setting, random_chain
from tests.support.law_mutants import Replaced

FEWER = TRIALS // 8  # of laws with many cases, in `make test`

Change = Callable[[SlotParams, DraftBlock], tuple[SlotParams, DraftBlock]]


@each_backend
def test_mean_accepted_is_that_of_the_enumeration(on: On) -> None:
    require(mean_accepted(on.backend, on.device, FEWER))


@pytest.mark.law
@each_backend
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_mean_accepted_full(on: On, num_drafts: int) -> None:
    require(mean_accepted(on.backend, on.device, TRIALS, num_drafts))


def moments(rule: Rule, num_drafts: int, one_hot: bool, seed: int) -> float:
    target, draft = random_chain(4, seed, 0.8)
    q_CV = Setting().next_law(draft)
    if one_hot:
        q_CV = one_hot_of(target.logits_CV.argmax(dim=1), 4)
    p_CV = Setting().next_law(target)
    return accepted_moments(p_CV, q_CV, target, num_drafts, rule)[0]


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_blocks_accept_no_less_by_enumeration(num_drafts: int, one_hot: bool) -> None:
    for seed in range(3):
        standard, block = (
            moments(rule, num_drafts, one_hot, seed) for rule in (Rule.STANDARD, Rule.BLOCK)
        )
        if num_drafts == 1 or one_hot:
            assert block == pytest.approx(standard, abs=1e-12)
        else:
            assert block > standard + 1e-4


@each_backend
def test_acceptance_is_the_overlap(on: On) -> None:
    require(overlap(on.backend, on.device, FEWER))


def verify_given(backend: Any, change: Change, **more: Any) -> Any:
    """Mutant: `verify` gets other parameters and drafts than it was given."""

    def verify(batch: VerifyBatch) -> Any:
        params, drafts = change(batch.params, batch.drafts)
        return backend.verify(batch._replace(params=params, drafts=drafts, **more))

    return Replaced(backend, verify=verify)


def verify_as(rule: Rule, backend: Any, **more: Any) -> Any:
    """Mutant: requests are verified by another rule than theirs."""

    def change(params: SlotParams, drafts: DraftBlock) -> tuple[SlotParams, DraftBlock]:
        return replace(params, rule_S=torch.full_like(params.rule_S, rule)), drafts

    return verify_given(backend, change, **more)


def always(backend: Any) -> Any:
    """Mutant: every draft is accepted."""
    return verify_as(Rule.SYNTHETIC, backend, synthetic_rate_K=torch.ones(1, dtype=torch.float64))


def without_q(backend: Any) -> Any:
    """Mutant: drafts are verified as one-hot, whatever they were drawn from."""
    return verify_given(
        backend,
        lambda params, drafts: (
            params,
            replace(drafts, real_q_B=torch.zeros_like(drafts.real_q_B)),
        ),
    )


def unfiltered(backend: Any) -> Any:
    """Mutant: the target's filters do not hold for drafts."""
    return verify_given(
        backend,
        lambda params, drafts: (
            replace(
                params,
                top_k_S=torch.zeros_like(params.top_k_S),
                top_p_S=torch.ones_like(params.top_p_S),
                min_p_S=torch.zeros_like(params.min_p_S),
            ),
            drafts,
        ),
    )


@fastest
def test_another_mean_is_noticed(on: On) -> None:
    """The block rule's drafts, counted as the standard rule's, miss the enumeration."""
    found = mean_accepted(verify_as(Rule.BLOCK, on.backend), on.device, FEWER)
    wrong = next(f for f in found if f.case.startswith("mean_accepted-standard-real-fp32"))
    assert not wrong.passed


@fastest
@pytest.mark.parametrize(
    ("law", "mutant", "broken"),
    [
        (overlap, without_q, "overlap-standard-fp32"),  # lossless, but it accepts less
        (overlap, always, "overlap-standard-fp32-law"),
        (always_and_never, without_q, "draft=target-standard-T1"),
        (always_and_never, always, "disjoint-block"),
        (outside_the_nucleus, unfiltered, "nucleus-block-top_p-law"),
        (ends_of_u, unfiltered, "u_lowest-outside-standard-fp32"),
        (ends_of_u, always, "u_highest-p=0-standard-fp32"),
        (ends_of_u, without_q, "u_highest-p=q-standard-fp32"),
    ],
)
def test_a_law_of_acceptance_rejects_its_mutant(on: On, law: Any, mutant: Any, broken: str) -> None:
    backend, trials = mutant(on.backend), () if law is ends_of_u else (FEWER,)
    wrong = next(f for f in law(backend, on.device, *trials) if f.case == broken)
    assert not wrong.passed


@each_backend
def test_equal_drafts_are_accepted_and_disjoint_ones_never(on: On) -> None:
    require(always_and_never(on.backend, on.device, FEWER))


@each_backend
def test_drafts_outside_the_nucleus_are_never_accepted(on: On) -> None:
    require(outside_the_nucleus(on.backend, on.device, FEWER))


@each_backend
def test_both_ends_of_u(on: On) -> None:
    require(ends_of_u(on.backend, on.device))


def test_the_keys_give_the_ends_of_u() -> None:
    lowest, highest = (
        noise.uniform_of(0, key, 0, 0, Stream.ACCEPT, False) for key in (LOWEST_U, HIGHEST_U)
    )
    assert lowest == 2.0**-33
    assert highest == 1 - 2.0**-24


def test_a_mean_off_by_five_errors_is_noticed() -> None:
    assert not z_finding("", 0.55, 0.5, 0.01, 1).passed
    assert not z_finding("", 0.55, 0.5, 0.0, 1).passed
    assert z_finding("", 0.5, 0.5, 0.0, 1).passed
