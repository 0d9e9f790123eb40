"""A cycle at the end of an output is found by its shortest period, and runs are none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.acceptance import ending_cycle

TOKENS = st.lists(st.integers(0, 50), max_size=30)


def test_period_is_the_shortest() -> None:
    assert ending_cycle([9, 8] + [1, 2, 3] * 6) == 3
    assert ending_cycle([5] * 20) == 1


def test_short_runs_are_no_cycle() -> None:
    assert ending_cycle([1, 2, 3, 4, 4, 4, 4]) is None
    assert ending_cycle(list(range(40))) is None
    assert ending_cycle([]) is None


def test_a_cycle_that_stopped_earlier_does_not_count() -> None:
    assert ending_cycle([1, 2] * 20 + list(range(10, 30))) is None


@given(TOKENS, st.lists(st.integers(51, 90), min_size=1, max_size=12, unique=True))
def test_any_cycle_is_found_after_any_beginning(head: list[int], period: list[int]) -> None:
    repeats = max(3, -(-16 // len(period)))
    assert ending_cycle(head + period * repeats) == len(period)
