"""The synthetic rule accepts at the stated rates."""

from __future__ import annotations

import pytest

from foretoken.lab.laws.acceptance import (
    DRAFTS,
    RATES,
    Combination,
    greedy_rejections,
    mean_rates,
    observed_rates,
    per_position,
    rate_findings,
)
from tests.support.laws import On, each_backend, require

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
