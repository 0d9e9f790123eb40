"""Measure the costs of an engine's steps on this machine, from some hundred steps.

Charter: run a few requests at a time, sort the steps by kind, average each kind, make a profile.
Runs of different sizes take turns, and each repeat goes through all of them: a disturbance of the
machine affects all sizes alike.
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
    """A step, and its seconds of drafting.

    A step's time runs from the result of the previous step (or the start of the run) to its own
    result: an engine that runs ahead launches the next step meanwhile.
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
    """One run of requests that are all there at the start, so many at a time.

    A real engine serves them as `Simulation.run` does, with the same records. Each request has its
    own noise.

    Attributes:
        params: of each request, except for `max_tokens`.
        text: token ids to cut prompts from; without them prompts are random tokens.
        clock: in seconds. The clock of the process leaves out other processes on its cores; it
            measures time if one thread computes everything.
        served: records of the requests that have ended so far.
        timed: all steps so far.
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
        """Serve all requests.

        Raises:
            ForetokenError: a request failed.
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
                    if trace.num_requests:  # a step that was launched ahead may have none
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
# After a prompt a few steps of few rows take up to twice as long: caches and clock rate recover.
# This loss per request does not grow with its length, so these steps are left out.
_SETTLING = 4
_LEAST_STEPS = 4  # settled steps that every setup must have
# A single repeat may fall into a moment when others use the machine.
_LEAST_REPEATS = 2
_SHORT = 48  # tokens of a prompt; fewer if a step cannot compute those of a whole batch
_LONG = 512  # tokens of a prompt that shows the cost of a context, if the model takes as many
_PROMPTS = (4, 32, 240)  # tokens; the longest is also timed several at a time
_SEVERAL = (2, 4, 8)
_DRAFTS = (1, 2, 4, 8, 16, 32)
_APART = 1.5  # least ratio of prompt lengths that separates the cost of pairs from that of tokens
# After every prompt some steps decode, so that the next prompt is timed in a realistic place: after
# replayed graphs a host takes up to twice as long for a prompt as right after another (8B, H200).
_AFTER = 8
_STALL = 3.0  # times the median: longer steps count as so long


class BatchSetup(NamedTuple):
    """Requests that run together: how many, K, and their lengths."""

    batch: int
    drafts: int
    length: int
    output: int


class PromptStep(NamedTuple):
    """Prompt steps of one kind: tokens, pairs (token, earlier token), mean seconds, count."""

    tokens: int
    pairs: float
    seconds: float
    times: int


