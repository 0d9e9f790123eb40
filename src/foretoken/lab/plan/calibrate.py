"""What steps of an engine take here, by some hundred of them.

Charter: runs of a few requests, whose steps are sorted by what they did; the mean of each kind; a
profile. Cases take turns, and each repeat goes through all, so that what disturbs the machine for a
while disturbs none alone.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import accumulate, product
from statistics import median
from typing import NamedTuple

import numpy as np

from foretoken.engine.boundary import prepare
from foretoken.engine.engine import Engine
from foretoken.engine.pace import PromptCosts
from foretoken.engine.request import RequestGroup
from foretoken.engine.trace import StepTrace
from foretoken.errors import ConfigError
from foretoken.lab.bench.figures import device_seconds
from foretoken.lab.plan.profile import EngineLimits, Profile
from foretoken.lab.plan.simulate import Ask, Served, Step
from foretoken.lab.results import commit, hardware
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

    They go through a real engine as `Simulation.run` serves them, with the same records. Prompts
    are random tokens unless there are others, and each request has noise of its own.

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


_STEPS = 20  # of a run, about
# Behind a prompt a few steps of few rows take up to twice as long: caches and clock rate recover.
# What a request loses so does not grow with its length.
_SETTLING = 4
_LEAST_STEPS = 4  # that have settled, of a case
# One repeat alone may fall into a moment when others use the machine.
_LEAST_REPEATS = 2
_SHORT = 48  # tokens of a prompt; fewer where a step cannot compute those of a whole batch
_LONG = 512  # of one by which the cost of a context is told, if the model takes as many
_PROMPTS = (4, 32, 240)  # tokens; the longest in several at a time, too
_SEVERAL = (2, 4, 8)
_DRAFTS = (1, 2, 4, 8, 16, 32)
_APART = 1.5  # times the shortest prompt: a longest that tells pairs of tokens from tokens
# Behind every prompt some steps decode, so that the next one is timed as prompts come: behind
# replayed graphs a host takes up to twice as long for one as right behind another (8B, H200).
_AFTER = 8
_STALL = 3.0  # times the median: longer steps count as so long


class Case(NamedTuple):
    """Requests that run together: how many, K, and their lengths."""

    batch: int
    drafts: int
    length: int
    output: int


class PromptStep(NamedTuple):
    """Steps of one kind: tokens, pairs of a token and one before it, mean seconds, how often."""

    tokens: int
    pairs: float
    seconds: float
    times: int


@dataclass
class _Found:
    """Seconds of steps of one case.

    Attributes:
        steps: of those in which all decode, settled: seconds, those that drafted, context of each
            request.
        first: of the first that decodes, in which a draft model computes the prompts.
        prompts: of those that compute all prompts and nothing else.
    """

    steps: list[tuple[float, float, float]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    prompts: list[float] = field(default_factory=list)


class Calibration:
    """Measures one engine.

    Args:
        sizes: of batches; 1 is one of them.
        text: token ids that prompts are cut from, by which acceptance is measured, too.
        clock: see `Drive`.
        patience: after so many seconds no further repeat begins; two are always made. On a busy
            machine a repeat takes long, and in each some case or other is disturbed.

    Attributes:
        num_runs: how many there are, if all repeats are made.
        num_repeats: how many were made.
    """

    def __init__(
        self,
        engine: Engine,
        sizes: Sequence[int],
        params: SamplingParams,
        repeats: int = 3,
        text: Sequence[int] = (),
        clock: Clock = time.perf_counter,
        patience: float = math.inf,
    ) -> None:
        self._engine, self._params, self._repeats = engine, params, repeats
        self._text, self._clock, self._patience = text, clock, patience
        self.num_repeats = 0
        most = engine.config.num_drafts
        self._drafts = sorted({0, most, *(k for k in _DRAFTS if k < most)})
        self._sizes = sorted({1, *sizes})
        # Of requests with such contexts as many as one step computes: it costs little of each.
        at_once = engine.config.max_num_batched_tokens // _LONG
        self._middle = max((size for size in self._sizes if size <= at_once), default=1)
        self._found = defaultdict[Case, _Found](_Found)
        self._check()
        self._cases = [*self._decodes(), *self._computes()]
        self._first = self._warming()
        self.num_runs = len(self._first) + len(self._cases) * repeats

    def _check(self) -> None:
        """Raise `ConfigError` if the cases do not fit the engine."""
        limits, config = self._engine.limits, self._engine.config
        if self._sizes[-1] > config.max_num_seqs:
            bound = f"at least {self._sizes[-1]}, the largest batch"
            raise ConfigError("max_num_seqs", config.max_num_seqs, bound)
        output = self._decode(1, self._drafts[-1]).output
        least = max(_PROMPTS[-1] + _AFTER, _SHORT + output + 1)
        if limits.max_model_len < least:
            bound = f"at least {least}, to time steps"
            raise ConfigError("max_model_len", limits.max_model_len, bound)
        if self._long <= _SHORT:
            blocks = self._engine.scheduler.pool.num_blocks
            remedy = "Raise it, or `max_model_len`."
            raise ConfigError("num_blocks", blocks, "enough to time long contexts", remedy)

    def _decode(self, batch: int, drafts: int, length: int | None = None) -> Case:
        """All prompts fit into one step: else who is done first decodes, and may end, before the
        last one is computed."""
        short = min(_SHORT, self._engine.config.max_num_batched_tokens // batch)
        return Case(batch, drafts, length or short, int(_STEPS * (1 + drafts / 2)))

    def _decodes(self) -> Iterator[Case]:
        for batch, drafts in product(self._sizes, self._drafts):
            yield self._decode(batch, drafts)
        for drafts in (0, self._drafts[-1]):
            yield self._decode(self._middle, drafts, self._long)

    def _warming(self) -> list[Case]:
        """What runs before anything is timed: on a GPU every case, since kernels are compiled and
        graphs captured for it; a CPU takes as long the first time, once it has met the batch."""
        if not self._engine.runner.on_host:
            return self._cases
        whole = (self._decode(*of) for of in product(self._sizes, self._drafts))
        return [case._replace(length=min(case.length, 4), output=_AFTER) for case in whole]

    @property
    def _long(self) -> int:
        """Tokens of a long context: no more than fits."""
        pool, most = self._engine.scheduler.pool, self._engine.limits.max_model_len
        room = pool.num_blocks // self._middle * pool.block_size
        output = self._decode(1, self._drafts[-1]).output
        return min(_LONG, most - output, room - output - pool.block_size)

    def _computes(self) -> Iterator[Case]:
        config, longest = self._engine.config, _PROMPTS[-1]
        counts = [(1, n) for n in _PROMPTS]
        counts += [(b, longest) for b in _SEVERAL if b <= config.max_num_seqs]
        # All that a step computes, in short prompts and in long ones: beyond it would be a guess.
        half = config.max_num_batched_tokens // (2 * config.max_num_seqs)
        for length in (max(longest, half + 1), self._engine.limits.max_model_len - _AFTER):
            counts.append(self._whole(length))
        for batch, length in dict.fromkeys(counts):
            if 0 < batch * length <= config.max_num_batched_tokens:
                yield Case(batch, 0, length, _AFTER)

    def _whole(self, length: int) -> tuple[int, int]:
        """As many prompts of this length as a step computes and the cache holds, and the length;
        where that is none, one that is as long as can be."""
        config, pool = self._engine.config, self._engine.scheduler.pool
        room = pool.num_blocks * pool.block_size
        length = min(length, config.max_num_batched_tokens, room - _AFTER - pool.block_size)
        each = -(-(length + _AFTER) // pool.block_size) * pool.block_size
        at_once = min(config.max_num_batched_tokens // length, room // each)
        return min(at_once, config.max_num_seqs), length

    def run(self, report: Callable[[int, str], None] = lambda done, what: None) -> Profile:
        """Measure everything; called again, it adds to what was measured before.

        Args:
            report: gets how many runs are done, and what runs next.

        Raises:
            ConfigError: the cache does not hold a whole batch for long enough to time its steps.
        """
        start, done = 0.0, 0
        for repeat in range(self._repeats + 1):
            if repeat == 1:  # the warm-up does not count: on a GPU it compiles
                start = time.perf_counter()
            if repeat > _LEAST_REPEATS and time.perf_counter() - start > self._patience:
                break
            for case in self._cases if repeat else self._first:
                report(done, f"batches of {case.batch}, K={case.drafts}")
                timed = self._run(case, done)
                if repeat:
                    self._sort(case, timed)
                done += 1
            self.num_repeats = repeat
        report(self.num_runs, "done")
        return self._profile()

    def _run(self, case: Case, seed: int) -> Sequence[Timed]:
        asked = case.drafts if self._drafts[-1] else None
        params = replace(self._params, num_speculative_tokens=asked)
        drive = Drive(
            self._engine, params, case.batch, seed=seed, text=self._text, clock=self._clock
        )
        drive.run([Ask(0.0, case.length, case.output)] * case.batch)
        return drive.timed

    def _sort(self, case: Case, timed: Sequence[Timed]) -> None:
        found, decoded, context = self._found[case], 0, case.length + 1.0
        for (seconds, requests, decoding, tokens, _, accepted), drafting in timed:
            if not decoding and tokens == case.batch * case.length:
                found.prompts.append(seconds)
            elif decoding == requests == case.batch:
                if decoded > _SETTLING:
                    found.steps.append((seconds, drafting if case.drafts else 0.0, context))
                elif not decoded:
                    found.first.append(seconds)
                decoded += 1
            if decoding:
                context += 1 + accepted / requests

    def _step(self, case: Case) -> tuple[float, float, float]:
        """Means of its steps: seconds, those that drafted, context.

        Raises:
            ConfigError: too few, since the cache does not hold all of its requests.
        """
        steps = self._found[case].steps
        if len(steps) < _LEAST_STEPS:
            blocks, tokens = self._engine.scheduler.pool.num_blocks, case.length + case.output
            bound = f"enough for {case.batch} requests of {tokens} tokens at a time"
            raise ConfigError("num_blocks", blocks, bound, "Raise it, or lower `batch_size`.")
        seconds, drafting, context = (_mean(x) for x in zip(*steps, strict=True))
        return seconds, drafting, context

    def _profile(self) -> Profile:
        engine, runner = self._engine, self._engine.runner
        context = self._of_context()
        rest, draft, missed = list[list[float]](), list[list[float]](), [0.0]
        for batch in self._sizes:
            cases = [self._decode(batch, drafts) for drafts in self._drafts]
            whole, parts, lengths = zip(*map(self._step, cases), strict=True)
            draft.append(rising(parts))
            of_contexts = (batch * x * slope for x, slope in zip(lengths, context, strict=True))
            left = zip(rising(whole), draft[-1], of_contexts, strict=True)
            rest.append([max(seconds - drafting - of, 0.0) for seconds, drafting, of in left])
            for case, seconds in zip(cases[1:], whole[1:], strict=True):
                more = _mean(self._found[case].first) - seconds
                missed.append(max(more, 0.0) / batch / case.length)
        config, pool, on_host = engine.config, engine.scheduler.pool, runner.on_host
        speculation = config.speculative_config
        made_of = dict(runner.planned.parts) if runner.planned else {}
        cache = sum(made_of.pop(name, 0) for name in ("K/V cache", "K/V cache of the draft"))
        ran = commit()
        return Profile(
            model=config.model,
            method=str(speculation.method) if speculation else "plain",
            origin="measured",
            drafts=self._drafts,
            batches=self._sizes,
            rest=rest,
            draft=draft,
            context=context,
            missed=median(missed[1:] or missed),
            prompts=self._prompts(),
            limits=EngineLimits(
                config.max_num_seqs, config.max_num_batched_tokens, engine.limits.max_model_len,
                pool.block_size, pool.num_blocks, config.max_step_seconds,
            ),
            runs_ahead=engine.runs_ahead,
            lockstep=not on_host,
            block_bytes=cache // (pool.num_blocks + (not on_host)),
            memory=made_of,
            acceptance=self._acceptance(),
            made={
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": ran[0], "dirty": ran[1], "hardware": hardware(),
                "repeats": self.num_repeats,
            },
        )  # fmt: skip

    def _of_context(self) -> list[float]:
        """Seconds per token of context by K, told from short and long ones; on a line between."""
        ends = (0, self._drafts[-1])
        slopes = []
        for drafts in ends:
            short = self._step(self._decode(self._middle, drafts))
            long = self._step(self._decode(self._middle, drafts, self._long))
            more = (long[0] - short[0]) / max(long[2] - short[2], 1.0) / self._middle
            slopes.append(max(more, 0.0))
        found: list[float] = np.interp(self._drafts, ends, slopes).tolist()
        return found if ends[1] else slopes[:1]

    def _prompts(self) -> PromptCosts:
        """Steps of prompts, those of decoding runs, too; the squares of their lengths apart."""
        taken = defaultdict[tuple[int, int], list[float]](list)
        for case, found in self._found.items():
            taken[case.batch, case.length] += found.prompts
        steps = [
            PromptStep(n * length, n * length**2 / 2, _mean(seconds), len(seconds))
            for (n, length), seconds in taken.items()
            if seconds
        ]
        pair = of_pairs(steps)
        flat = without_pairs(steps, pair)
        return PromptCosts([*flat], rising([*flat.values()]), pair)

    def _acceptance(self) -> tuple[float, ...] | None:
        """Chances of the drafts that the engine made; None without any, or under `synthetic`."""
        metrics = self._engine.metrics
        if not metrics.num_drafts or metrics.num_synthetic_drafts or not self._text:
            return None
        counts = zip(metrics.accepted_per_position, metrics.drafted_per_position, strict=True)
        return tuple(accumulate((hits / max(tries, 1) for hits, tries in counts), min))


def of_pairs(steps: Sequence[PromptStep]) -> float:
    """Seconds for a token and one before it; 0 if too few steps could tell.

    Of the largest steps, whose tokens take about as long each but for the tokens before them: what
    one takes, on a line over how many these are. Smaller steps take what a step takes at the least,
    whatever their tokens: with them the same line was 37 times too steep on a GPU.
    """
    most = max((step.tokens for step in steps), default=0)
    large = [step for step in steps if step.tokens >= most / 2]
    lengths = [step.pairs / step.tokens for step in large]  # halves of them
    if not lengths or max(lengths) < _APART * min(lengths):
        return 0.0
    weights = np.sqrt([step.times for step in large])
    slope = np.polyfit(lengths, [step.seconds / step.tokens for step in large], 1, w=weights)[0]
    return max(float(slope), 0.0)


def without_pairs(steps: Sequence[PromptStep], pair: float) -> dict[int, float]:
    """Seconds by tokens, which rise, without `pair` seconds for each pair.

    Steps of as many tokens in prompts of other lengths are averaged, each as often as it was timed.
    """
    found = defaultdict[int, list[tuple[float, int]]](list)
    for step in steps:
        found[step.tokens].append((max(step.seconds - pair * step.pairs, 0.0), step.times))
    return {
        tokens: sum(seconds * times for seconds, times in of) / sum(times for _, times in of)
        for tokens, of in sorted(found.items())
    }


def _mean(seconds: Sequence[float]) -> float:
    """What they take on average, a stall of the machine aside: on a busy one a median is some 10 %
    less than what a run of them takes."""
    return float(np.minimum(seconds, _STALL * median(seconds)).mean())


def rising(values: Sequence[float]) -> list[float]:
    """The nearest numbers of which none is below the one before (pool adjacent violators).

    More drafts, or tokens, take no less time, whatever disturbed the steps that were timed.
    """
    pools = list[tuple[float, int]]()
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, above), (low, below) = pools.pop(), pools.pop()
            pools.append(((high * above + low * below) / (above + below), above + below))
    return [value for value, count in pools for _ in range(count)]
