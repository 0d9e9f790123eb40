"""Many engines at once: the scheduler's policy on arrays, for capacities and fleets. No torch.

Charter: first come, first served, prompts beside decoding, as `Scheduler` has it. Left out is
preemption: a request gets its slot when the cache holds it whole. Prompts are of one length, so
that the oldest also end soonest, and are computed one after another. `tests/lab/test_plan.py`
holds it against the simulation.

Shapes: E engines, each with N requests; A requests under way; T sizes of batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretoken.drafting.control import Array
from foretoken.engine.pace import Room
from foretoken.errors import ConfigError
from foretoken.lab.plan.profile import Profile
from foretoken.lab.plan.simulate import StepClock


class FleetTimes(NamedTuple):
    """Seconds after each engine's start, [E, N]."""

    arrival_EN: Array
    first_EN: Array
    end_EN: Array

    def ttft(self) -> Array:
        """Seconds to first tokens."""
        return self.first_EN - self.arrival_EN

    def tpot(self, output_len: int) -> Array:
        """Seconds per token behind the first."""
        return (self.end_EN - self.first_EN) / max(output_len - 1, 1)


@dataclass
class Fleet:
    """Engines of one kind whose requests have one length.

    Attributes:
        joint_K: chances of K drafts; () decodes plainly.
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
            bound = f"at most {limits.num_blocks * limits.block_size} tokens of cache"
            raise ConfigError("input_len + output_len", self.input_len + self.output_len, bound)
        drafts, profile = len(self.joint_K), self.profile
        # Whether a step that was launched for who is over by then is computed to its end; without
        # drafts nobody is over unforeseen.
        self.outlives = profile.runs_ahead and profile.lockstep and drafts > 0
        sizes = range(self.slots + 1)
        self.seconds_T = np.array([clock.decoding([drafts] * b, 0) for b in sizes])
        more = np.array([clock.decoding([drafts] * b, b) for b in sizes])
        self.context_T = np.divide(more - self.seconds_T, np.maximum(sizes, 1))

    def run(self, arrival_EN: Array, seed: int = 0) -> FleetTimes:
        """Serve requests that come at these times, rising along N."""
        return _Run(self, arrival_EN, seed).run()


class _Run:
    """State of all engines; each takes a step of its own length per turn.

    A requests have a slot, listed in the order in which they got it.
    """

    def __init__(self, fleet: Fleet, arrival_EN: Array, seed: int) -> None:
        self._fleet, self._chance = fleet, np.random.default_rng(seed)
        self._engines, self._count = arrival_EN.shape
        self._now_E = np.zeros(self._engines)
        self._taken_E = np.zeros(self._engines, dtype=np.int64)  # requests that got a slot
        self._active_E = np.zeros(self._engines, dtype=np.int64)
        # Where steps are launched ahead: until when those that came take part in the coming step,
        # and how many ended in the last one, for whom it was launched, too.
        self._seen_E = np.zeros(self._engines)
        self._ended_E = np.zeros(self._engines, dtype=np.int64)
        self._comes_E = arrival_EN[:, 0].copy()  # the next that gets one
        self._engine_A = self._request_A = np.zeros(0, dtype=np.int64)
        self._prompt_A = self._left_A = self._engine_A  # tokens to compute, and to make
        self._fresh_A = np.zeros(0, dtype=bool)  # whether the drafter has not seen the prompt
        unknown = np.full(arrival_EN.shape, np.nan)
        self._times = FleetTimes(arrival_EN, unknown, unknown.copy())

    def run(self) -> FleetTimes:
        while self._admit():
            self._step()
        return self._times

    def _admit(self) -> bool:
        """Give free slots to requests that have come; False when all are served."""
        idle_E = (self._active_E == 0) & np.isfinite(self._comes_E)
        self._now_E = np.where(idle_E, np.maximum(self._now_E, self._comes_E), self._now_E)
        self._seen_E = np.where(idle_E, self._now_E, self._seen_E)
        while True:
            has_room_E = self._active_E + self._ended_E < self._fleet.slots
            ready_E = (self._comes_E <= self._seen_E) & has_room_E
            e = np.flatnonzero(ready_E)
            if not len(e):
                return bool(len(self._engine_A))
            self._engine_A = np.concatenate([self._engine_A, e])
            self._request_A = np.concatenate([self._request_A, self._taken_E[e]])
            for name, value in (
                ("_prompt_A", self._fleet.input_len),
                ("_left_A", self._fleet.output_len),
                ("_fresh_A", True),
            ):
                setattr(self, name, np.append(getattr(self, name), np.full(len(e), value)))
            self._active_E[e] += 1
            self._taken_E[e] += 1
            next_ = np.minimum(self._taken_E[e], self._count - 1)
            comes = self._times.arrival_EN[e, next_]
            self._comes_E[e] = np.where(self._taken_E[e] < self._count, comes, np.inf)

    def _sum(self, what_A: Array) -> Array:
        """By engine."""
        return np.bincount(self._engine_A, what_A, self._engines)

    def _step(self) -> None:
        fleet, drafts = self._fleet, len(self._fleet.joint_K)
        decodes_A = self._prompt_A == 0
        asked_A = np.clip(self._left_A - 1, 0, drafts) * decodes_A
        over_E = self._ended_E * fleet.outlives
        count_E = self._sum(decodes_A).astype(np.int64) + over_E
        context_A = (fleet.input_len + fleet.output_len - self._left_A) * decodes_A
        seconds_E = fleet.seconds_T[count_E] + fleet.context_T[count_E] * self._sum(context_A)
        chunk_A = np.zeros_like(asked_A)
        if not decodes_A.all():
            rows_E = count_E + self._sum(asked_A) + drafts * over_E
            chunk_A = self._chunks(rows_E, seconds_E)
            if (prompts := fleet.profile.prompts) is not None:
                pairs_A = chunk_A * (fleet.input_len - self._prompt_A + chunk_A / 2)
                tokens_E = self._sum(chunk_A)
                pairs_E = self._sum(pairs_A)
                seconds_E = prompts.beside(seconds_E, rows_E, tokens_E, pairs_E)
        seen_A = self._fresh_A & (asked_A > 0)
        if seen_A.any():
            seconds_E += fleet.profile.missed * fleet.input_len * self._sum(seen_A)
            self._fresh_A &= ~seen_A
        ahead = fleet.profile.runs_ahead
        self._seen_E = self._now_E if ahead else self._now_E + seconds_E
        self._now_E = self._now_E + seconds_E
        self._advance(decodes_A, asked_A, chunk_A)

    def _chunks(self, rows_E: Array, decoding_E: Array) -> Array:
        """Tokens of prompts in this step, as `Scheduler` shares them: prompts are of one length, so
        that the oldest end soonest."""
        limits, prompts = self._fleet.profile.limits, self._fleet.profile.prompts
        needs = np.flatnonzero(self._prompt_A)
        needs = needs[np.argsort(self._engine_A[needs], kind="stable")]
        engine, prompt = self._engine_A[needs], self._prompt_A[needs]
        room_E = np.maximum(limits.max_num_batched_tokens - rows_E, 0).astype(np.int64)
        _, first, of = np.unique(engine, return_index=True, return_inverse=True)

        def of_older(what: Array) -> Array:
            until = np.cumsum(what)
            return np.asarray(until - what - (until - what)[first][of])

        tokens, start = of_older(prompt), self._fleet.input_len - prompt
        chunk = np.clip(room_E[engine] - tokens, 0, prompt)
        if limits.max_step_seconds is not None and prompts is not None:
            room = Room.beside(prompts, limits.max_step_seconds, decoding_E[engine], rows_E[engine])
            room.tokens, room.pairs = tokens, of_older(prompt * (start + prompt / 2))
            fitting = np.maximum(room.fitting(start, chunk), np.minimum(chunk, tokens == 0))
            chunk = np.where(rows_E[engine] > 0, fitting, chunk)
        chunk_A = np.zeros_like(self._prompt_A)
        chunk_A[needs] = chunk
        return chunk_A

    def _advance(self, decodes_A: Array, asked_A: Array, chunk_A: Array) -> None:
        fleet = self._fleet
        u_A, accepted_A = self._chance.random(len(asked_A)), np.zeros_like(asked_A)
        for k, rate in enumerate(fleet.joint_K):
            accepted_A += (u_A < rate) & (k < asked_A)
        self._prompt_A = self._prompt_A - chunk_A
        first_A = (chunk_A > 0) & (self._prompt_A == 0)
        self._left_A = self._left_A - (accepted_A + 1) * decodes_A - first_A
        ends_A = self._left_A <= 0
        for what_A, times_EN in ((first_A, self._times.first_EN), (ends_A, self._times.end_EN)):
            e = self._engine_A[what_A]
            times_EN[e, self._request_A[what_A]] = self._now_E[e]
        self._ended_E = np.zeros_like(self._active_E)
        if ends_A.any():
            ended_E = self._sum(ends_A).astype(np.int64)
            self._active_E -= ended_E
            if fleet.profile.runs_ahead:
                self._ended_E = np.where(self._active_E > 0, ended_E, 0)
                alone_E = (ended_E - self._ended_E) * fleet.outlives
                self._now_E += fleet.seconds_T[alone_E]
            for name in ("_engine_A", "_request_A", "_prompt_A", "_left_A", "_fresh_A"):
                setattr(self, name, getattr(self, name)[~ends_A])
