"""Measure the costs of an engine's steps on this machine, from some hundred steps.

Each repeat makes one run of every setup: a disturbance of the machine affects all setups alike.
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
from foretoken.lab.plan.simulate import RequestSpec, Served, Step
from foretoken.lab.reporter import Report
from foretoken.lab.results import commit, hardware
from foretoken.sampling.params import SamplingParams

Clock = Callable[[], float]  # returns seconds


class TimedStep(NamedTuple):
    """A step, and its seconds of drafting.

    The time of a step begins with the result of the previous step, or at the start of the run. It
    ends with the step's own result.
    """

    step: Step
    drafting: float


@dataclass
class _LiveRequest:
    group: RequestGroup
    arrival: float  # in seconds after the start
    first_token: float | None = None


@dataclass
class EngineRun:
    """A run of a real engine, with the same records as `Simulation.run`.

    All requests wait at the start, and `concurrency` of them run at a time. The noise of
    each request is different.

    Attributes:
        params: parameters of each request, except for `max_tokens`.
        text: token ids to cut prompts from; if empty, prompts are random tokens.
        clock: a clock of CPU time ignores other processes, but is right only if a single thread
            computes everything.
        served: records of the requests that have ended.
        timed: all steps of the run.
    """

    engine: Engine
    params: SamplingParams
    concurrency: int
    seed: int = 0
    text: Sequence[int] = ()
    clock: Clock = time.perf_counter
    served: list[Served] = field(default_factory=list)
    timed: list[TimedStep] = field(default_factory=list)

    def run(self, specs: Sequence[RequestSpec]) -> list[Served]:
        """Serve all requests; raises the `ForetokenError` of a request that failed."""
        random_, engine, clock = random.Random(self.seed), self.engine, self.clock
        waiting, live = list(enumerate(specs))[::-1], list[_LiveRequest]()
        traces: list[StepTrace] = []
        former_on_step, engine.on_step = engine.on_step, traces.append
        start = last_result = clock()
        try:
            while waiting or live:
                while waiting and len(live) < self.concurrency:
                    group = self._add(*waiting.pop(), random_)
                    live.append(_LiveRequest(group, clock() - start))
                engine.step()
                now = clock()
                for trace in traces:
                    if trace.num_requests:  # a step that was launched ahead may have none
                        self.timed.append(_timed_step(trace, now - last_result))
                        last_result = now
                traces.clear()
                live = [request for request in live if not self._ends(request, now - start)]
        finally:
            engine.on_step = former_on_step
            for request in live:
                engine.abort(request.group)
        return self.served

    def _add(self, number: int, spec: RequestSpec, random_: random.Random) -> RequestGroup:
        seed = self.seed * 10_000 + number
        params = replace(self.params, max_tokens=spec.output_len, ignore_eos=True, seed=seed)
        if self.text:
            begin = random_.randrange(max(len(self.text) - spec.input_len, 0) + 1)
            prompt = list(self.text[begin : begin + spec.input_len])
        else:
            prompt = random_.choices(range(self.engine.limits.vocab_size), k=spec.input_len)
        name = f"plan-{self.seed}-{number}"
        return self.engine.add(*prepare(self.engine, name, prompt, params))

    def _ends(self, request: _LiveRequest, now: float) -> bool:
        """Note a request's first token and its end; returns whether the request has ended."""
        group, tokens = request.group, request.group.samples[0].num_output
        if group.error is not None:
            raise group.error
        if request.first_token is None and tokens:
            request.first_token = now
        if group.finished:
            first = request.first_token or now
            self.served.append(Served(request.arrival, first, now, tokens))
        return group.finished


def _timed_step(trace: StepTrace, seconds: float) -> TimedStep:
    drafting_share = device_seconds(trace)["draft"] / max(trace.total, 1e-9)
    counts = (getattr(trace, name) for name in Step._fields[1:])
    return TimedStep(Step(seconds, *counts), drafting_share * seconds)


