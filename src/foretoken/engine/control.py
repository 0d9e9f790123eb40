"""The choice of K for requests that leave it to the engine (`auto`), made every few steps.

Charter: from requests to the numbers of `drafting/control.py` and back; when to choose and when to
probe; metrics and warnings. A choice depends on committed steps only; prompts in the same step do
not change it.

A request without drafts gives no sign that drafts would pay again. So now and then a request gets
more drafts than the best choice, for one step (a probe): as often as `_PROBING` of the time allows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from foretoken.drafting.control import (
    ADAPTS,
    Acceptance,
    Choice,
    Curve,
    Load,
    StepCosts,
    StepTable,
    by_gain,
    by_width,
    expect,
)
from foretoken.engine.request import Request, Share
from foretoken.outputs import EngineMetrics

if TYPE_CHECKING:
    from foretoken.slots.step import Outcome

_log = logging.getLogger(__name__)

_STEPS, _MOST_STEPS = 8, 64  # between choices
_CHOOSING = 0.01  # share of the time for choices, except at `_MOST_STEPS`; one takes 0.2 to 2 ms
_CLEARLY = 1.02  # change if the rate is this many times the present one
_STRETCH = 128  # steps within which a drafter's work to catch up must pay
_PROBING = 0.015  # share of the time for probes
_PROBE = 2  # drafts more than the best choice
_SELDOM = 8  # choices between probes of requests that have drafts
_PATIENCE = 2000  # steps in a row without drafts, after which a warning says so


class DraftControl:
    """Chooses how many drafts each request of a step gets.

    Args:
        table: measured times of steps.
        num_slots, max_drafts: sizes.
        widths: numbers of drafts that a captured step may have, 0 among them; () if every request
            may have its own number.
        clock: seconds.
    """

    def __init__(
        self,
        table: StepTable,
        num_slots: int,
        max_drafts: int,
        widths: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs, self.acceptance = StepCosts(table), Acceptance(num_slots, max_drafts)
        self.metrics = EngineMetrics()
        self.max_drafts, self._widths, self._clock = max_drafts, tuple(widths), clock
        self._choice: Choice | None = None
        self._plain: Choice | None = None
        self._adapting: list[Request] = []
        self._batch = self._wait = self._unpaid = 0
        self._start = self._budget = 0.0
        self._probed: list[tuple[Request, int]] = []
        self._turn, self._has_warned = 0, False
        self._verified: list[tuple[int, int, int, int]] = []  # for `Acceptance.observe`
        self._steps: list[tuple[float, float, int]] = []  # seconds, those on the host, tokens
        self._seen_S = [0] * num_slots  # tokens known when the drafter last drafted

    def choose(self, decoding: Sequence[Request]) -> None:
        """Set K of the requests that adapt, among those that decode in the coming step."""
        self._start = self._clock()
        self._end_probe()
        adapting = [request for request in decoding if request.adapts]
        self._wait -= 1
        known = adapting == self._adapting and len(decoding) == self._batch
        if known and self._wait > 0:
            return
        self._learn()
        self._adapting, self._batch, self._wait = adapting, len(decoding), _STEPS
        if not adapting:
            self._choice = None
            return
        self.acceptance.age()
        curve, load = self._look(decoding)
        none_B = np.zeros_like(load.fixed_B)
        self._plain = expect(curve, load, none_B, in_lockstep=bool(self._widths))
        self._choice = self._best(curve, load, decoding)
        for request, asked in zip(decoding, self._choice.asked_B.tolist(), strict=True):
            request.num_speculative_tokens = asked
        self._probe(curve, load, decoding)
        took = (self._clock() - self._start) / _CHOOSING
        self._wait = min(max(_STEPS, int(took / self._choice.seconds)), _MOST_STEPS)

    def observe(
        self, shares: Sequence[Share], outcomes: Mapping[int, Outcome], in_runner: float
    ) -> None:
        """Record the drafts of a step, and if all of its requests decoded, its seconds, of which
        `in_runner` were spent in the runner; the rest is the engine's work on the host."""
        tokens, plain = 0, True
        for share in shares:
            if not (share.decides and share.num_tokens == 1):
                plain = False
            elif share.request.slot == share.slot and share.slot in outcomes:
                outcome = outcomes[share.slot]
                tokens += len(outcome.token_ids)
                if share.max_drafts:
                    drafted, accepted = outcome.num_drafts, outcome.num_accepted
                    self._verified.append((share.slot, share.max_drafts, drafted, accepted))
                    self._seen_S[share.slot] = share.start + 1
        seconds = self._clock() - self._start
        self._budget += _PROBING * seconds
        if plain and not self._probed and len(shares) == self._batch and self._choice:
            self._steps.append((seconds, seconds - in_runner, tokens))

    def release(self, slot: int) -> None:
        """Forget a slot's request, which ended or was preempted, but not what it showed of all."""
        self._learn()
        self.acceptance.release(slot)
        self._seen_S[slot] = 0
        if any(request.slot in (-1, slot) for request in self._adapting):
            self._end_probe()
            self._adapting, self._wait = [], 0  # no ended request is kept

    def _learn(self) -> None:
        """Learn from the steps since the last choice."""
        verified, self._verified = self._verified, []
        self.acceptance.observe(verified)
        steps, self._steps = self._steps, []
        if not steps or self._choice is None or self._plain is None:
            return
        choice, metrics = self._choice, self.metrics
        all_seconds, all_on_host, all_tokens = zip(*steps, strict=True)
        seconds, tokens = sum(all_seconds), sum(all_tokens)
        self.costs.learn(self._batch, choice.per_request, choice.seconds, median(all_seconds))
        if not self._widths:  # a device computes while the host works
            self.costs.learn_beside(self._batch, median(all_on_host))
        metrics.controlled_seconds += seconds
        metrics.estimated_plain_seconds += seconds * choice.rate / self._plain.rate
        slower = float(np.exp(self.costs.off))
        metrics.realised_plain_seconds += tokens / self._plain.rate * slower
        self._unpaid = 0 if choice.asked_B.any() else self._unpaid + len(steps)
        if self._unpaid >= _PATIENCE and not self._has_warned:
            self._has_warned = True
            self._say_unpaid()

    def _look(self, decoding: Sequence[Request]) -> tuple[Curve, Load]:
        """Costs and chances of acceptance of these requests."""
        slots = [request.slot for request in decoding]
        fixed = [ADAPTS if r.adapts else r.num_speculative_tokens for r in decoding]
        context = sum(len(request.token_ids) for request in decoding)
        joint_BK, offered_K = self.acceptance.joint(slots), self.acceptance.offered()
        return self.costs.curve(len(slots)), Load(joint_BK, np.array(fixed), offered_K, context)

    def _best(self, curve: Curve, load: Load, decoding: Sequence[Request]) -> Choice:
        """The best choice; the present one if that is not clearly worse."""
        in_lockstep = bool(self._widths)
        best = by_width(curve, load, self._widths) if in_lockstep else by_gain(curve, load)
        last = self._choice
        if last is None or len(last.asked_B) != len(decoding):
            return best
        current = [request.num_speculative_tokens for request in decoding]
        now = expect(curve, load, np.array(current), in_lockstep=in_lockstep)
        starts = (best.asked_B > 0) & (now.asked_B == 0)
        missed = self._missed(r for r, s in zip(decoding, starts, strict=True) if s)
        rate = best.tokens / (best.seconds + missed / _STRETCH)
        return best if rate > _CLEARLY * now.rate else now

    def _missed(self, requests: Iterable[Request]) -> float:
        """Seconds that a drafter takes to catch up with these requests."""
        tokens = sum(len(r.token_ids) - self._seen_S[r.slot] for r in requests)
        return self.costs.table.missed * tokens

    def _probe(self, curve: Curve, load: Load, decoding: Sequence[Request]) -> None:
        """Give the next request in turn more drafts, once enough time was saved up for it.

        In lockstep all adapting requests get them: they wait for each other's passes anyway.
        """
        if self._choice is None:
            return
        self._turn += 1
        probed = (
            self._adapting if self._widths else [self._adapting[self._turn % len(self._adapting)]]
        )
        asked = probed[0].num_speculative_tokens
        wider = min(asked + _PROBE, self.max_drafts)
        if self._widths:
            wider = min((width for width in self._widths if width > asked), default=asked)
        if wider == asked or (asked and self._turn % _SELDOM):
            return
        more_B = np.array([wider if request in probed else 0 for request in decoding])
        asked_B = np.maximum(self._choice.asked_B, more_B)
        probe = expect(curve, load, asked_B, in_lockstep=bool(self._widths))
        price = max(probe.seconds - self._choice.seconds, 0.0)
        if not asked:
            price += self._missed(probed)
        if self._budget >= price:
            self._budget = 0.0
            self._probed = [(request, request.num_speculative_tokens) for request in probed]
            for request in probed:
                request.num_speculative_tokens = wider

    def _end_probe(self) -> None:
        for request, asked in self._probed:
            request.num_speculative_tokens = asked
        self._probed = []

    def _say_unpaid(self) -> None:
        curve, index_K = self.costs.curve(self._batch), np.arange(self.max_drafts)
        plain, one = (
            float(curve.seconds(k, curve.drafting(np.where(index_K < k, self._batch, 0)), 0))
            for k in (0, 1)
        )
        _log.warning(
            "Speculation has not paid for %d steps: at batch %d a first draft is accepted in "
            "%.0f%% of all cases, and a step with one takes %.2f times one without. Drafts are "
            "still tried now and then; without `speculative_config` their memory is free.",
            self._unpaid, self._batch, 100 * self.acceptance.shared()[0], one / plain,
        )  # fmt: skip
