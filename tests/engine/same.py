"""Outputs that two engines, or two ways of serving, must give alike."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.outputs import CompletionOutput, RequestOutput


def check_same(mine: RequestOutput, theirs: RequestOutput, tolerance: float = 1e-4) -> None:
    """Raise AssertionError unless all that readers get is equal, log-probabilities nearly."""
    assert mine.error is theirs.error is None
    for one, other in zip(mine.outputs, theirs.outputs, strict=True):
        check_sample(one, other, tolerance)
    check_rows(mine.prompt_logprobs, theirs.prompt_logprobs, tolerance)
    assert mine.metrics.drafted_per_position == theirs.metrics.drafted_per_position
    assert mine.metrics.accepted_per_position == theirs.metrics.accepted_per_position


def check_sample(mine: CompletionOutput, theirs: CompletionOutput, tolerance: float) -> None:
    assert (mine.token_ids, mine.origins, mine.text) == (
        theirs.token_ids, theirs.origins, theirs.text
    )  # fmt: skip
    assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
    check_rows(mine.logprobs, theirs.logprobs, tolerance)


def check_rows(mine: Any, theirs: Any, tolerance: float) -> None:
    """Log-probabilities, of outputs or of prompts; None: there are none."""
    assert (mine is None) == (theirs is None)
    for row, expected in zip(mine or [], theirs or [], strict=True):
        assert (row or {}).keys() == (expected or {}).keys()
        for token, entry in (row or {}).items():
            assert entry.rank == expected[token].rank
            assert entry.logprob == pytest.approx(expected[token].logprob, abs=tolerance, rel=0)
