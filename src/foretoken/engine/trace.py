"""The trace of a step: what it computed, and how long its phases took. See `Engine.on_step`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from foretoken.engine.request import Share, Status
from foretoken.slots.step import Outcome, StepResult


@dataclass(slots=True)
class StepTrace:
    """One step in numbers.

    Attributes:
        seconds: by phase. On a host, in this order: schedule, admit, batch, draft, forward, verify,
            advance, observe (if there is a drafter), read, commit. On a GPU the device's own: gap
            (nothing to do since the step before), draft, forward, verify, observe, read.
        total: their sum.
        num_requests: requests in it; num_decoding: those that computed one known token and drafts.
        num_tokens: tokens that the target computed.
        num_context: tokens of the requests whose keys and values it read besides these; drafts of a
            step that was under way when it was launched are left out.
        num_drafts, num_accepted: summed over its requests.
        asked_drafts: how many requests were to have 0, 1, .. drafts, of those that decide.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    num_requests: int = 0
    num_decoding: int = 0
    num_tokens: int = 0
    num_context: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    asked_drafts: list[int] = field(default_factory=list)

    def count(self, shares: Sequence[Share], outcomes: Mapping[int, Outcome]) -> None:
        """Take over what was asked for and what came of it.

        A request that had ended before, of which the host knew too late, is left out.
        """
        asked = Counter(share.max_drafts for share in shares if share.decides)
        self.asked_drafts = [asked[k] for k in range(max(asked, default=-1) + 1)]
        for share in shares:
            if share.request.status is Status.FINISHED:
                continue
            outcome = outcomes[share.slot]
            self.num_requests += 1
            self.num_context += share.start
            self.num_tokens += share.num_tokens + outcome.num_drafts
            self.num_drafts += outcome.num_drafts
            self.num_accepted += outcome.num_accepted
            self.num_decoding += share.decides and share.num_tokens == 1

    def time(self, schedule: float, launch: float, commit: float, result: StepResult) -> None:
        """Take over seconds of a host: of the call that launched the step, by the runner's phases.

        What `launch` took besides them counts as `admit`.
        """
        phases = dict(result.phases)
        admit = phases.pop("admit", 0.0)
        admit += launch - admit - sum(phases.values())
        self.seconds = {"schedule": schedule, "admit": admit, **phases, "commit": commit}
        self.total = schedule + launch + commit

    def read_events(self, result: StepResult) -> None:
        """Let the device's own times take the place of the host's, if there are any."""
        if len(result.events) > 1:
            self.seconds = device_phases(result)
            self.total = sum(self.seconds.values())


def device_phases(result: StepResult) -> dict[str, float]:
    """Seconds between the marks that a step left on a GPU, by phase; waits for the last of them."""
    result.events[-1][1].synchronize()
    return {
        "gap" if phase == "begin" else phase: before.elapsed_time(event) / 1e3
        for (_, before), (phase, event) in pairwise(result.events)
    }


OnStep = Callable[[StepTrace], None]


class PhaseClock:
    """Adds up the seconds between marks, by phase; costs nothing where nothing is timed.

    On a GPU the marks that a step leaves between its stages are events, and their distances are
    known once its result is: see `device_phases`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._seconds: dict[str, float] | None = None
        self._is_gpu = device is not None and device.type == "cuda"
        self._last = 0.0
        self._events: list[tuple[str, Any]] = []
        self._latest: Any = None  # the event after the step before

    def start(self, *, timed: bool) -> None:
        """Time the phases that follow, if so."""
        self._seconds = {} if timed else None
        self._last = time.perf_counter()

    def begin(self) -> None:
        """A step's first stage begins."""
        if self._seconds is not None and self._is_gpu:
            self._events = [("gap", self._latest)] if self._latest is not None else []
            self._record("begin")

    def mark(self, phase: str) -> None:
        """The phase of this name, which began at the mark before, ends now."""
        if self._seconds is not None:
            now = time.perf_counter()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
            self._last = now

    def mark_stage(self, stage: str, phase: str) -> None:
        """A stage ends on the device, and the phase of its name or of another on the host."""
        if self._seconds is not None and self._is_gpu:
            self._record(stage)
        self.mark(phase)

    def _record(self, phase: str) -> None:
        self._latest = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._latest.record()
        self._events.append((phase, self._latest))

    def take(self) -> tuple[dict[str, float], list[tuple[str, Any]]]:
        """The phases of a step and its events; nothing is timed any more."""
        seconds, events = self._seconds or {}, self._events
        self._seconds, self._events = None, []
        return seconds, events
