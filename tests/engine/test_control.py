"""K = `auto`: the choice on made-up costs and acceptance, and through the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken import LLM, ConfigError, RequestError, SamplingParams, SpeculativeConfig
from foretoken.drafting.control import (
    ADAPTS,
    Load,
    StepCosts,
    StepTable,
    by_gain,
    draft_widths,
    expect,
)
from foretoken.engine.control import DraftControl
from foretoken.engine.request import Request, RequestGroup, Share
from foretoken.engine.step_costs import SECONDS
from foretoken.engine.trace import StepTrace
from foretoken.outputs import RequestOutput
from foretoken.slots.step import Outcome

MOST = 8
BATCHES = np.array([1, 4, 16, 64])


def table(row: float, draft: float) -> StepTable:
    """Milliseconds: 2 for a step, `row` for each row in it; `draft` for a pass of one request, a
    fifth of that for each further one."""
    k, b = np.arange(MOST + 1), BATCHES[:, None]
    rest, drafting = 2 + row * b * (k + 1), k * draft * (0.8 + 0.2 * b)
    return StepTable(BATCHES, rest / 1e3, drafting / 1e3)


COSTS = {
    "rows are free": table(0.01, 0.1),
    "rows cost": table(0.5, 0.1),
    "drafts cost": table(0.1, 1.5),
    "never pays": table(0.5, 30.0),
}


class World:
    """Requests that decode for ever, the true costs of steps, and the true chance of each draft."""

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
        """Tokens and seconds of a step."""
        joint_BK = np.tile(self.chance ** np.arange(1, MOST + 1), (len(asked), 1))
        load = Load(joint_BK, np.array(asked), np.ones(MOST), 0)
        found = expect(self.curve, load, np.array(asked), in_lockstep=bool(self.widths))
        return found.tokens, found.seconds

    def run(self, steps: int) -> float:
        """The rate that is to be expected of what was chosen, over so many steps."""
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
        """The rate of the best K for all."""
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
    assert changes <= 2 * 800 / 8 / 3, "but for one probe in several choices"


def test_costs_that_were_measured_wrong_are_put_right() -> None:
    rest, right = COSTS["rows cost"].rest_JK1.copy(), COSTS["rows cost"]
    rest[:, 4:] *= 0.85  # as if more drafts cost less than they do
    world = World(right, 1, 0.6, thought=StepTable(BATCHES, rest, right.draft_JK1))
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
    assert control.held_slots() == [0, 1, 2]
    for _ in range(20):
        control.choose(world.requests)
        shares = [Share(r, r.slot, 9, 1, 0, True, 0) for r in world.requests[:2]]
        shares.append(Share(world.requests[2], 2, 0, 40, 0, False, 0))
        world.now += 100
        control.observe(shares, {0: Outcome([1]), 1: Outcome([1])}, 100.0)
    assert control.metrics.controlled_seconds == pytest.approx(seconds, abs=0.1)
    control.release(1)
    assert control.held_slots() == [0, 2]


def test_a_warning_says_once_that_it_does_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    world = World(COSTS["never pays"], 2, 0.5)
    with caplog.at_level(logging.WARNING):
        world.run(5000)
    (record,) = caplog.records
    assert "has not paid for" in record.getMessage()


def test_widths_are_few() -> None:
    assert draft_widths(8, adapts=True) == (0, 1, 2, 4, 8)
    assert draft_widths(6, adapts=True) == (0, 1, 2, 4, 6)
    assert draft_widths(6, adapts=False) == (0, 6)
    assert draft_widths(0, adapts=False) == (0,)


# Through the engine -------------------------------------------------------------------------------

PROMPTS = ["def add(a, b):", "x", "import os\nimport sys\n" * 4, "for i in range(10): print(i)"]


@pytest.fixture
def auto(draft: Path) -> dict[str, Any]:
    return {"model": str(draft), "num_speculative_tokens": "auto", "max_speculative_tokens": 6}


@pytest.fixture(autouse=True)
def _quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "cpu", 0.05)


def build(target: Path, speculation: dict[str, Any] | None, **options: Any) -> LLM:
    sizes = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 32, "threads": 1}
    return LLM(str(target), speculation, **{**sizes, **options})


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(output.error is None for output in outputs)
    return [sample.token_ids for output in outputs for sample in output.outputs]


def erratic(llm: LLM, most: int = 6) -> list[int]:
    """K of what adapts is another in every step; each that was chosen."""
    control, chosen = llm.engine.scheduler.control, list[int]()
    assert control is not None

    def choose(decoding: list[Request]) -> None:
        for request in decoding:
            if request.adapts:
                chosen.append(3 * len(chosen) % (most + 1))
                request.num_speculative_tokens = chosen[-1]

    control.choose = choose  # type: ignore[method-assign,assignment]
    return chosen


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 34}, {"async_scheduling": True}])
def test_texts_that_do_not_depend_on_k_are_those_of_plain_decoding(
    target: Path, auto: dict[str, Any], method: str, options: dict[str, Any]
) -> None:
    if method == "ngram":
        auto = {**auto, "method": "ngram", "model": None, "prompt_lookup_min": 1}
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.9, seed=3, max_tokens=40, rejection_sample_method="coupled"),
    ] * 2
    expected = tokens(build(target, None).generate(PROMPTS, params))
    for is_erratic in (False, True):
        llm = build(target, auto, **options)
        chosen = erratic(llm) if is_erratic else []
        outputs = llm.generate(PROMPTS, params)
        assert tokens(outputs) == expected
        assert is_erratic == bool(chosen)
        if options == {"num_blocks": 34}:
            assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_blocks_are_reserved_for_what_was_chosen(target: Path, auto: dict[str, Any]) -> None:
    llm = build(target, auto, enable_prefix_caching=False)
    erratic(llm)
    engine, pool = llm.engine, llm.engine.scheduler.pool
    for prompt in PROMPTS:
        engine.add(prompt, list(prompt.encode()), SamplingParams(max_tokens=30, temperature=0))
    most_held: dict[Request, int] = {}
    while engine.has_work:
        before = {r: len(r.token_ids) for r in engine.scheduler.running if r.decodes}
        engine.step()
        for request, known in before.items():
            if request.block_ids:
                reach = min(known + request.num_speculative_tokens, request.limit - 1)
                needed = max(pool.blocks_for(reach), most_held.get(request, 0))
                assert len(request.block_ids) <= max(needed, pool.blocks_for(known))
                most_held[request] = len(request.block_ids)
        engine.check_integrity()
    assert most_held


def test_a_seeded_text_is_the_same_alone_and_in_a_crowd_unless_it_asks_for_auto(
    target: Path, auto: dict[str, Any]
) -> None:
    kept = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
    alone = build(target, auto).generate(PROMPTS[0], kept)
    asking = SamplingParams(
        temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, num_speculative_tokens="auto"
    )
    other = SamplingParams(temperature=1.1, max_tokens=40, ignore_eos=True)
    llm = build(target, auto)
    erratic(llm)
    crowd = llm.generate([PROMPTS[0], PROMPTS[0], PROMPTS[3]], [kept, asking, other])
    assert tokens(crowd[:1]) == tokens(alone)
    fixed, adapting, unseeded = (output.metrics for output in crowd)
    assert fixed.steps_per_k == alone[0].metrics.steps_per_k
    assert len(fixed.drafted_per_position) == 4, "a fixed K, whatever is chosen for others"
    assert len(adapting.drafted_per_position) == len(unseeded.drafted_per_position) == 6
    assert tokens(crowd[1:2]) != tokens(alone), "where drafts end decides which noise is used"


def test_decisions_are_told(target: Path, auto: dict[str, Any]) -> None:
    llm, traces = build(target, auto), list[StepTrace]()
    assert llm.metrics.estimated_speedup is llm.metrics.realised_speedup is None
    llm.engine.on_step = traces.append
    llm.generate(PROMPTS, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    metrics = llm.metrics
    assert sum(metrics.steps_per_k) == metrics.num_steps
    assert sum(k * n for k, n in enumerate(metrics.steps_per_k)) == metrics.num_draft_tokens
    assert metrics.mean_k == metrics.num_draft_tokens / metrics.num_steps
    assert metrics.estimated_speedup > 0.5
    assert metrics.realised_speedup > 0
    asked = [sum(trace.asked_drafts) for trace in traces]
    assert sum(asked) == metrics.num_steps


def test_prompts_that_join_play_no_part_and_nobody_is_kept(
    target: Path, auto: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, seen = DraftControl.choose, list[int]()

    def watched(control: DraftControl, decoding: list[Request]) -> None:
        assert all(request.decodes for request in decoding)
        choose(control, decoding)
        seen.append(len(decoding))

    monkeypatch.setattr(DraftControl, "choose", watched)
    llm = build(target, auto)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert seen[0] == 0 < max(seen) <= 3
    control = llm.engine.scheduler.control
    assert control is not None
    assert control._adapting == control._probed == control.held_slots() == []


def test_slots_on_a_device_take_one_of_few_widths(
    target: Path, auto: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = tokens(build(target, None, backend="torch").generate(PROMPTS, params))
    monkeypatch.setattr("foretoken.engine.build.is_on_host", lambda device: False)
    llm = build(target, auto, backend="torch")
    asked = set[int]()
    schedule = llm.engine.scheduler.schedule

    def watched() -> Any:
        plan = schedule()
        asked.update(share.request.num_speculative_tokens for share in plan.shares)
        return plan

    llm.engine.scheduler.schedule = watched  # type: ignore[method-assign]
    assert tokens(llm.generate(PROMPTS, params)) == expected
    assert asked <= {0, 1, 2, 4, 6}
    llm.engine.check_integrity()


def test_what_was_measured_is_plausible(target: Path, auto: dict[str, Any]) -> None:
    llm = build(target, auto)
    control = llm.engine.scheduler.control
    assert control is not None
    costs = control.costs.table
    assert costs.batches[0] == 1
    assert costs.rest_JK1.shape == costs.draft_JK1.shape == (len(costs.batches), 7)
    assert (costs.rest_JK1 > 0).all()
    assert (np.diff(costs.rest_JK1, axis=1) >= 0).all()
    assert min(costs.context, costs.context_row, costs.missed) >= 0
    assert llm.engine.runner.slots.requests == {}
    assert build(target, {**auto, "num_speculative_tokens": 2, "max_speculative_tokens": None}
                 ).engine.scheduler.control is None  # fmt: skip


def test_the_shortest_of_contexts_is_measured_too(target: Path, auto: dict[str, Any]) -> None:
    for length in (2, 9, 70):
        llm = build(target, auto, max_model_len=length)
        params = SamplingParams(temperature=0, max_tokens=length - 1)
        (output,) = llm.generate("a", params)
        assert len(output.outputs[0].token_ids) == length - 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_speculative_tokens": 3, "max_speculative_tokens": 8}, "8.*num_speculative_tokens=3"),
        ({"num_speculative_tokens": "auto", "max_speculative_tokens": 0}, r"\[1, 64\]"),
        ({"num_speculative_tokens": "Auto"}, "`auto` or an integer"),
        ({"num_speculative_tokens": "auto", "rejection_sample_method": "synthetic",
          "synthetic_acceptance_length": 9.5}, r"\[1, 9\]"),
    ],
)  # fmt: skip
def test_contradictory_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SpeculativeConfig(method="ngram", **given)


def test_a_request_is_refused_what_the_engine_has_not(target: Path, auto: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"at most the engine's 6"):
        build(target, auto).generate("a", SamplingParams(num_speculative_tokens=7))
    asking = SamplingParams(num_speculative_tokens="auto")
    with pytest.raises(RequestError, match=r"this engine's K is fixed.*`auto`"):
        build(target, {**auto, "num_speculative_tokens": 2, "max_speculative_tokens": None}
              ).generate("a", asking)  # fmt: skip
    with pytest.raises(RequestError, match="or `auto`"):
        SamplingParams(num_speculative_tokens="all")
