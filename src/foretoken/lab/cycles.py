"""Outputs that end in a cycle: a small model at T=0 often does.

A repeated text is easy to draft, so such outputs would flatter every acceptance figure. Benchmarks
leave them out and say how many there were.
"""

from __future__ import annotations

from collections.abc import Sequence


def ending_cycle(
    token_ids: Sequence[int], *, max_period: int = 48, min_repeats: int = 3, min_tokens: int = 16
) -> int | None:
    """Period of the cycle that `token_ids` ends in, or None.

    The tail must repeat at least `min_repeats` times and span at least `min_tokens`, so that
    ordinary runs (a line of dashes, nested brackets) do not count.

    Example:
        `ending_cycle([7, 1, 2, 1, 2, 1, 2], min_tokens=6)` is 2.
    """
    size = len(token_ids)
    for period in range(1, min(max_period, size // min_repeats) + 1):
        tail = period
        while tail < size and token_ids[size - 1 - tail] == token_ids[size - 1 - tail + period]:
            tail += 1
        if tail >= max(min_repeats * period, min_tokens):
            return period
    return None