@dataclass
class _Found:
    """Seconds of the steps of one setup.

    Attributes:
        steps: settled steps in which all requests decode: seconds, seconds of drafting, context of
            each request.
        first: the first decode step of a run, in which a draft model computes the prompts.
        prompts: steps that compute all prompts and nothing else.
    """

    steps: list[tuple[float, float, float]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    prompts: list[float] = field(default_factory=list)


class Calibration:
    """Measures one engine.

    Args:
        sizes: of batches; 1 is always added.
        text: token ids to cut prompts from; with them acceptance is measured, too.
        clock: see `Drive`.
        patience: after so many seconds no further repeat begins; two are always made. On a busy
            machine a repeat takes long, and some setup is disturbed in every repeat.

    Attributes:
        num_runs: number of runs if all repeats are made.
        num_repeats: number of repeats made.
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
        # As many requests with long contexts as one step computes: a context costs each little.
        at_once = engine.config.max_num_batched_tokens // _LONG
        self._middle = max((size for size in self._sizes if size <= at_once), default=1)
        self._found = defaultdict[BatchSetup, _Found](_Found)
        self._check()
        self._setups = [*self._decode_setups(), *self._prompt_setups()]
        self._warm_up = self._warm_up_setups()
        self.num_runs = len(self._warm_up) + len(self._setups) * repeats

    def _check(self) -> None:
        """Raise `ConfigError` if the setups do not fit the engine."""
        limits, config = self._engine.limits, self._engine.config
        if self._sizes[-1] > config.max_num_seqs:
            bound = f"at least {self._sizes[-1]}, the largest batch"
            raise ConfigError("max_num_seqs", config.max_num_seqs, bound)
        output = self._decode_setup(1, self._drafts[-1]).output
        least = max(_PROMPTS[-1] + _AFTER, _SHORT + output + 1)
        if limits.max_model_len < least:
            bound = f"at least {least}, to time steps"
            raise ConfigError("max_model_len", limits.max_model_len, bound)
        if self._long <= _SHORT:
            blocks = self._engine.scheduler.pool.num_blocks
            remedy = "Raise it, or `max_model_len`."
            raise ConfigError("num_blocks", blocks, "enough to time long contexts", remedy)

    def _decode_setup(self, batch: int, drafts: int, length: int | None = None) -> BatchSetup:
        """All prompts fit into one step: otherwise the first requests would decode, and perhaps
        end, before the last prompt is computed."""
        short = min(_SHORT, self._engine.config.max_num_batched_tokens // batch)
        return BatchSetup(batch, drafts, length or short, int(_STEPS * (1 + drafts / 2)))

    def _decode_setups(self) -> Iterator[BatchSetup]:
        for batch, drafts in product(self._sizes, self._drafts):
            yield self._decode_setup(batch, drafts)
        for drafts in (0, self._drafts[-1]):
            yield self._decode_setup(self._middle, drafts, self._long)

    def _warm_up_setups(self) -> list[BatchSetup]:
        """Setups to run before any is timed. On a GPU all of them: kernels are compiled and graphs
        captured for each. On a CPU short ones: only the batch size matters there."""
        if not self._engine.runner.on_host:
            return self._setups
        whole = (self._decode_setup(*of) for of in product(self._sizes, self._drafts))
        return [setup._replace(length=min(setup.length, 4), output=_AFTER) for setup in whole]

    @property
    def _long(self) -> int:
        """Tokens of a long context, as far as the engine has room."""
        pool, most = self._engine.scheduler.pool, self._engine.limits.max_model_len
        room = pool.num_blocks // self._middle * pool.block_size
        output = self._decode_setup(1, self._drafts[-1]).output
        return min(_LONG, most - output, room - output - pool.block_size)

    def _prompt_setups(self) -> Iterator[BatchSetup]:
        config, longest = self._engine.config, _PROMPTS[-1]
        counts = [(1, n) for n in _PROMPTS]
        counts += [(b, longest) for b in _SEVERAL if b <= config.max_num_seqs]
        # As much as a step can compute, in short prompts and in long ones: no need to extrapolate.
        half = config.max_num_batched_tokens // (2 * config.max_num_seqs)
        for length in (max(longest, half + 1), self._engine.limits.max_model_len - _AFTER):
            counts.append(self._whole(length))
        for batch, length in dict.fromkeys(counts):
            if 0 < batch * length <= config.max_num_batched_tokens:
                yield BatchSetup(batch, 0, length, _AFTER)

    def _whole(self, length: int) -> tuple[int, int]:
        """(prompts, length): as many prompts of this length as a step computes and the cache
        holds; if not even one fits, its length is cut."""
        config, pool = self._engine.config, self._engine.scheduler.pool
        room = pool.num_blocks * pool.block_size
        length = min(length, config.max_num_batched_tokens, room - _AFTER - pool.block_size)
        each = -(-(length + _AFTER) // pool.block_size) * pool.block_size
        at_once = min(config.max_num_batched_tokens // length, room // each)
        return min(at_once, config.max_num_seqs), length

    def run(self, report: Callable[[int, str], None] = lambda done, what: None) -> Profile:
        """Measure everything; a second call adds to the measurements of the first.

        Args:
            report: gets the number of runs done, and the name of the next.

        Raises:
            ConfigError: the cache does not hold a whole batch for long enough to time its steps.
        """
        start, done = 0.0, 0
        for repeat in range(self._repeats + 1):
            if repeat == 1:  # the warm-up does not count: on a GPU it compiles
                start = time.perf_counter()
            if repeat > _LEAST_REPEATS and time.perf_counter() - start > self._patience:
                break
            for setup in self._setups if repeat else self._warm_up:
                report(done, f"batches of {setup.batch}, K={setup.drafts}")
                timed = self._run(setup, done)
                if repeat:
                    self._sort(setup, timed)
                done += 1
            self.num_repeats = repeat
        report(self.num_runs, "done")
        return self._profile()

    def _run(self, setup: BatchSetup, seed: int) -> Sequence[Timed]:
        drafts = setup.drafts if self._drafts[-1] else None
        params = replace(self._params, num_speculative_tokens=drafts)
        drive = Drive(self._engine, params, setup.batch, seed, self._text, self._clock)
        drive.run([Ask(0.0, setup.length, setup.output)] * setup.batch)
        return drive.timed

    def _sort(self, setup: BatchSetup, timed: Sequence[Timed]) -> None:
        found, decoded, context = self._found[setup], 0, setup.length + 1.0
        for (seconds, requests, decoding, tokens, _, accepted), drafting in timed:
            if not decoding and tokens == setup.batch * setup.length:
                found.prompts.append(seconds)
            elif decoding == requests == setup.batch:
                if decoded > _SETTLING:
                    found.steps.append((seconds, drafting if setup.drafts else 0.0, context))
                elif not decoded:
                    found.first.append(seconds)
                decoded += 1
            if decoding:
                context += 1 + accepted / requests

    def _step(self, setup: BatchSetup) -> tuple[float, float, float]:
        """Means of its steps: seconds, seconds of drafting, context.

        Raises:
            ConfigError: too few steps, because the cache does not hold all of its requests.
        """
        steps = self._found[setup].steps
        if len(steps) < _LEAST_STEPS:
            blocks, tokens = self._engine.scheduler.pool.num_blocks, setup.length + setup.output
            bound = f"enough for {setup.batch} requests of {tokens} tokens at a time"
            raise ConfigError("num_blocks", blocks, bound, "Raise it, or lower `batch_size`.")
        seconds, drafting, context = (_mean(x) for x in zip(*steps, strict=True))
        return seconds, drafting, context

    def _profile(self) -> Profile:
        engine, runner = self._engine, self._engine.runner
        context = self._of_context()
        rest, draft, missed = list[list[float]](), list[list[float]](), [0.0]
        for batch in self._sizes:
            setups = [self._decode_setup(batch, drafts) for drafts in self._drafts]
            whole, parts, lengths = zip(*map(self._step, setups), strict=True)
            draft.append(rising(parts))
            of_contexts = (batch * x * slope for x, slope in zip(lengths, context, strict=True))
            left = zip(rising(whole), draft[-1], of_contexts, strict=True)
            rest.append([max(seconds - drafting - of, 0.0) for seconds, drafting, of in left])
            for setup, seconds in zip(setups[1:], whole[1:], strict=True):
                more = _mean(self._found[setup].first) - seconds
                missed.append(max(more, 0.0) / batch / setup.length)
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
        """Seconds per token of context for each K: measured at both ends, linear in between."""
        ends = (0, self._drafts[-1])
        slopes = []
        for drafts in ends:
            short = self._step(self._decode_setup(self._middle, drafts))
            long = self._step(self._decode_setup(self._middle, drafts, self._long))
            more = (long[0] - short[0]) / max(long[2] - short[2], 1.0) / self._middle
            slopes.append(max(more, 0.0))
        found: list[float] = np.interp(self._drafts, ends, slopes).tolist()
        return found if ends[1] else slopes[:1]

    def _prompts(self) -> PromptCosts:
        """Costs of prompt steps, also of those in decoding runs: per token, and per pair."""
        by_size = defaultdict[tuple[int, int], list[float]](list)
        for setup, found in self._found.items():
            by_size[setup.batch, setup.length] += found.prompts
        steps = [
            PromptStep(n * length, n * length**2 / 2, _mean(seconds), len(seconds))
            for (n, length), seconds in by_size.items()
            if seconds
        ]
        pair = of_pairs(steps)
        flat = without_pairs(steps, pair)
        return PromptCosts([*flat], rising([*flat.values()]), pair)

    def _acceptance(self) -> tuple[float, ...] | None:
        """Joint chances of the engine's drafts; None without drafts or text, or for `synthetic`."""
        metrics = self._engine.metrics
        if not metrics.num_drafts or metrics.num_synthetic_drafts or not self._text:
            return None
        counts = zip(metrics.accepted_per_position, metrics.drafted_per_position, strict=True)
        return tuple(accumulate((hits / max(tries, 1) for hits, tries in counts), min))


def of_pairs(steps: Sequence[PromptStep]) -> float:
    """Seconds per pair of a token and an earlier one; 0 if prompt lengths are too similar.

    In the largest steps, the seconds per token are linear in the number of earlier tokens: the
    result is the slope. Smaller steps take a minimum time whatever their tokens: including them
    made the slope 37 times too steep on a GPU.
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
    """tokens -> mean seconds without `pair` seconds for each pair, sorted by tokens.

    Steps of equally many tokens in prompts of different lengths are averaged, weighted by count.
    """
    found = defaultdict[int, list[tuple[float, int]]](list)
    for step in steps:
        found[step.tokens].append((max(step.seconds - pair * step.pairs, 0.0), step.times))
    return {
        tokens: sum(seconds * times for seconds, times in of) / sum(times for _, times in of)
        for tokens, of in sorted(found.items())
    }


def _mean(seconds: Sequence[float]) -> float:
    """Mean without stalls of the machine. A median would be too small: on a busy machine by some
    10 % of the time of a run."""
    return float(np.minimum(seconds, _STALL * median(seconds)).mean())


def rising(values: Sequence[float]) -> list[float]:
    """The nearest non-decreasing numbers (pool adjacent violators).

    More drafts or tokens never take less time; measurements that say so were disturbed.
    """
    pools = list[tuple[float, int]]()
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, above), (low, below) = pools.pop(), pools.pop()
            pools.append(((high * above + low * below) / (above + below), above + below))
    return [value for value, count in pools for _ in range(count)]
