"""The engine's own scheduler, with a clock instead of a model. No torch.

`Scheduler` decides which tokens of which request a step computes, a profile gives the times, and
random numbers decide how many drafts are accepted. The rest of `Simulation` does what `Engine.step`
and `Engine.commit` do with requests. `Outlook` needs no requests: it has the rates of a decoding
batch that never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from foretoken.cache.block_pool import BlockPool
from foretoken.drafting.control import Array
from foretoken.engine.control import DraftControl
from foretoken.engine.pace import DecodeCosts, Pace, Room
from foretoken.engine.request import Request, RequestGroup, Share, Status
from foretoken.engine.scheduler import Scheduler
from foretoken.errors import CapacityError, ConfigError
from foretoken.lab.plan.profile import Acceptance, Profile
from foretoken.sampling.params import SamplingParams


class RequestSpec(NamedTuple):
    """A request: seconds from the start to its arrival, and its tokens of prompt and of output."""

    arrival: float
    input_len: int
    output_len: int


class Served(NamedTuple):
    """A served request: seconds from the start to its events, and its number of tokens."""

    arrival: float
    first: float  # the first token
    end: float
    tokens: int


class Step(NamedTuple):
    """The numbers of a step, named as in `StepTrace`."""

    seconds: float
    num_requests: int
    num_decoding: int
    num_tokens: int
    num_drafts: int
    num_accepted: int


class DrawnOutcome(NamedTuple):
    """A request's random outcome in a step: the fields of `Outcome` that `DraftControl` reads."""

    token_ids: Sequence[int]
    num_drafts: int
    num_accepted: int


