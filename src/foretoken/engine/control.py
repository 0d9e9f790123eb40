"""The choice of K for requests that leave it to the engine (`auto`), made every few steps.

`drafting/control.py` has the arithmetic. A choice depends only on committed steps; prompts in the
same step do not change it. Requests without drafts do not show that drafts would pay again. So now
and then a request gets more drafts than the best choice for one step: a probe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from foretoken.drafting import control
from foretoken.drafting.control import ADAPTS, Acceptance, Choice, Curve, Load, StepCosts, StepTable
from foretoken.engine.request import Request, Share
from foretoken.outputs import EngineMetrics

if TYPE_CHECKING:
    from foretoken.slots.step import Outcome

_log = logging.getLogger(__name__)

_MIN_STEPS, _MAX_STEPS = 8, 64  # least and most steps between choices
# Choices take at most this share of the time, unless `_MAX_STEPS` steps are too short for that. A
# choice takes 0.2 to 2 ms.
_CHOICE_SHARE = 0.01
_CHANGE_RATIO = 1.02  # K changes if expected tokens per second rise by this factor
_PAYBACK_STEPS = 128  # steps within which a drafter's work to catch up must pay
_PROBE_SHARE = 0.015  # share of the time for probes
_PROBE_DRAFTS = 2  # drafts of a probe beyond those of the present choice, on a host
_PROBE_PERIOD = 8  # choices between probes of requests that already have drafts
_WARNING_STEPS = 2000  # after so many steps in a row without drafts, a warning is logged


class DraftControl:
    """Chooses how many drafts each request of a step gets.

    Args:
        table: measured times of steps.
        num_slots, max_drafts: most requests, and most drafts of a request.
        widths: numbers of drafts that a captured step may have, 0 among them; () if every request
            may have its own number.
        clock: returns seconds.
    """

    def __init__(
        self, table: StepTable, num_slots: int, max_drafts: int, widths: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.costs, self.acceptance = StepCosts(table), Acceptance(num_slots, max_drafts)
        self.metrics = EngineMetrics()
        self.max_drafts, self._widths, self._clock = max_drafts, tuple(widths), clock
        self._choice: Choice | None = None  # the present choice
        self._plain: Choice | None = None  # no drafts, for the same requests
        self._adapting: list[Request] = []  # requests whose K the present choice set
        self._batch = 0  # decoding requests at the present choice
        self._wait = 0  # steps until the next choice
        self._undrafted_steps = 0  # steps in a row without drafts
        self._start = 0.0  # when the present step began
        self._budget = 0.0  # seconds saved up for probes
        self._probed: list[tuple[Request, int]] = []  # probed requests, with K before the probe
        self._num_choices, self._has_warned = 0, False
        self._verified: list[tuple[int, int, int, int]] = []  # for `Acceptance.observe`
        # Steps since the last choice: seconds, seconds on the host, tokens.
        self._steps: list[tuple[float, float, int]] = []
        self._seen_S = [0] * num_slots  # by slot: known tokens when the drafter last drafted

    def choose(self, decoding: Sequence[Request]) -> None:
        """Before a step that decodes these requests: end the last probe. If a choice is due, set K
        of the requests that adapt, and perhaps begin a probe."""
        self._start = self._clock()
        self._end_probe()
        adapting = [request for request in decoding if request.adapts]
        self._wait -= 1
        unchanged = adapting == self._adapting and len(decoding) == self._batch
        if unchanged and self._wait > 0:
            return
        self._learn()
        self._adapting, self._batch, self._wait = adapting, len(decoding), _MIN_STEPS
        if not adapting:
            self._choice = None
            return
        self.acceptance.age()
        curve, load = self._curve_and_load(decoding)
        none_B = np.zeros_like(load.fixed_B)
        self._plain = control.expect(curve, load, none_B, in_lockstep=bool(self._widths))
        self._choice = self._best(curve, load, decoding)
        for request, num_drafts in zip(decoding, self._choice.asked_B.tolist(), strict=True):
            request.num_speculative_tokens = num_drafts
        self._probe(curve, load, decoding)
        seconds_between_choices = (self._clock() - self._start) / _CHOICE_SHARE
        steps = int(seconds_between_choices / self._choice.seconds)
        self._wait = min(max(_MIN_STEPS, steps), _MAX_STEPS)

    def observe(
        self, shares: Sequence[Share], outcomes: Mapping[int, Outcome], in_runner: float
    ) -> None:
        """Record the drafts of a step. Also record the step's seconds, if the step had only the
        requests of the present choice, all of them decoded, and there was no probe.

        Args:
            in_runner: seconds spent in the runner. The rest of the step is work on the host.
        """
        tokens, all_decode = 0, True
        for share in shares:
            if not (share.decides and share.num_tokens == 1):
                all_decode = False
            elif share.request.slot == share.slot and share.slot in outcomes:
                outcome = outcomes[share.slot]
                tokens += len(outcome.token_ids)
                if share.max_drafts:
                    counts = share.max_drafts, outcome.num_drafts, outcome.num_accepted
                    self._verified.append((share.slot, *counts))
                    self._seen_S[share.slot] = share.start + 1
        seconds = self._clock() - self._start
        self._budget += _PROBE_SHARE * seconds
        if all_decode and not self._probed and len(shares) == self._batch and self._choice:
            self._steps.append((seconds, seconds - in_runner, tokens))

    def release(self, slot: int) -> None:
        """Forget the request in a slot, which ended or was preempted."""
        self._learn()  # first: `_verified` may have drafts of this slot
        self.acceptance.release(slot)
        self._seen_S[slot] = 0
        if any(request.slot in (-1, slot) for request in self._adapting):
            self._end_probe()
            self._adapting, self._wait = [], 0  # drop references to ended requests

    def _learn(self) -> None:
        """Update acceptance, costs and metrics with the steps since the last choice."""
        verified, self._verified = self._verified, []
        self.acceptance.observe(verified)
        steps, self._steps = self._steps, []
        if not steps or self._choice is None or self._plain is None:
            return
        choice, metrics = self._choice, self.metrics
        step_seconds, host_seconds, step_tokens = zip(*steps, strict=True)
        seconds, tokens = sum(step_seconds), sum(step_tokens)
        self.costs.learn(self._batch, choice.per_request, choice.seconds, median(step_seconds))
        if not self._widths:  # on a device, the host's work overlaps with the device's
            self.costs.learn_host(self._batch, median(host_seconds))
        metrics.controlled_seconds += seconds
        metrics.estimated_plain_seconds += seconds * choice.rate / self._plain.rate
        slower = float(np.exp(self.costs.log_slowdown))
        metrics.realised_plain_seconds += tokens / self._plain.rate * slower
        self._undrafted_steps = 0 if choice.asked_B.any() else self._undrafted_steps + len(steps)
        if self._undrafted_steps >= _WARNING_STEPS and not self._has_warned:
            self._has_warned = True
            self._warn_of_no_gain()

    def _curve_and_load(self, decoding: Sequence[Request]) -> tuple[Curve, Load]:
        slots = [request.slot for request in decoding]
        fixed_B = np.array([ADAPTS if r.adapts else r.num_speculative_tokens for r in decoding])
        context = sum(len(request.token_ids) for request in decoding)
        joint_BK, offered_K = self.acceptance.joint(slots), self.acceptance.offered()
        return self.costs.curve(len(slots)), Load(joint_BK, fixed_B, offered_K, context)

    def _best(self, curve: Curve, load: Load, decoding: Sequence[Request]) -> Choice:
        """The best choice of K; the present K if the best is not clearly better.

        The best choice also pays for the tokens that the drafter must catch up with.
        """
        in_lockstep = bool(self._widths)
        best = (
            control.by_width(curve, load, self._widths)
            if in_lockstep
            else control.by_gain(curve, load)
        )
        previous = self._choice
        if previous is None or len(previous.asked_B) != len(decoding):
            return best
        present_B = np.array([request.num_speculative_tokens for request in decoding])
        present = control.expect(curve, load, present_B, in_lockstep=in_lockstep)
        starts_B = (best.asked_B > 0) & (present.asked_B == 0)
        starting = (r for r, starts in zip(decoding, starts_B, strict=True) if starts)
        seconds = best.seconds + self._catch_up_seconds(starting) / _PAYBACK_STEPS
        return best if best.tokens / seconds > _CHANGE_RATIO * present.rate else present

    def _catch_up_seconds(self, requests: Iterable[Request]) -> float:
        """Seconds in which the drafter can compute what it lacks of these requests' tokens."""
        tokens = sum(len(r.token_ids) - self._seen_S[r.slot] for r in requests)
        return self.costs.table.missed * tokens

    def _probe(self, curve: Curve, load: Load, decoding: Sequence[Request]) -> None:
        """Begin a probe, once enough time was saved up: more drafts for the next request in turn.

        With captured steps all adapting requests get more drafts: every request of such a step
        takes as long as the request with the most drafts.
        """
        if self._choice is None:
            return
        self._num_choices += 1
        probed, in_lockstep = self._adapting, bool(self._widths)
        if not in_lockstep:
            probed = [self._adapting[self._num_choices % len(self._adapting)]]
        present = probed[0].num_speculative_tokens
        raised = min(present + _PROBE_DRAFTS, self.max_drafts)
        if in_lockstep:
            raised = min((width for width in self._widths if width > present), default=present)
        if raised == present or (present and self._num_choices % _PROBE_PERIOD):
            return
        probed_B = np.array([raised if request in probed else 0 for request in decoding])
        asked_B = np.maximum(self._choice.asked_B, probed_B)
        probe = control.expect(curve, load, asked_B, in_lockstep=in_lockstep)
        extra_seconds = max(probe.seconds - self._choice.seconds, 0.0)
        if not present:
            extra_seconds += self._catch_up_seconds(probed)
        if self._budget >= extra_seconds:
            self._budget = 0.0
            self._probed = [(request, request.num_speculative_tokens) for request in probed]
            for request in probed:
                request.num_speculative_tokens = raised

    def _end_probe(self) -> None:
        for request, num_drafts in self._probed:
            request.num_speculative_tokens = num_drafts
        self._probed = []

    def _warn_of_no_gain(self) -> None:
        curve, index_K = self.costs.curve(self._batch), np.arange(self.max_drafts)
        plain_seconds, draft_seconds = (
            float(curve.seconds(k, curve.drafting(np.where(index_K < k, self._batch, 0)), 0))
            for k in (0, 1)
        )
        _log.warning(
            "Speculation has not paid for %d steps: at batch %d the first draft is accepted in "
            "%.0f%% of all cases, and a step with one draft takes %.2f times as long as a step "
            "without drafts. Single steps with drafts are still tried. Leave out "
            "`speculative_config` to save the drafter's memory.",
            self._undrafted_steps, self._batch, 100 * self.acceptance.shared()[0],
            draft_seconds / plain_seconds,
        )  # fmt: skip
