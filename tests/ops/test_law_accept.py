"""How many drafts are accepted: by enumeration, the overlap, always, never, at stated rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.lab.laws.acceptance import (
    DRAFTS,
    HIGHEST_U,
    LOWEST_U,
    RATES,
    Combination,
    always_and_never,
    ends_of_u,
    greedy_rejections,
    mean_accepted,
    mean_rates,
    observed_rates,
    outside_the_nucleus,
    overlap,
    per_position,
    rate_findings,
)
from foretoken.lab.laws.chain import TRIALS
from foretoken.lab.laws.findings import z_finding
from foretoken.lab.laws.mutants import batch_mutant, unfiltered
from foretoken.ops import Rule, SlotParams, VerifyBatch
from foretoken.ops.backends.reference import noise
from foretoken.ops.types import Stream
from tests.support.laws import QUICK_NUCLEUS, On, each_backend, fastest, require

# Trials of tests with many cases, in `make test`: bounds are 4 errors. The mutant that is hardest
# to notice, drafts verified by blocks, is off by 8.5 in a mean, by more than 100 in an overlap.
FEWER = TRIALS // 16


@each_backend
def test_mean_accepted_is_that_of_the_enumeration(on: On) -> None:
    require(mean_accepted(on.backend, on.device, FEWER))


@pytest.mark.law
@each_backend
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_mean_accepted_full(on: On, num_drafts: int) -> None:
    require(mean_accepted(on.backend, on.device, TRIALS, num_drafts))


@each_backend
def test_acceptance_is_the_overlap(on: On) -> None:
    require(overlap(on.backend, on.device, FEWER))


def under(rule: Rule, params: SlotParams) -> SlotParams:
    return replace(params, rule_S=torch.full_like(params.rule_S, rule))


@batch_mutant
def by_blocks(x: VerifyBatch) -> VerifyBatch:
    return x._replace(params=under(Rule.BLOCK, x.params))


@batch_mutant
def always(x: VerifyBatch) -> VerifyBatch:
    rate_K = torch.ones(1, dtype=torch.float64, device=x.slot_B.device)
    return x._replace(params=under(Rule.SYNTHETIC, x.params), synthetic_rate_K=rate_K)


@batch_mutant
def without_q(x: VerifyBatch) -> VerifyBatch:
    """Drafts are verified as one-hot although they have a q."""
    one_hot_B = torch.zeros_like(x.drafts.real_q_B)
    return x._replace(drafts=replace(x.drafts, real_q_B=one_hot_B))


@fastest
def test_another_mean_is_noticed(on: On) -> None:
    """The block rule's drafts, counted as the standard rule's, miss the enumeration."""
    found = mean_accepted(by_blocks(on.backend), on.device, FEWER)
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
    trials = {ends_of_u: (), outside_the_nucleus: (QUICK_NUCLEUS,)}.get(law, (FEWER,))
    wrong = next(f for f in law(mutant(on.backend), on.device, *trials) if f.case == broken)
    assert not wrong.passed


@each_backend
def test_equal_drafts_are_accepted_and_disjoint_ones_never(on: On) -> None:
    require(always_and_never(on.backend, on.device, FEWER))


@each_backend
def test_drafts_outside_the_nucleus_are_never_accepted(on: On) -> None:
    require(outside_the_nucleus(on.backend, on.device, QUICK_NUCLEUS))


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


# The synthetic rule accepts at the stated rates.
SELECTED: list[Combination] = [
    (0.0, True, True),
    (0.0, False, False),
    (1.0, True, False),
    (1.0, False, True),
]


@each_backend
def test_rates_per_position(on: On) -> None:
    require(per_position(on.backend, on.device, SELECTED))


@pytest.mark.law
@each_backend
def test_rates_per_position_full(on: On) -> None:
    require(per_position(on.backend, on.device))


@each_backend
def test_mean_rates(on: On) -> None:
    require(mean_rates(on.backend, on.device, (0.0, 0.3, 1.0), (1, 5)))


@pytest.mark.law
@each_backend
@pytest.mark.parametrize("num_drafts", DRAFTS)
def test_mean_rates_full(on: On, num_drafts: int) -> None:
    require(mean_rates(on.backend, on.device, drafts=(num_drafts,)))


@each_backend
def test_a_rejection_at_temperature_zero_emits_the_argmax(on: On) -> None:
    require(greedy_rejections(on.backend, on.device))


@each_backend
def test_rates_off_by_one_are_noticed(on: On) -> None:
    observed, offered = observed_rates(on.backend, on.device, (*RATES[1:], RATES[0]))
    found = rate_findings("rolled", observed, offered, RATES)
    assert not all(finding.passed for finding in found)