@dataclass
class Simulation:
    """A simulated engine.

    joint_K: chances that draft i and all drafts before it are accepted, up to the largest K
    num_drafts: K of every request; None: K is chosen step by step, as with `auto`
    concurrency: at most so many requests are under way; further requests arrive when one ends
    """

    profile: Profile
    joint_K: Sequence[float]
    num_drafts: int | None = 0
    concurrency: int | None = None
    seed: int = 0
    on_step: Callable[[Step], None] = lambda step: None
    now: float = 0.0  # seconds after the start
    served: list[Served] = field(default_factory=list)

    def __post_init__(self) -> None:
        profile, control, pace = self.profile, None, None
        limits, prompts = profile.limits, profile.prompts
        if limits.max_step_seconds is not None and prompts is not None:
            seconds, lockstep = limits.max_step_seconds, profile.lockstep
            pace = Pace(profile.table, prompts, seconds, lockstep=lockstep)
        if self.num_drafts is None:
            sizes = limits.max_num_seqs, len(self.joint_K)
            control = DraftControl(profile.table, *sizes, profile.widths, lambda: self.now)
        self.scheduler = Scheduler(
            BlockPool(limits.num_blocks, limits.block_size), max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens, enable_prefix_caching=False,
            control=control, pace=pace,
        )  # fmt: skip
        self._control, self._clock = control, StepClock(profile)
        self._random = np.random.default_rng(self.seed)
        self._unread: Sequence[Share] = ()  # the step that was launched ahead
        self._first: dict[Request, float] = {}  # time of the first token

    def run(self, specs: Iterable[RequestSpec]) -> list[Served]:
        """Serve all requests; returns their records in the order in which they ended.

        `CapacityError`: a request is longer than the engine allows.
        """
        waiting = sorted(specs, key=lambda spec: spec.arrival)[::-1]
        limit = self.concurrency or len(waiting)
        while waiting or self.scheduler.has_work:
            under_way = len(self.scheduler.running) + len(self.scheduler.waiting)
            if not under_way and waiting[-1].arrival > self.now:
                self.step()  # a step that was launched ahead ends although no request waits
                self.now = max(self.now, waiting[-1].arrival)
            while waiting and under_way < limit and waiting[-1].arrival <= self.now:
                self._add(waiting.pop())
                under_way += 1
            self.step()
        return self.served

    def step(self) -> None:
        """Like `Engine.step`: launch a step; commit it or, if steps run ahead, the last step."""
        plan = self.scheduler.schedule()
        for slot in plan.left_slots:
            self._release(slot)
        for share in plan.shares:
            share.request.launched_share = share
        done: Sequence[Share] = plan.shares
        if self.profile.runs_ahead:
            done, self._unread = self._unread, done
        # Requests that have ended since the launch still cost time on a GPU (which drafts in
        # lockstep), where the step has already begun, but not on a host.
        live, ended = list[Share](), list[Share]()
        for share in done:
            (ended if share.request.status is Status.FINISHED else live).append(share)
        self._commit(live, ended if self.profile.lockstep else ())

    def _add(self, spec: RequestSpec) -> None:
        limits = self.profile.limits
        length = spec.input_len + spec.output_len
        max_len = min(limits.max_model_len, limits.num_blocks * limits.block_size)
        if length > max_len:
            bound = f"at most {max_len}, the most tokens of a request in this engine"
            raise CapacityError("input_len + output_len", length, bound)
        params = SamplingParams(max_tokens=spec.output_len, ignore_eos=True)
        arrival = spec.arrival if self.concurrency is None else self.now
        group = RequestGroup("", None, [0] * spec.input_len, params, arrival)
        request = Request(
            group, 0, 0, [0] * spec.input_len,
            num_speculative_tokens=self.num_drafts or 0, adapts=self.num_drafts is None,
        )  # fmt: skip
        group.samples.append(request)
        self.scheduler.add(request)

    def _commit(self, shares: Sequence[Share], ended: Sequence[Share]) -> None:
        """End a step: advance the clock, draw the accepted drafts, and report the step.

        ended: shares of requests that have ended, but still cost time
        """
        seconds = self._clock.seconds(shares, ended)
        self.now += seconds
        uniforms = self._random.random(len(shares)).tolist()
        drawn = {s.slot: self._draw(s, u) for s, u in zip(shares, uniforms, strict=True)}
        if self._control is not None:
            self._control.observe(shares, drawn, seconds)  # type: ignore[arg-type]
        if shares:
            drafts = sum(outcome.num_drafts for outcome in drawn.values())
            accepted = sum(outcome.num_accepted for outcome in drawn.values())
            tokens = sum(share.num_tokens for share in shares) + drafts
            decoding = sum(map(_decodes, shares))
            self.on_step(Step(seconds, len(shares), decoding, tokens, drafts, accepted))
        for share in shares:
            self._append_tokens(share, drawn[share.slot])

    def _draw(self, share: Share, u: float) -> DrawnOutcome:
        """A request's outcome; u is uniform and decides how many drafts are accepted."""
        request = share.request
        if request.launched_share is share:
            request.launched_share = None
        if not share.decides:
            return DrawnOutcome((), 0, 0)
        drafts = max(min(share.max_drafts, request.num_remaining - 1), 0)
        accepted = sum(u < chance for chance in self.joint_K[:drafts])
        return DrawnOutcome([0] * (accepted + 1), drafts, accepted)

    def _append_tokens(self, share: Share, drawn: DrawnOutcome) -> None:
        request = share.request
        if share.num_preemptions == request.num_preemptions:
            request.num_computed += share.num_tokens + drawn.num_accepted
        for token in drawn.token_ids:
            self._first.setdefault(request, self.now)
            if request.append(token) is not None:
                slot, arrival = request.slot, request.group.arrival
                self.scheduler.finish(request)
                self._release(slot)
                first = self._first.pop(request)
                self.served.append(Served(arrival, first, self.now, request.num_output))
                break

    def _release(self, slot: int) -> None:
        if slot >= 0:
            self._clock.release(slot)
            if self._control is not None:
                self._control.release(slot)


def _decodes(share: Share) -> bool:
    """Whether a request decodes: the step computes one known token, and draws the next token."""
    return share.decides and share.num_tokens == 1


