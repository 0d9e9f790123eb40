"""The trace of a step: what it computed, and how long its phases took. See `Engine.on_step`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from foretoken.engine.request import Share
from foretoken.slots.step import StepResult


@dataclass(slots=True)
class StepTrace:
    """One step in numbers.

    Attributes:
        seconds: by phase. On a host, in this order: schedule, admit, batch, draft, forward, verify,
            advance, observe (if there is a drafter), read, commit. On a GPU the device's own: gap
            (nothing to do since the step before), draft, forward, verify, observe, read.
        total: their sum.
        host_seconds: what the host spent on the step, waiting included; on a host as `total`.
        num_requests: requests in it; num_decoding: those that computed one known token and drafts.
        num_tokens: tokens that the target computed.
        num_context: tokens of the requests whose keys and values it read beside these; drafts of a
            step that was under way when it was launched are left out.
        num_drafts, num_accepted: summed over its requests.
        asked_drafts: how many requests were to have 0, 1, .. drafts, of those that decide.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    host_seconds: float = 0.0
    num_requests: int = 0
    num_decoding: int = 0
    num_tokens: int = 0
    num_context: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    asked_drafts: list[int] = field(default_factory=list)

    def count(self, result: StepResult, shares: Sequence[Share]) -> None:
        """Take over what was asked for, and the numbers of its result."""
        asked = Counter(share.max_drafts for share in shares if share.decides)
        self.asked_drafts = [asked[k] for k in range(max(asked, default=-1) + 1)]
        decisions = result.decisions
        self.num_requests = len(result.spans)
        self.num_tokens = sum(span.num_tokens for span in result.spans)
        self.num_context = sum(share.start for share in shares)
        self.num_drafts = sum(outcome.num_drafts for outcome in decisions.values())
        self.num_accepted = sum(outcome.num_accepted for outcome in decisions.values())
        self.num_decoding = sum(
            span.slot in decisions and span.num_tokens == 1 + decisions[span.slot].num_drafts
            for span in result.spans
        )


OnStep = Callable[[StepTrace], None]


class PhaseClock:
    """Adds up the seconds between marks, by phase; costs nothing while there is no trace.

    On a GPU the marks that a step leaves between its stages are events, and their distances are
    known once its result is: `Marks.seconds`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.trace: StepTrace | None = None
        self._is_gpu = device is not None and device.type == "cuda"
        self._start = self._last = 0.0
        self._events: list[tuple[str, Any]] = []
        self._latest: Any = None  # the event behind the step before

    def start(self, trace: StepTrace | None) -> None:
        """Time the phases that follow."""
        self.trace = trace
        self._start = self._last = time.perf_counter()

    def begin(self) -> None:
        """A step's first stage begins."""
        if self.trace is not None and self._is_gpu:
            self._events = [("gap", self._latest)] if self._latest is not None else []
            self._record("begin")

    def mark(self, phase: str) -> None:
        """The phase of this name, which began at the mark before, ends now."""
        if self.trace is not None:
            now = time.perf_counter()
            self.trace.seconds[phase] = self.trace.seconds.get(phase, 0.0) + now - self._last
            self._last = now

    def mark_stage(self, stage: str, phase: str) -> None:
        """A stage ends on the device, and the phase of its name or of another on the host."""
        if self.trace is not None and self._is_gpu:
            self._record(stage)
        self.mark(phase)

    def _record(self, phase: str) -> None:
        self._latest = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._latest.record()
        self._events.append((phase, self._latest))

    def take_events(self) -> list[tuple[str, Any]]:
        """The events of the step that was launched, to be read with its result."""
        events, self._events = self._events, []
        return events

    def stop(self) -> StepTrace | None:
        """The trace, complete; nothing is timed any more."""
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.total = trace.host_seconds = self._last - self._start
        return trace


def read_events(trace: StepTrace, events: Sequence[tuple[str, Any]]) -> None:
    """Let a trace have the device's times in the place of the host's, if there are any."""
    if len(events) < 2:
        return
    trace.seconds = {
        "gap" if phase == "begin" else phase: before.elapsed_time(event) / 1e3
        for (_, before), (phase, event) in pairwise(events)
    }
    trace.total = sum(trace.seconds.values())