_STEPS = 20  # approximate number of steps of a run
# The first decode steps after a prompt are dropped: with few rows they take up to twice as long,
# until caches and clock rate recover, however long the request is.
_SETTLING = 4
_MIN_STEPS = 4  # settled steps that every setup must have
_MIN_REPEATS = 2  # during a single repeat, other processes might use the machine
_SHORT = 48  # tokens of a prompt; fewer if a step cannot compute a whole batch of such prompts
_LONG = 512  # tokens of a prompt that shows the cost of a context; fewer if there is less room
_PROMPTS = (4, 32, 240)  # tokens of the timed prompts
_PROMPT_BATCHES = (2, 4, 8)  # so many prompts of the last length are also timed together
_DRAFTS = (1, 2, 4, 8, 16, 32)  # the K that are timed, up to the engine's
_MIN_RATIO = 1.5  # smallest ratio of prompt lengths that tells costs of pairs from costs of tokens
# Output tokens of every timed prompt: prompts mostly follow decode steps in real use, too, and
# after replayed graphs a host takes up to twice as long for a prompt (8B, H200).
_PROMPT_OUTPUT = 8
_STALL = 3.0  # a step counts at most so many times the median


class BatchSetup(NamedTuple):
    """Requests that run together: their number, K, and their tokens of prompt and of output."""

    batch: int
    drafts: int
    length: int
    output: int


class PromptStep(NamedTuple):
    """Prompt steps of one shape: tokens of a step, mean seconds, and the number of such steps.

    pairs: pairs of a token and an earlier token of its prompt
    """

    tokens: int
    pairs: float
    seconds: float
    times: int