class StepClock:
    """The time of steps, according to a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.decoding = DecodeCosts(profile.table, lockstep=profile.lockstep).seconds
        self._seen: dict[int, int] = {}  # by slot, the number of tokens that its drafter has seen

    def seconds(self, shares: Sequence[Share], ended: Sequence[Share] = ()) -> float:
        """Seconds of a step with these shares and those of ended requests; 0 without shares."""
        prompts = self._profile.prompts
        decoding = [share for share in shares if _decodes(share)]
        drafts = [share.max_drafts for share in (*decoding, *ended)]
        context = sum(share.start + 1 for share in (*decoding, *ended))
        seconds = self.decoding(drafts, context)
        parts = [(s.start, s.num_tokens) for s in shares if not _decodes(s)]
        if parts and prompts is not None:
            pairs = sum(count * (start + count / 2) for start, count in parts)
            rows, tokens = len(drafts) + sum(drafts), sum(count for _, count in parts)
            seconds = float(prompts.mixed_step(seconds, rows, tokens, pairs))
        for share in decoding:
            if share.max_drafts:
                missed = max(share.start - self._seen.get(share.slot, 0), 0)
                seconds += self._profile.missed * missed
                self._seen[share.slot] = share.start + 1 + share.max_drafts
        return seconds

    def release(self, slot: int) -> None:
        self._seen.pop(slot, None)


class Outlook:
    """Rates of a batch in which all requests decode, by batch size, K, and context per request.

    max_drafts: the largest K
    """

    def __init__(self, profile: Profile, acceptance: Acceptance) -> None:
        self.max_drafts = min(profile.max_drafts, acceptance.max_drafts)
        self._lengths = [1 + sum(acceptance.joint(k)) for k in range(self.max_drafts + 1)]
        self.profile, self.acceptance, self._clock = profile, acceptance, StepClock(profile)

    def seconds(self, batch: int, drafts: int, context: int) -> float:
        return self._clock.decoding([drafts] * batch, batch * context)

    def rate(self, batch: int, drafts: int, context: int) -> float:
        """Tokens per second of all requests together."""
        return batch * self._lengths[drafts] / self.seconds(batch, drafts, context)

    def best(self, batch: int, context: int) -> int:
        """The K with the highest rate; the smallest such K if rates are equal."""
        return max(range(self.max_drafts + 1), key=lambda k: (self.rate(batch, k, context), -k))

    def break_even_length(self, batch: int, drafts: int, context: int) -> float:
        """Mean tokens per round (at most K + 1, bonus included) that K drafts need to pay."""
        return self.seconds(batch, drafts, context) / self.seconds(batch, 0, context)

    def largest_paying_batch(self, context: int) -> int:
        """The largest batch at which some K is faster than plain decoding; 0: no batch."""
        batches = range(self.profile.limits.max_num_seqs, 0, -1)
        return next((b for b in batches if self.best(b, context)), 0)


class FleetTimes(NamedTuple):
    """Seconds from each engine's start to events of its requests, [E, N]; first: first token."""

    arrival_EN: Array
    first_EN: Array
    end_EN: Array

    def ttft(self) -> Array:
        return self.first_EN - self.arrival_EN

    def tpot(self, output_len: int) -> Array:
        return (self.end_EN - self.first_EN) / max(output_len - 1, 1)


