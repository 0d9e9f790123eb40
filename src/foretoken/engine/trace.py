"""The trace of a step: its sizes, and the times of its phases. See `Engine.on_step`."""

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
            advance, observe (if there is a drafter), read, commit. On a GPU, by the device's clock:
            gap (idle since the step before), draft, forward, verify, observe, read.
        total: sum of `seconds`.
        num_decoding: requests that computed one known token and verified drafts.
        num_tokens: tokens that the target computed.
        num_context: earlier tokens of the requests, of which the target read keys and values. Not
            counted are accepted drafts of a step that was under way when this step was launched.
        asked_drafts: item k: how many deciding requests were scheduled with k as the most drafts.
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
        """Count all shares in `asked_drafts`; elsewhere only shares of requests that still run."""
        counts = Counter(share.max_drafts for share in shares if share.decides)
        self.asked_drafts = [counts[k] for k in range(max(counts, default=-1) + 1)]
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

    def time(self, seconds: Sequence[float], result: StepResult) -> None:
        """Set the host's seconds by phase.

        Args:
            seconds: the times to schedule, to launch and to commit, in the `Engine.step` that
                launched this step.
            result: has the times of other phases of the launch; the rest of the launch is `admit`.
        """
        (schedule, launch, commit), phases = seconds, dict(result.phases)
        phases.pop("admit", 0.0)
        admit = launch - sum(phases.values())
        self.seconds = {"schedule": schedule, "admit": admit, **phases, "commit": commit}
        self.total = schedule + launch + commit

    def read_events(self, result: StepResult) -> None:
        """Replace the host's times by those of the device's clock, if events were recorded."""
        if len(result.events) > 1:
            self.seconds = device_phases(result)
            self.total = sum(self.seconds.values())


def device_phases(result: StepResult) -> dict[str, float]:
    """Seconds of a step's phases by the clock of the GPU; waits for the step's last event."""
    result.events[-1][1].synchronize()
    return {
        "gap" if phase == "begin" else phase: before.elapsed_time(event) / 1e3
        for (_, before), (phase, event) in pairwise(result.events)
    }


OnStep = Callable[[StepTrace], None]


class PhaseClock:
    """Adds up the seconds between marks, by phase; costs nothing in steps that are not timed. On a
    GPU it also records events between the stages of a step, for `device_phases`."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._seconds: dict[str, float] | None = None
        self._is_gpu = device is not None and device.type == "cuda"
        self._last = 0.0
        self._events: list[tuple[str, Any]] = []
        self._latest: Any = None  # the latest event, perhaps of an earlier step

    def start(self, *, timed: bool) -> None:
        self._seconds = {} if timed else None
        self._last = time.perf_counter()

    def begin_stages(self) -> None:
        """On a GPU, record the beginning of a step's first stage."""
        if self._seconds is not None and self._is_gpu:
            self._events = [("gap", self._latest)] if self._latest is not None else []
            self._record("begin")

    def mark(self, phase: str) -> None:
        """End the phase of this name, which began at the previous mark."""
        if self._seconds is not None:
            now = time.perf_counter()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
            self._last = now

    def mark_stage(self, stage: str, phase: str) -> None:
        """End a stage on the device, and a phase on the host."""
        if self._seconds is not None and self._is_gpu:
            self._record(stage)
        self.mark(phase)

    def _record(self, phase: str) -> None:
        self._latest = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._latest.record()
        self._events.append((phase, self._latest))

    def take(self) -> tuple[dict[str, float], list[tuple[str, Any]]]:
        """End the timing of a step; returns the seconds by phase, and the (phase, event) pairs."""
        seconds, events = self._seconds or {}, self._events
        self._seconds, self._events = None, []
        return seconds, events
