"""The figures of merit against hand-worked examples."""

import pytest

from training.tiny_python.windows import cycle_start, ends_in_cycle, window_lengths


def test_windows_hand_worked() -> None:
    # K = 2. Token 0 passes, token 1 does not: 1 accepted + 1 emitted = 2, next start 2.
    # Tokens 2, 3 pass: 2 + 1 = 3, next start 5. From 5 a window of 3 tokens does not fit.
    assert window_lengths([True, False, True, True, True, True, True], 2) == [2, 3]


@pytest.mark.parametrize(("flag", "expected"), [(True, [5, 5]), (False, [1] * 6)])
def test_windows_extremes(flag: bool, expected: list[int]) -> None:
    assert window_lengths([flag] * 10, 4) == expected


def test_windows_shorter_than_one_window() -> None:
    assert window_lengths([True] * 4, 4) == []


@pytest.mark.parametrize("period", [1, 3, 17, 64])
def test_cycle_is_found_at_every_period(period: int) -> None:
    assert ends_in_cycle([1_000 + i for i in range(50)] + list(range(period)) * max(3, 24))


def test_cycle_needs_three_repeats_over_the_minimum_span() -> None:
    assert not ends_in_cycle([*range(100), *range(20), *range(20)])
    assert not ends_in_cycle([*range(100), *([7] * 23)])
    assert ends_in_cycle([*range(100), *([7] * 24)])
    assert not ends_in_cycle([])


def test_cycle_start_hand_worked() -> None:
    assert cycle_start([1, 2, 3, *([9] * 24)]) == 3
    assert cycle_start([5, 6, 7, *([8, 9] * 12)]) == 3
    assert cycle_start([1, 2, 3]) is None


def test_cycle_must_reach_the_end() -> None:
    assert not ends_in_cycle([7] * 100 + list(range(100)))