@dataclass
class Fleet:
    """Engines of one kind, with requests of one length: the scheduler's policy on arrays.

    First come, first served; prompts are computed in the same steps as decoding, and older prompts
    are complete before newer ones begin. There is no preemption: a request gets its slot once the
    cache can hold all its tokens. `tests/lab/test_plan.py` compares this policy with the
    simulation.

    Shapes: E engines, each with N requests; A requests that have a slot; T sizes of batches.

    Attributes:
        joint_K: chances that draft i and all drafts before it are accepted; (): plain decoding.
    """

    profile: Profile
    joint_K: Sequence[float]
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        limits, clock = self.profile.limits, StepClock(self.profile)
        blocks = -(-(self.input_len + self.output_len) // limits.block_size) + 1
        self.slots = min(limits.max_num_seqs, limits.num_blocks // blocks)
        if self.slots < 1:
            bound = f"at most {(limits.num_blocks - 1) * limits.block_size}, the cache's room"
            raise ConfigError("input_len + output_len", self.input_len + self.output_len, bound)
        drafts, profile = len(self.joint_K), self.profile
        # Whether a step launched ahead also computes requests that have ended since. Without drafts
        # the end of a request is known in advance.
        self.computes_ended = profile.runs_ahead and profile.lockstep and drafts > 0
        sizes = range(self.slots + 1)
        self.seconds_T = np.array([clock.decoding([drafts] * b, 0) for b in sizes])
        one_token_T = np.array([clock.decoding([drafts] * b, b) for b in sizes])
        # In seconds per token of context.
        self.context_T = np.divide(one_token_T - self.seconds_T, np.maximum(sizes, 1))

    def run(self, arrival_EN: Array, seed: int = 0) -> FleetTimes:
        """Serve requests with these arrival times, which rise along N."""
        return _Run(self, arrival_EN, seed).run()


class _Run:
    """The state of all engines of a fleet. In a turn every engine makes one step.

    Suffix A: an entry per request that has a slot, in the order in which requests got their slots.
    """

    def __init__(self, fleet: Fleet, arrival_EN: Array, seed: int) -> None:
        self._fleet, self._random = fleet, np.random.default_rng(seed)
        self._engines, self._count = arrival_EN.shape
        self._now_E = np.zeros(self._engines)
        # Numbers of requests that ever got a slot, that have a slot now, and that ended in the last
        # step (a step that was launched ahead still computes them).
        self._admitted_E, self._active_E, self._ended_E = np.zeros((3, self._engines), np.int64)
        self._launch_E = np.zeros(self._engines)  # latest arrival that joins the next step
        self._next_E = arrival_EN[:, 0].copy()  # arrival of the next request to get a slot
        self._engine_A = self._request_A = np.zeros(0, dtype=np.int64)
        self._prompt_A = self._left_A = self._engine_A  # tokens left to compute, and to emit
        self._fresh_A = np.zeros(0, dtype=bool)  # whether the drafter has not seen the prompt
        unknown = np.full(arrival_EN.shape, np.nan)
        self._times = FleetTimes(arrival_EN, unknown, unknown.copy())

    def run(self) -> FleetTimes:
        while self._admit():
            self._step()
        return self._times

    def _admit(self) -> bool:
        """Give free slots to arrived requests; returns False when all requests are served."""
        idle_E = (self._active_E == 0) & np.isfinite(self._next_E)
        self._now_E = np.where(idle_E, np.maximum(self._now_E, self._next_E), self._now_E)
        self._launch_E = np.where(idle_E, self._now_E, self._launch_E)
        while True:
            has_room_E = self._active_E + self._ended_E < self._fleet.slots
            ready_E = (self._next_E <= self._launch_E) & has_room_E
            e = np.flatnonzero(ready_E)
            if not len(e):
                return bool(len(self._engine_A))
            self._engine_A = np.concatenate([self._engine_A, e])
            self._request_A = np.concatenate([self._request_A, self._admitted_E[e]])
            for name, value in (
                ("_prompt_A", self._fleet.input_len),
                ("_left_A", self._fleet.output_len),
                ("_fresh_A", True),
            ):
                setattr(self, name, np.append(getattr(self, name), np.full(len(e), value)))
            self._active_E[e] += 1
            self._admitted_E[e] += 1
            n = np.minimum(self._admitted_E[e], self._count - 1)
            arrival = self._times.arrival_EN[e, n]
            self._next_E[e] = np.where(self._admitted_E[e] < self._count, arrival, np.inf)

    def _sum(self, value_A: Array) -> Array:  # over each engine's requests, [E]
        return np.bincount(self._engine_A, value_A, self._engines)

    def _step(self) -> None:
        """Make one step of every engine: find its seconds, then advance the requests."""
        fleet, drafts = self._fleet, len(self._fleet.joint_K)
        decodes_A = self._prompt_A == 0
        drafts_A = np.clip(self._left_A - 1, 0, drafts) * decodes_A
        ended_E = self._ended_E * fleet.computes_ended
        count_E = self._sum(decodes_A).astype(np.int64) + ended_E
        context_A = (fleet.input_len + fleet.output_len - self._left_A) * decodes_A
        seconds_E = fleet.seconds_T[count_E] + fleet.context_T[count_E] * self._sum(context_A)
        chunk_A = np.zeros_like(drafts_A)
        if not decodes_A.all():
            rows_E = count_E + self._sum(drafts_A) + drafts * ended_E
            chunk_A = self._chunks(rows_E, seconds_E)
            if (prompts := fleet.profile.prompts) is not None:
                pairs_A = chunk_A * (fleet.input_len - self._prompt_A + chunk_A / 2)
                tokens_E, pairs_E = self._sum(chunk_A), self._sum(pairs_A)
                seconds_E = prompts.mixed_step(seconds_E, rows_E, tokens_E, pairs_E)
        catches_up_A = self._fresh_A & (drafts_A > 0)  # the drafter computes the prompt
        if catches_up_A.any():
            seconds_E += fleet.profile.missed * fleet.input_len * self._sum(catches_up_A)
            self._fresh_A &= ~catches_up_A
        ahead = fleet.profile.runs_ahead
        self._launch_E = self._now_E if ahead else self._now_E + seconds_E
        self._now_E = self._now_E + seconds_E
        self._advance(decodes_A, drafts_A, chunk_A)

    def _chunks(self, rows_E: Array, decoding_E: Array) -> Array:
        """The number of prompt tokens of each request that this step computes, [A].

        As in `Scheduler`, older requests come first. The tokens of a step are limited by
        `max_num_batched_tokens` and, if decoding requests wait for the step, by its seconds.

        rows_E, decoding_E: rows and seconds of the decoding requests in the step
        """
        limits, prompts = self._fleet.profile.limits, self._fleet.profile.prompts
        # Requests with prompt tokens left, sorted by engine; in each engine the oldest first.
        index = np.flatnonzero(self._prompt_A)
        index = index[np.argsort(self._engine_A[index], kind="stable")]
        engine, prompt = self._engine_A[index], self._prompt_A[index]
        room_E = np.maximum(limits.max_num_batched_tokens - rows_E, 0).astype(np.int64)
        _, oldest, group = np.unique(engine, return_index=True, return_inverse=True)

        def sum_of_older(values: Array) -> Array:  # requests of the same engine
            before = np.cumsum(values) - values
            return np.asarray(before - before[oldest][group])

        older_tokens, start = sum_of_older(prompt), self._fleet.input_len - prompt
        chunk = np.clip(room_E[engine] - older_tokens, 0, prompt)
        if limits.max_step_seconds is not None and prompts is not None:
            limit = limits.max_step_seconds
            room = Room.of_step(prompts, limit, decoding_E[engine], rows_E[engine])
            room.tokens = older_tokens
            room.pairs = sum_of_older(prompt * (start + prompt / 2))
            minimum = np.minimum(chunk, older_tokens == 0)  # one token for the oldest request
            fitting = np.maximum(room.fitting(start, chunk), minimum)
            chunk = np.where(rows_E[engine] > 0, fitting, chunk)
        chunk_A = np.zeros_like(self._prompt_A)
        chunk_A[index] = chunk
        return chunk_A

    def _advance(self, decodes_A: Array, drafts_A: Array, chunk_A: Array) -> None:
        """Draw accepted drafts, note first tokens and ends, and free slots of ended requests."""
        fleet = self._fleet
        u_A, accepted_A = self._random.random(len(drafts_A)), np.zeros_like(drafts_A)
        for k, chance in enumerate(fleet.joint_K):
            accepted_A += (u_A < chance) & (k < drafts_A)
        self._prompt_A = self._prompt_A - chunk_A
        first_A = (chunk_A > 0) & (self._prompt_A == 0)
        self._left_A = self._left_A - (accepted_A + 1) * decodes_A - first_A
        ends_A = self._left_A <= 0
        for event_A, times_EN in ((first_A, self._times.first_EN), (ends_A, self._times.end_EN)):
            e = self._engine_A[event_A]
            times_EN[e, self._request_A[event_A]] = self._now_E[e]
        self._ended_E = np.zeros_like(self._active_E)
        if ends_A.any():
            ended_E = self._sum(ends_A).astype(np.int64)
            self._active_E -= ended_E
            if fleet.profile.runs_ahead:
                self._ended_E = np.where(self._active_E > 0, ended_E, 0)
                # Where no request is left, the step launched ahead computes only ended requests.
                wasted_E = (ended_E - self._ended_E) * fleet.computes_ended
                self._now_E += fleet.seconds_T[wasted_E]
            for name in ("_engine_A", "_request_A", "_prompt_A", "_left_A", "_fresh_A"):
                setattr(self, name, getattr(self, name)[~ends_A])
