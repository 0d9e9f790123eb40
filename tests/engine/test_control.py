"""K = `auto` on made-up costs and acceptance: what is chosen, and what that costs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from foretoken import SamplingParams
from foretoken.drafting.control import (
    ADAPTS,
    Load,
    StepCosts,
    StepTable,
    by_gain,
    by_width,
    draft_widths,
    expect,
)
from foretoken.engine.control import DraftControl
from foretoken.engine.request import Request, RequestGroup, Share
from foretoken.slots.step import Outcome

MOST = 8
BATCHES = np.array([1, 4, 16, 64])


def table(row: float, draft: float) -> StepTable:
    """Milliseconds: 2 for a step, `row` for each row in it; `draft` for a pass of one request, a
    fifth of that for each further one."""
    k, b = np.arange(MOST + 1), BATCHES[:, None]
    rest, drafting = 2 + row * b * (k + 1), k * draft * (0.8 + 0.2 * b)
    return StepTable(BATCHES, rest / 1e3, drafting / 1e3, 0 * rest[0])


COSTS = {
    "rows are free": table(0.01, 0.1),
    "rows cost": table(0.5, 0.1),
    "drafts cost": table(0.1, 1.5),
    "never pays": table(0.5, 30.0),
}


class World:
    def __init__(self, costs: StepTable, batch: int, chance: float, widths: tuple[int, ...] = (),
                 thought: StepTable | None = None) -> None:  # fmt: skip
        self.now, self.chance, self.noise = 0.0, chance, 0.0
        self.random = np.random.default_rng(7)
        self.curve, self.widths = StepCosts(costs).curve(batch), widths
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.control = DraftControl(thought or costs, batch, MOST, widths, clock)
        self.requests = [self.request(slot) for slot in range(batch)]
        self.tokens, self.seconds, self.asked = 0, 0.0, list[tuple[int, ...]]()

    def request(self, slot: int) -> Request:
        group = RequestGroup("r", None, [0] * 9, SamplingParams(max_tokens=10**6))
        request = Request(group, 0, slot, [0] * 10, slot=slot)
        request.adapts = True
        return request

    def expected(self, asked: list[int]) -> tuple[float, float]:
        joint_BK = np.tile(self.chance ** np.arange(1, MOST + 1), (len(asked), 1))
        load = Load(joint_BK, np.array(asked), np.ones(MOST), 0)
        found = expect(self.curve, load, np.array(asked), in_lockstep=bool(self.widths))
        return found.tokens, found.seconds

    def run(self, steps: int) -> float:
        tokens = seconds = 0.0
        for _ in range(steps):
            self.control.choose(self.requests)
            asked = [request.num_speculative_tokens for request in self.requests]
            shares, outcomes = [], {}
            for request, count in zip(self.requests, asked, strict=True):
                shares.append(Share(request, request.slot, 9, 1, count, True, 0))
                right = self.random.random(count) < self.chance
                accepted = int(right.cumprod().sum())
                outcomes[request.slot] = Outcome([0] * (accepted + 1), count, accepted)
            more, took = self.expected(asked)
            self.asked.append(tuple(asked))
            tokens, seconds = tokens + more, seconds + took
            factor = 20 if self.random.random() < self.noise / 4 else 1
            self.now += took * factor * (1 + self.noise * abs(self.random.normal()))
            self.control.observe(shares, outcomes, took)
        return tokens / seconds

    def best(self) -> float:
        rates = (self.expected([k] * len(self.requests)) for k in self.widths or range(MOST + 1))
        return max(tokens / seconds for tokens, seconds in rates)

    def plain(self) -> float:
        tokens, seconds = self.expected([0] * len(self.requests))
        return tokens / seconds


@pytest.mark.parametrize("batch", [1, 6, 64])
@pytest.mark.parametrize("chance", [0.9, 0.6, 0.2])
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("widths", [(), (0, 1, 2, 4, 8)])
def test_the_best_k_is_found(
    costs: str, chance: float, batch: int, widths: tuple[int, ...]
) -> None:
    world = World(COSTS[costs], batch, chance, widths)
    world.run(100)
    assert world.run(400) >= 0.95 * world.best()


def test_nothing_is_lost_where_speculation_never_pays() -> None:
    for batch in (1, 6, 64):
        world = World(COSTS["never pays"], batch, 0.7)
        world.run(16)
        assert world.run(2000) >= 0.98 * world.plain()
        asked = [a for a in world.asked[16:] if any(a)]
        assert asked, "it is tried now and then"
        assert all(sum(map(bool, a)) == 1 for a in asked), "by one request at a time"


def test_a_change_is_followed_both_ways() -> None:
    world = World(COSTS["rows cost"], 4, 0.9)
    world.run(100)
    for chance, steps in ((0.05, 200), (0.9, 1500)):
        world.chance = chance
        world.run(steps)
        assert world.run(200) >= 0.95 * world.best()
    assert max(map(max, world.asked[400:600])) <= 3
    assert np.mean(world.asked[-100:]) >= 2.5


def test_noise_and_outliers_change_no_choice() -> None:
    world = World(COSTS["rows cost"], 1, 0.6)
    world.noise = 0.2
    world.run(200)
    world.asked.clear()
    assert world.run(800) >= 0.95 * world.best()
    changes = sum(a != b for a, b in zip(world.asked, world.asked[1:], strict=False))
    assert changes <= 2 * 800 / 8 / 3, "except one probe in several choices"


def test_costs_that_were_measured_wrong_are_put_right() -> None:
    rest, right = COSTS["rows cost"].rest_JK1.copy(), COSTS["rows cost"]
    rest[:, 4:] *= 0.85  # as if more drafts cost less than they do
    world = World(
        right, 1, 0.6, thought=StepTable(BATCHES, rest, right.draft_JK1, right.context_K1)
    )
    world.run(1000)
    assert world.run(500) >= 0.95 * world.best()


def test_requests_differ_in_what_they_get() -> None:
    chances = np.array([0.95] * 2 + [0.2] * 2)
    joint_BK = chances[:, None] ** np.arange(1, MOST + 1)
    load = Load(joint_BK, np.full(4, ADAPTS), np.ones(MOST), 0)
    curve = StepCosts(COSTS["rows cost"]).curve(4)
    found = by_gain(curve, load)
    assert min(found.asked_B[:2]) > max(found.asked_B[2:])
    again = expect(curve, load, found.asked_B)
    assert (again.tokens, again.seconds) == pytest.approx((found.tokens, found.seconds))
    fixed = by_gain(curve, load._replace(fixed_B=np.array([3, ADAPTS, 0, ADAPTS])))
    assert fixed.asked_B[[0, 2]].tolist() == [3, 0]


def test_steps_with_prompts_teach_no_costs_and_what_left_is_forgotten() -> None:
    world = World(COSTS["rows are free"], 3, 0.8)
    world.run(20)
    control, seconds = world.control, world.control.metrics.controlled_seconds
    assert control.acceptance.held_slots() == [0, 1, 2]
    for _ in range(20):
        control.choose(world.requests)
        shares = [Share(r, r.slot, 9, 1, 0, True, 0) for r in world.requests[:2]]
        shares.append(Share(world.requests[2], 2, 0, 40, 0, False, 0))
        world.now += 100
        control.observe(shares, {0: Outcome([1]), 1: Outcome([1])}, 100.0)
    assert control.metrics.controlled_seconds == pytest.approx(seconds, abs=0.1)
    control.release(1)
    assert control.acceptance.held_slots() == [0, 2]


def test_a_warning_says_once_that_it_does_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    world = World(COSTS["never pays"], 2, 0.5)
    with caplog.at_level(logging.WARNING):
        world.run(5000)
    (record,) = caplog.records
    assert "has not paid for" in record.getMessage()


def test_widths_are_few() -> None:
    assert draft_widths(8, adapts=True) == (0, 1, 2, 3, 4, 6, 8)
    assert draft_widths(6, adapts=True) == (0, 1, 2, 3, 4, 6)
    assert draft_widths(6, adapts=False) == (0, 6)
    assert draft_widths(0, adapts=False) == (0,)


@pytest.mark.parametrize(("context", "best"), [(10, 4), (100_000, 3)])
def test_a_draft_that_makes_long_contexts_dear_is_left_out(context: int, best: int) -> None:
    context_K1 = np.where(np.arange(MOST + 1) > 3, 4e-8, 2e-8)
    curve = StepCosts(replace(COSTS["rows are free"], context_K1=context_K1)).curve(1)
    chance_1K = np.cumprod(np.full((1, MOST), 0.8), axis=1)
    load = Load(chance_1K, np.array([ADAPTS]), np.ones(MOST), context)
    assert by_width(curve, load, (0, 1, 2, 3, 4)).asked_B.tolist() == [best]


def test_steps_without_adapting_requests_are_not_counted() -> None:
    """As many requests as before run on, with a K of their own, after the last that adapted."""
    world = World(COSTS["rows are free"], 2, 0.9)
    control = world.control
    leaving, staying = world.requests
    coming = world.request(0)
    for request in (staying, coming):
        request.adapts, request.num_speculative_tokens = False, 0
    control.choose([leaving, staying])
    leaving.slot = -1
    control.release(0)
    for _ in range(80):
        control.choose([staying, coming])
        shares = [Share(r, r.slot, 9, 1, 0, True, 0) for r in (staying, coming)]
        world.now += 2e-3
        control.observe(shares, {r.slot: Outcome([1]) for r in (staying, coming)}, 1.9e-3)
    assert control.metrics.controlled_seconds == 0
    assert not any(found.any() for found in control.costs._deviations.values())
