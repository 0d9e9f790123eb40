"""The trace of a step: what it computed, and how long its phases took. See `Engine.on_step`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from foretoken.slots.step import StepResult


@dataclass(slots=True)
class StepTrace:
    """One step in numbers.

    Attributes:
        seconds: by phase, in this order: schedule, admit, draft, batch, forward, verify,
            log-probabilities (if any are wanted), advance, commit.
        total: their sum.
        num_requests: requests in it; num_decoding: those that computed one known token and drafts.
        num_tokens: tokens that the target computed.
        num_drafts, num_accepted: summed over its requests.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    num_requests: int = 0
    num_decoding: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def count(self, result: StepResult) -> None:
        """Take over the numbers of its result."""
        decisions = result.decisions
        self.num_requests = len(result.spans)
        self.num_tokens = sum(span.num_tokens for span in result.spans)
        self.num_drafts = sum(outcome.num_drafts for outcome in decisions.values())
        self.num_accepted = sum(outcome.num_accepted for outcome in decisions.values())
        self.num_decoding = sum(
            span.slot in decisions and span.num_tokens == 1 + decisions[span.slot].num_drafts
            for span in result.spans
        )


OnStep = Callable[[StepTrace], None]


class PhaseClock:
    """Adds up the seconds between marks, by phase; costs nothing while there is no trace."""

    def __init__(self) -> None:
        self.trace: StepTrace | None = None
        self._start = self._last = 0.0

    def start(self, trace: StepTrace | None) -> None:
        """Time the phases that follow."""
        self.trace = trace
        self._start = self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """The phase of this name, which began at the mark before, ends now."""
        if self.trace is not None:
            now = time.perf_counter()
            self.trace.seconds[phase] = self.trace.seconds.get(phase, 0.0) + now - self._last
            self._last = now

    def stop(self) -> StepTrace | None:
        """The trace, complete; nothing is timed any more."""
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.total = self._last - self._start
        return trace
