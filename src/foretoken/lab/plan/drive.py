"""Requests through a real engine, as `Simulation.run` serves them, with the same records."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from foretoken.engine.boundary import prepare
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestGroup
from foretoken.engine.trace import StepTrace
from foretoken.lab.bench.figures import device_seconds
from foretoken.lab.plan.simulate import Ask, Served, Step
from foretoken.sampling.params import SamplingParams

Clock = Callable[[], float]


class Timed(NamedTuple):
    """A step, and the seconds of it that drafted.

    A step takes from when the one before it was known, or the run began, until it is known itself:
    an engine that runs ahead launches the next one meanwhile.
    """

    step: Step
    drafting: float


@dataclass
class _Live:
    group: RequestGroup
    arrival: float
    first: float | None = None


@dataclass
class Drive:
    """One run of requests that have all come at the start, so many at a time.

    Prompts are random tokens unless there are others, and each request has noise of its own.

    Attributes:
        params: of each; `max_tokens` is the request's.
        text: token ids to cut prompts from.
        clock: seconds. That of the process leaves out what others do on its cores, and is a
            measure of time where one thread computes everything.
        served, timed: of what has ended so far, and all steps so far.
    """

    engine: Engine
    params: SamplingParams
    concurrency: int
    seed: int = 0
    text: Sequence[int] = ()
    clock: Clock = time.perf_counter
    served: list[Served] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)

    def run(self, asks: Sequence[Ask]) -> list[Served]:
        """Serve them all.

        Raises:
            ForetokenError: one failed.
        """
        chance, engine, clock = random.Random(self.seed), self.engine, self.clock
        waiting, live = list(enumerate(asks))[::-1], list[_Live]()
        traces: list[StepTrace] = []
        former, engine.on_step = engine.on_step, traces.append
        start = known = clock()
        try:
            while waiting or live:
                while waiting and len(live) < self.concurrency:
                    group = self._add(*waiting.pop(), chance)
                    live.append(_Live(group, clock() - start))
                engine.step()
                now = clock()
                for trace in traces:
                    if trace.num_requests:  # what was launched ahead may have had nothing to do
                        self.timed.append(_timed(trace, now - known))
                        known = now
                traces.clear()
                live = [one for one in live if not self._ends(one, now - start)]
        finally:
            engine.on_step = former
            for one in live:
                engine.abort(one.group)
        return self.served

    def _add(self, number: int, ask: Ask, chance: random.Random) -> RequestGroup:
        params = replace(
            self.params, max_tokens=ask.output_len, ignore_eos=True,
            seed=self.seed * 10_000 + number,
        )  # fmt: skip
        if self.text:
            first = chance.randrange(max(len(self.text) - ask.input_len, 0) + 1)
            prompt = list(self.text[first : first + ask.input_len])
        else:
            prompt = chance.choices(range(self.engine.limits.vocab_size), k=ask.input_len)
        name = f"plan-{self.seed}-{number}"
        return self.engine.add(*prepare(self.engine, name, prompt, params))

    def _ends(self, one: _Live, now: float) -> bool:
        group, tokens = one.group, one.group.samples[0].num_output
        if group.error is not None:
            raise group.error
        if one.first is None and tokens:
            one.first = now
        if group.finished:
            self.served.append(Served(one.arrival, one.first or now, now, tokens))
        return group.finished


def _timed(trace: StepTrace, seconds: float) -> Timed:
    share = device_seconds(trace)["draft"] / max(trace.total, 1e-9)
    counts = (getattr(trace, name) for name in Step._fields[1:])
    return Timed(Step(seconds, *counts), share * seconds)
