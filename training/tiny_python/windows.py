"""Figures of merit that need no model: the cycle detector and the verification windows."""

from __future__ import annotations

from collections.abc import Sequence


def cycle_start(tokens: Sequence[int], max_period: int = 64, min_span: int = 24) -> int | None:
    """Index from which the tokens repeat to the end with some period, or None.

    The tail must repeat three times, over at least `min_span` tokens. Example: `1 2 3` followed by
    24 times `x` starts its cycle at index 3.
    """
    for period in range(1, max_period + 1):
        span = max(3 * period, min_span)
        if span > len(tokens):
            break
        first = len(tokens) - period
        while first > 0 and tokens[first - 1] == tokens[first - 1 + period]:
            first -= 1
        if len(tokens) - first >= span:
            return first
    return None


def ends_in_cycle(tokens: Sequence[int]) -> bool:
    """True when the output has degenerated into repetition by its end."""
    return cycle_start(tokens) is not None


def window_lengths(accepted: Sequence[bool], drafts: int) -> list[int]:
    """Tokens emitted by each verification along one output, `drafts` proposals a time.

    `accepted[i]` says whether the draft's proposal for token i would pass. A window accepts the
    leading run, at most `drafts` tokens, and then emits one token of the target, so the next
    window starts right behind it. Windows that run off the end are not counted.

    Example: accepted = 1 0 1 1 1 1 1, two drafts -> windows `1 0`, `1 1 (1)`, ... = [2, 3].
    """
    lengths, start = [], 0
    while start + drafts + 1 <= len(accepted):
        run = 0
        while run < drafts and accepted[start + run]:
            run += 1
        lengths.append(run + 1)
        start += run + 1
    return lengths
