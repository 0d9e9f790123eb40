"""Rates of synthetic acceptance: the three ways to state them give the stated values."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.config import SpeculativeConfig
from foretoken.errors import ConfigError
from foretoken.sampling import conditional_rates, joint_rates
from foretoken.sampling.synthetic import DECAY, rates_of

LENGTHS = [1, 2, 3, 5, 10]


def config(k: int, **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram", num_speculative_tokens=k, rejection_sample_method="synthetic", **options
    )


def decay_of(rates: tuple[float, ...]) -> float:
    return rates[1] / rates[0]


@given(rate=st.floats(0, 1), k=st.integers(1, 16))
def test_the_mean_of_the_joint_rates_is_the_rate(rate: float, k: int) -> None:
    rates = rates_of(config(k, synthetic_acceptance_rate=rate))
    assert len(rates) == k
    assert all(0.0 <= c <= 1.0 for c in rates)
    joint = joint_rates(rates)
    assert abs(sum(joint) / k - rate) < 1e-8
    for before, after in pairwise(joint):
        assert after <= before
    if rate and k > 1:
        first, decay = rates[0], decay_of(rates)
        assert DECAY - 1e-12 <= decay <= 1 + 1e-12
        assert rates == pytest.approx([first * decay**i for i in range(k)])
        # The least decay that reaches the rate: only a first rate of 1 explains a larger one.
        assert first == pytest.approx(1.0) or decay == pytest.approx(DECAY)


def test_known_rates() -> None:
    assert rates_of(config(1, synthetic_acceptance_rate=0.3)) == pytest.approx([0.3])
    assert rates_of(config(3, synthetic_acceptance_rate=0)) == (0, 0, 0)
    assert rates_of(config(3, synthetic_acceptance_rate=1)) == (1, 1, 1)
    # (a + 0.85 a^2) / 2 = 0.5 has the root (sqrt(1 + 3.4) - 1) / 1.7.
    first = (4.4**0.5 - 1) / 1.7
    rates = rates_of(config(2, synthetic_acceptance_rate=0.5))
    assert rates == pytest.approx([first, 0.85 * first])
    # 0.95 = (1 + g) / 2 needs g = 0.9 > 0.85.
    assert rates_of(config(2, synthetic_acceptance_rate=0.95)) == pytest.approx([1, 0.9])


@given(
    rate=st.floats(0, 1), more=st.floats(0, 1), k=st.sampled_from(LENGTHS), position=st.integers(0)
)
def test_a_higher_rate_lowers_no_position(rate: float, more: float, k: int, position: int) -> None:
    low, high = sorted((rate, more))
    below = rates_of(config(k, synthetic_acceptance_rate=low))
    above = rates_of(config(k, synthetic_acceptance_rate=high))
    assert below[position % k] <= above[position % k] + 1e-12


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_rates_per_position_are_unconditional(given_rates: list[float]) -> None:
    falling = sorted(given_rates, reverse=True)
    rates = rates_of(config(len(falling), synthetic_acceptance_rates=falling))
    assert all(0.0 <= c <= 1.0 for c in rates)
    assert joint_rates(rates) == pytest.approx(falling, abs=1e-12)


def test_nothing_is_accepted_after_a_rate_of_zero() -> None:
    given_config = config(4, synthetic_acceptance_rates=[0.8, 0.4, 0.0, 0.0])
    assert rates_of(given_config) == (0.8, 0.5, 0.0, 0.0)
    assert given_config.synthetic_acceptance_rates == (0.8, 0.4, 0.0, 0.0)


@given(k=st.integers(1, 10), share=st.floats(0, 1))
def test_a_length_is_ones_then_a_fraction(k: int, share: float) -> None:
    length = 1 + share * k
    rates = rates_of(config(k, synthetic_acceptance_length=length))
    assert len(rates) == k
    assert 1 + sum(joint_rates(rates)) == pytest.approx(length)
    ones = int(length - 1)
    assert rates[:ones] == (1.0,) * ones
    assert rates[ones + 1 :] == (0.0,) * (k - ones - 1)


def test_known_lengths() -> None:
    def of(length: float) -> tuple[float, ...]:
        return rates_of(config(3, synthetic_acceptance_length=length))

    assert [of(1), of(2.25), of(3), of(4)] == [(0, 0, 0), (1, 0.25, 0), (1, 1, 0), (1, 1, 1)]


def test_lossless_rules_have_no_rates() -> None:
    assert rates_of(SpeculativeConfig(method="ngram")) == ()


RATE, RATES, LENGTH = (f"synthetic_acceptance_{name}" for name in ("rate", "rates", "length"))
BAD = [
    ({}, RATE, None, RATES),
    ({RATE: 0.5, LENGTH: 2}, LENGTH, 2, RATE),
    ({RATE: 0.5, RATES: [0.5] * 4}, RATES, [0.5] * 4, RATE),
    ({RATE: 1.01}, RATE, 1.01, r"\[0, 1\]"),
    ({RATE: -0.1}, RATE, -0.1, r"\[0, 1\]"),
    ({RATE: float("nan")}, RATE, None, r"\[0, 1\]"),
    ({RATE: True}, RATE, True, r"\[0, 1\]"),
    ({RATE: "0.5"}, RATE, "0.5", r"\[0, 1\]"),
    ({RATES: [0.5, 0.4, 0.3]}, RATES, [0.5, 0.4, 0.3], "= 4 numbers"),
    ({RATES: 0.5}, RATES, 0.5, "= 4 numbers"),
    ({RATES: "0.5!"}, RATES, "0.5!", "= 4 numbers"),
    ({RATES: [0.5, 0.6, 0.3, 0]}, RATES + "[1]", 0.6, r"\[0, 0.5\]"),
    ({RATES: [1.5, 0.6, 0.3, 0]}, RATES + "[0]", 1.5, r"\[0, 1\]"),
    ({RATES: [0.5, 0.4, 0.3, -0.1]}, RATES + "[3]", -0.1, r"\[0, 0.3\]"),
    ({LENGTH: 0.9}, LENGTH, 0.9, r"\[1, 5\]"),
    ({LENGTH: 5.1}, LENGTH, 5.1, r"\[1, 5\]"),
]


@pytest.mark.parametrize(("options", "field", "value", "bound"), BAD)
def test_what_is_wrong_is_named(
    options: dict[str, Any], field: str, value: Any, bound: str
) -> None:
    with pytest.raises(ConfigError, match=bound) as caught:
        config(4, **options)
    assert caught.value.field == "speculative_config." + field
    with pytest.raises(ConfigError, match=bound) as direct:
        conditional_rates(4, **options)
    assert direct.value.field == field
    if value is not None:
        assert caught.value.value == direct.value.value == value


@pytest.mark.parametrize("options", [{RATE: 0.4}, {RATES: [0.9, 0.5, 0.5, 0]}, {LENGTH: 2.7}])
def test_rates_need_no_configuration(options: dict[str, Any]) -> None:
    assert conditional_rates(4, **options) == rates_of(config(4, **options))
    assert len(conditional_rates(4, **options)) == 4


@pytest.mark.parametrize("count", [0, 65, 2.0, True, None])
def test_the_number_of_drafts_is_checked(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"`num_speculative_tokens` .* \[1, 64\]"):
        conditional_rates(count, synthetic_acceptance_rate=0.5)


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
@pytest.mark.parametrize("options", [{RATE: 0.5}, {RATES: [0.5] * 4}, {LENGTH: 3}])
def test_rates_without_synthetic_are_refused(rule: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"left out with rejection_sample_method `{rule}`"):
        SpeculativeConfig(method="ngram", rejection_sample_method=rule, **options)


def test_json_gives_the_same() -> None:
    text = (
        '{"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic", '
        '"synthetic_acceptance_rates": [0.5, 0.25]}'
    )
    parsed = SpeculativeConfig.parse(text)
    assert parsed == config(2, synthetic_acceptance_rates=(0.5, 0.25))
    assert rates_of(parsed) == (0.5, 0.5)  # type: ignore[arg-type]