@dataclass
class _Timings:
    """Seconds of the steps of one setup.

    steps: settled steps in which all requests decode: seconds, seconds of drafting, and mean
        tokens of context of a request
    first: the first decode step of each run, in which a draft model computes the prompts
    prompts: steps that compute all prompts and nothing else
    """

    steps: list[tuple[float, float, float]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    prompts: list[float] = field(default_factory=list)


class Calibration:
    """Measures one engine.

    Args:
        sizes: batch sizes; 1 is always added.
        text: token ids to cut prompts from; if given, acceptance is measured, too.
        patience: after so many seconds no further repeat begins, but two are always made. On a busy
            machine repeats take long, and in each of them some setup is disturbed.

    Attributes:
        num_runs: number of runs if all repeats are made.
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
        max_drafts = engine.config.num_drafts
        self._drafts = sorted({0, max_drafts, *(k for k in _DRAFTS if k < max_drafts)})
        self._sizes = sorted({1, *sizes})
        # The batch that shows the cost of contexts: as large as possible, since a context costs
        # little, but one step must compute all of its long prompts.
        limit = engine.config.max_num_batched_tokens // _LONG
        self._context_batch = max((size for size in self._sizes if size <= limit), default=1)
        self._timings = defaultdict[BatchSetup, _Timings](_Timings)
        self._check_room()
        self._setups = [*self._decode_setups(), *self._prompt_setups()]
        self._warm_up = self._warm_up_setups()
        self.num_runs = len(self._warm_up) + len(self._setups) * repeats

    def _check_room(self) -> None:
        limits, config = self._engine.limits, self._engine.config
        if self._sizes[-1] > config.max_num_seqs:
            bound = f"at least {self._sizes[-1]}, the largest batch"
            raise ConfigError("max_num_seqs", config.max_num_seqs, bound)
        output = self._decode_setup(1, self._drafts[-1]).output
        needed = max(_PROMPTS[-1] + _PROMPT_OUTPUT, _SHORT + output + 1)
        if limits.max_model_len < needed:
            bound = f"at least {needed}, to time steps"
            raise ConfigError("max_model_len", limits.max_model_len, bound)
        if self._long <= _SHORT:
            blocks, bound = self._engine.scheduler.pool.num_blocks, "enough to time long contexts"
            raise ConfigError("num_blocks", blocks, bound, "Raise it, or `max_model_len`.")

    def _decode_setup(self, batch: int, drafts: int, length: int | None = None) -> BatchSetup:
        """A setup for decode steps; `length` defaults to a short prompt.

        All short prompts of the batch fit into one step: else the first requests would decode, and
        perhaps end, before the last prompt is computed.
        """
        short = min(_SHORT, self._engine.config.max_num_batched_tokens // batch)
        return BatchSetup(batch, drafts, length or short, int(_STEPS * (1 + drafts / 2)))

    def _decode_setups(self) -> Iterator[BatchSetup]:
        """Every batch size with every K; then long contexts, with the least and largest K."""
        for batch, drafts in product(self._sizes, self._drafts):
            yield self._decode_setup(batch, drafts)
        for drafts in (0, self._drafts[-1]):
            yield self._decode_setup(self._context_batch, drafts, self._long)

    def _warm_up_setups(self) -> list[BatchSetup]:
        if not self._engine.runner.on_host:  # each setup needs kernels compiled and graphs captured
            return self._setups
        # On a CPU only the batch size matters: the requests are short.
        setups = (self._decode_setup(b, k) for b, k in product(self._sizes, self._drafts))
        return [s._replace(length=min(s.length, 4), output=_PROMPT_OUTPUT) for s in setups]

    @property
    def _long(self) -> int:
        """Tokens of a long prompt: `_LONG`, or fewer if the model or the cache has less room."""
        pool, max_len = self._engine.scheduler.pool, self._engine.limits.max_model_len
        room = pool.num_blocks // self._context_batch * pool.block_size
        output = self._decode_setup(1, self._drafts[-1]).output
        return min(_LONG, max_len - output, room - output - pool.block_size)

    def _prompt_setups(self) -> Iterator[BatchSetup]:  # one step computes all prompts of a setup
        config, longest = self._engine.config, _PROMPTS[-1]
        shapes = [(1, n) for n in _PROMPTS]
        shapes += [(b, longest) for b in _PROMPT_BATCHES if b <= config.max_num_seqs]
        # Full steps of short and of long prompts, so that costs need not be extrapolated.
        half = config.max_num_batched_tokens // (2 * config.max_num_seqs)
        lengths = max(longest, half + 1), self._engine.limits.max_model_len - _PROMPT_OUTPUT
        shapes += [self._full_step(length) for length in lengths]
        for batch, length in dict.fromkeys(shapes):
            if 0 < batch * length <= config.max_num_batched_tokens:
                yield BatchSetup(batch, 0, length, _PROMPT_OUTPUT)

    def _full_step(self, length: int) -> tuple[int, int]:
        """(number, length) of prompts that fill a step; a prompt that does not fit is cut."""
        config, pool = self._engine.config, self._engine.scheduler.pool
        room = pool.num_blocks * pool.block_size
        length = min(length, config.max_num_batched_tokens, room - _PROMPT_OUTPUT - pool.block_size)
        request_room = -(-(length + _PROMPT_OUTPUT) // pool.block_size) * pool.block_size
        prompts = min(config.max_num_batched_tokens // length, room // request_room)
        return min(prompts, config.max_num_seqs), length

    def run(self, report: Report = lambda done, next_run: None) -> Profile:
        """Measure all setups; a second call adds to the measurements of the first call.

        `ConfigError`: the cache is too small to run a whole batch until its steps are timed.
        """
        start, done = 0.0, 0
        for repeat in range(self._repeats + 1):
            if repeat == 1:  # the warm-up does not count: on a GPU it compiles
                start = time.perf_counter()
            if repeat > _MIN_REPEATS and time.perf_counter() - start > self._patience:
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

    def _run(self, setup: BatchSetup, seed: int) -> Sequence[TimedStep]:
        drafts = setup.drafts if self._drafts[-1] else None
        params = replace(self._params, num_speculative_tokens=drafts)
        run = EngineRun(self._engine, params, setup.batch, seed, self._text, self._clock)
        run.run([RequestSpec(0.0, setup.length, setup.output)] * setup.batch)
        return run.timed

    def _sort(self, setup: BatchSetup, timed: Sequence[TimedStep]) -> None:
        """Add a run's steps to the lists of the setup's `_Timings`; all other steps are dropped."""
        timings, decoded, context = self._timings[setup], 0, setup.length + 1.0
        for (seconds, requests, decoding, tokens, _, accepted), drafting in timed:
            if not decoding and tokens == setup.batch * setup.length:
                timings.prompts.append(seconds)
            elif decoding == requests == setup.batch:
                if decoded > _SETTLING:
                    timings.steps.append((seconds, drafting if setup.drafts else 0.0, context))
                elif not decoded:
                    timings.first.append(seconds)
                decoded += 1
            if decoding:
                context += 1 + accepted / requests

    def _step(self, setup: BatchSetup) -> tuple[float, float, float]:
        """Means of a setup's settled steps: seconds, seconds of drafting, context. `ConfigError`:
        the setup has too few such steps."""
        steps = self._timings[setup].steps
        if len(steps) < _MIN_STEPS:  # the cache does not hold all requests of the setup
            blocks, tokens = self._engine.scheduler.pool.num_blocks, setup.length + setup.output
            bound = f"enough for {setup.batch} requests of {tokens} tokens at a time"
            raise ConfigError("num_blocks", blocks, bound, "Raise it, or lower `batch_size`.")
        seconds, drafting, context = map(_mean, zip(*steps, strict=True))
        return seconds, drafting, context

    def _profile(self) -> Profile:
        engine, runner = self._engine, self._engine.runner
        context_costs = self._context_costs()
        rest, draft, missed = list[list[float]](), list[list[float]](), [0.0]
        for batch in self._sizes:
            setups = [self._decode_setup(batch, drafts) for drafts in self._drafts]
            step_seconds, draft_seconds, contexts = zip(*map(self._step, setups), strict=True)
            draft.append(nearest_rising(draft_seconds))
            reading = (batch * x * slope for x, slope in zip(contexts, context_costs, strict=True))
            parts = zip(nearest_rising(step_seconds), draft[-1], reading, strict=True)
            rest.append([max(step - drafting - read, 0.0) for step, drafting, read in parts])
            for setup, seconds in zip(setups[1:], step_seconds[1:], strict=True):
                extra = _mean(self._timings[setup].first) - seconds
                missed.append(max(extra, 0.0) / batch / setup.length)
        config, pool, on_host = engine.config, engine.scheduler.pool, runner.on_host
        speculation = config.speculative_config
        memory = dict(runner.planned.parts) if runner.planned else {}
        cache = sum(memory.pop(name, 0) for name in ("K/V cache", "K/V cache of the draft"))
        commit_id, dirty = commit()
        return Profile(
            model=config.model,
            method=str(speculation.method) if speculation else "plain",
            origin="measured",
            drafts=self._drafts,
            batches=self._sizes,
            rest=rest,
            draft=draft,
            context=context_costs,
            missed=median(missed[1:] or missed),
            prompts=self._prompts(),
            limits=EngineLimits(
                config.max_num_seqs, config.max_num_batched_tokens, engine.limits.max_model_len,
                pool.block_size, pool.num_blocks, config.max_step_seconds,
            ),
            runs_ahead=engine.runs_ahead,
            lockstep=not on_host,
            block_bytes=cache // (pool.num_blocks + (not on_host)),
            memory=memory,
            acceptance=self._acceptance(),
            made={
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": commit_id, "dirty": dirty, "hardware": hardware(),
                "repeats": self.num_repeats,
            },
        )  # fmt: skip

    def _context_costs(self) -> list[float]:
        """Seconds per token of context by K; only the least and the largest K are measured."""
        ends = (0, self._drafts[-1])
        slopes = []
        for drafts in ends:
            short = self._step(self._decode_setup(self._context_batch, drafts))
            long = self._step(self._decode_setup(self._context_batch, drafts, self._long))
            slope = (long[0] - short[0]) / max(long[2] - short[2], 1.0) / self._context_batch
            slopes.append(max(slope, 0.0))
        costs: list[float] = np.interp(self._drafts, ends, slopes).tolist()
        return costs if ends[1] else slopes[:1]

    def _prompts(self) -> PromptCosts:
        """Seconds of prompt steps by their number of tokens, and seconds per pair of a token and an
        earlier token. The steps that compute prompts of decode setups count, too."""
        by_size = defaultdict[tuple[int, int], list[float]](list)
        for setup, timings in self._timings.items():
            by_size[setup.batch, setup.length] += timings.prompts
        steps = [
            PromptStep(n * length, n * length**2 / 2, _mean(seconds), len(seconds))
            for (n, length), seconds in by_size.items()
            if seconds
        ]
        pair_seconds = seconds_per_pair(steps)
        by_tokens = seconds_without_pairs(steps, pair_seconds)
        return PromptCosts([*by_tokens], nearest_rising([*by_tokens.values()]), pair_seconds)

    def _acceptance(self) -> tuple[float, ...] | None:
        """Chances that a draft and all before it are accepted; None without drafts on a text."""
        metrics = self._engine.metrics
        if not metrics.num_drafts or metrics.num_synthetic_drafts or not self._text:
            return None
        counts = zip(metrics.accepted_per_position, metrics.drafted_per_position, strict=True)
        return tuple(accumulate((hits / max(tries, 1) for hits, tries in counts), min))


def seconds_per_pair(steps: Sequence[PromptStep]) -> float:
    """Seconds per pair of a token and an earlier token; 0 without clearly different prompts.

    The result is the slope of the seconds per token over the number of earlier tokens, in the
    largest steps only: smaller steps take a minimum time for any number of tokens, and with these
    steps the slope was 37 times too steep on a GPU.
    """
    max_tokens = max((step.tokens for step in steps), default=0)
    large = [step for step in steps if step.tokens >= max_tokens / 2]
    mean_earlier = [step.pairs / step.tokens for step in large]  # half a prompt's length
    if not mean_earlier or max(mean_earlier) < _MIN_RATIO * min(mean_earlier):
        return 0.0
    token_seconds = [step.seconds / step.tokens for step in large]
    weights = np.sqrt([step.times for step in large])
    return max(float(np.polyfit(mean_earlier, token_seconds, 1, w=weights)[0]), 0.0)


def seconds_without_pairs(steps: Sequence[PromptStep], pair_seconds: float) -> dict[int, float]:
    """The mean seconds of a step by its number of tokens, less `pair_seconds` for each pair.

    Steps with equally many tokens, in prompts of different lengths, are averaged with their counts
    as weights.
    """
    by_tokens = defaultdict[int, list[tuple[float, int]]](list)
    for step in steps:
        seconds = max(step.seconds - pair_seconds * step.pairs, 0.0)
        by_tokens[step.tokens].append((seconds, step.times))
    return {
        tokens: sum(seconds * times for seconds, times in means) / sum(times for _, times in means)
        for tokens, means in sorted(by_tokens.items())
    }


def _mean(seconds: Sequence[float]) -> float:
    """The mean, with stalls of the machine cut to `_STALL` times the median.

    The median itself would be too small: on a busy machine by some 10 % of the time of a run.
    """
    return float(np.minimum(seconds, _STALL * median(seconds)).mean())


def nearest_rising(values: Sequence[float]) -> list[float]:
    """The nearest non-decreasing numbers (pool adjacent violators).

    More drafts or tokens never take less time: where measurements fall, they were disturbed.
    """
    pools = list[tuple[float, int]]()
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, last_count), (former, former_count) = pools.pop(), pools.pop()
            size = last_count + former_count
            pools.append(((last * last_count + former * former_count) / size, size))
    return [value for value, count in pools for _ in range(count)]
