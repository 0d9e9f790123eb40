"""The engine as a state machine: whatever happens, nothing leaks, starves or changes.

Steps are committed in turn, or each after the next one was launched.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from foretoken.cache.block_pool import BlockPool
from foretoken.engine.pace import Pace
from foretoken.engine.request import Request, RequestGroup
from foretoken.engine.scheduler import Scheduler
from foretoken.errors import IntegrityError
from foretoken.sampling.params import SamplingParams
from tests.engine.naive import MOST_DRAFTS
from tests.engine.paged_machine import PagedMachine, given_pace

PREFIX = [0, 0, 1, 0, 2, 0, 1, 1, 2, 0, 0, 1] * 5
OTHERS: list[dict[str, Any]] = [
    {},
    {},
    {"prompt_logprobs": 0},
    {"logprobs": 1, "stop": ["ab", "cc"]},
    {"stop_token_ids": [3], "min_tokens": 1},
    {"frequency_penalty": 0.5, "logit_bias": {2: 1.5}},
]


def machine(num_blocks: int = 100, seqs: int = 4, budget: int = 64, **options: Any) -> PagedMachine:
    return PagedMachine(num_blocks, max_num_seqs=seqs, max_num_batched_tokens=budget, **options)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(4, 30),
        seqs=st.integers(1, 5),
        budget=st.integers(30, 60),
        caching=st.booleans(),
        late=st.booleans(),
        pace=st.sampled_from([None, given_pace(0.01), given_pace(0.03)]),
    )
    def start(
        self, blocks: int, seqs: int, budget: int, caching: bool, late: bool, pace: Pace | None
    ) -> None:
        self.machine = machine(
            blocks, seqs, budget, enable_prefix_caching=caching, late=late, pace=pace
        )
        self.groups: list[RequestGroup] = []

    @rule(
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, 2), max_size=8),
        max_tokens=st.one_of(st.integers(1, 24), st.none()),
        n=st.sampled_from([1, 1, 2, 3]),
        key=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        num_speculative_tokens=st.sampled_from([None, None, 0, 2]),
        priority=st.sampled_from([0, 0, -1, 1]),
        others=st.sampled_from(OTHERS),
    )
    def add(self, shared: int, own: list[int], others: dict[str, Any], **params: Any) -> None:
        prompt = [*PREFIX[:shared], *own] or [0]
        pool = self.machine.scheduler.pool
        if pool.blocks_for(len(prompt) + (params["max_tokens"] or 1)) <= pool.num_blocks:
            name = str(len(self.groups))
            self.groups.append(self.machine.add(name, prompt, **params, **others))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            plan = self.machine.step()
            total = sum(s.num_tokens + s.max_drafts for s in plan.shares)
            assert total <= self.machine.scheduler.max_num_batched_tokens
            assert total or self.machine.late or not self.machine.scheduler.has_work

    @rule(pick=st.integers(0, 100), sample=st.integers(0, 2), whole=st.booleans())
    def abort(self, pick: int, sample: int, whole: bool) -> None:
        if self.groups:
            samples = self.groups[pick % len(self.groups)].samples
            self.machine.finish(*(samples if whole else [samples[sample % len(samples)]]))

    @rule(pick=st.integers(0, 100), most=st.integers(0, MOST_DRAFTS))
    def draft(self, pick: int, most: int) -> None:
        if self.groups:
            for request in self.groups[pick % len(self.groups)].samples:
                self.machine.draft(request, most)

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        self.machine.run()
        assert all(group.finished for group in self.groups)
        pool = self.machine.scheduler.pool
        assert pool.num_free == pool.num_blocks


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("late", [False, True])
def test_a_crowd_in_a_small_pool_is_preempted_and_shares(late: bool) -> None:
    """The machine's own checks see every token; here, that the hard cases do happen."""
    crowd = machine(num_blocks=24, seqs=5, late=late)
    groups = [
        crowd.add(str(i), PREFIX[: 4 + 5 * i % 30], 40, n=1 + i % 2, key=i % 3) for i in range(12)
    ]
    crowd.run()
    assert all(group.finished for group in groups)
    assert crowd.scheduler.num_preempted > 10
    assert crowd.scheduler.num_reused > 100
    preemptions = sum(group.metrics.num_preemptions for group in groups)
    assert preemptions == crowd.scheduler.num_preempted


@pytest.mark.parametrize("late", [False, True])
def test_lower_priorities_come_first_and_others_give_way_to_them(late: bool) -> None:
    small = machine(num_blocks=7, seqs=2, late=late)
    given = {"low": 1, "first": 0, "high": -1, "second": 0}
    groups = {
        name: small.add(name, [0] * 8, 12, key=2, priority=priority)
        for name, priority in given.items()
    }
    ended: list[str] = []
    while len(ended) < len(groups):
        small.step()
        ended += [name for name, g in groups.items() if g.finished and name not in ended]
    assert ended == ["high", "first", "second", "low"]
    assert groups["first"].metrics.num_preemptions > 0
    assert groups["high"].metrics.num_preemptions == 0


def test_whoever_gives_way_may_come_back_in_the_same_step_to_blocks_that_are_cached() -> None:
    small = machine(num_blocks=15, seqs=2, budget=30)
    old = small.add("old", PREFIX[:23], 20, key=1)
    small.add("short", [0], 1)
    (request,) = small.add("young", PREFIX[:23], 18, key=1).samples
    came_back = 0
    while small.scheduler.has_work:
        before = request.num_preemptions
        plan = small.step()
        came_back += request in plan.admitted and request.num_preemptions > before
    assert came_back
    assert old.metrics.num_preemptions == 0


def test_samples_wait_for_their_leader_and_share_its_blocks_while_others_pass() -> None:
    shared = machine(budget=20, seqs=5)
    group, other = shared.add("n", PREFIX[:30], 10, n=3), shared.add("other", [2] * 5, 10)
    leader, *siblings = group.samples
    plan = shared.step()
    assert [share.request for share in plan.shares] == [leader, other.samples[0]]
    while leader.num_computed < 28:
        assert shared.step().admitted == []
    assert shared.step().admitted == siblings
    for sibling in siblings:
        assert sibling.block_ids[:7] == leader.block_ids[:7]
        assert sibling.block_ids[7] != leader.block_ids[7]
    shared.run()
    alone = machine(budget=20, seqs=5, enable_prefix_caching=False)
    of_all = alone.add("n", PREFIX[:30], 10, n=3)
    assert alone.step().admitted == of_all.samples
    alone.run()


def test_a_long_prefill_stalls_neither_decoding_nor_a_later_short_prompt() -> None:
    fair = machine(budget=18, seqs=3)
    fair.add("decoding", [1] * 4, 30)
    fair.step()
    fair.add("long", [0] * 60, 8)
    fair.add("short", [2] * 5, 8)
    drafts = fair.scheduler.running[0].max_drafts
    shares = {s.request.group.request_id: s for s in fair.step().shares}
    room = 18 - 1 - drafts
    short = min(5, room - -(-room // 4))
    assert {name: s.num_tokens for name, s in shares.items()} == {
        "decoding": 1,
        "long": room - short,
        "short": short,
    }
    assert shares["short"].decides == (short == 5)
    fair.run()


def chunks_of_prompts(pace: Pace | None) -> tuple[list[int], list[int]]:
    """Chunks of a prompt of 300 tokens next to a request that decodes, then of another alone."""
    fair = machine(200, budget=256, seqs=2, pace=pace, enable_prefix_caching=False)
    sizes = list[list[int]]()
    for output in (60, None):
        if output:
            fair.add("decoding", [1] * 4, output, num_speculative_tokens=0)
            fair.step()
        sizes.append([])
        group = fair.add("long", [0] * 300, 1)
        while not group.finished:
            sizes[-1] += [s.num_tokens for s in fair.step().shares if s.request in group.samples]
        fair.run()
    return sizes[0], sizes[1]


def test_next_to_a_decode_step_a_prompt_comes_in_chunks_that_fit_the_time() -> None:
    chunks, alone = chunks_of_prompts(given_pace(0.05))
    assert chunks_of_prompts(None) == ([255, 45], [256, 44])
    assert alone == [256, 44]
    # 4 ms are the decode step's, 46 are left: n + 0.02 n (before + n / 2) <= 46.
    assert chunks[:3] == [34, 23, 19]
    assert chunks == sorted(chunks[:-1], reverse=True) + chunks[-1:], "pairs make later ones dearer"
    assert sum(chunks) == 300


def test_prompts_get_half_of_a_step_whatever_decoding_takes() -> None:
    chunks, _ = chunks_of_prompts(given_pace(0.001))
    # A decode step and one token of a prompt take 5 ms or more: the step takes 10, or twice that.
    assert chunks[0] == 5
    assert min(chunks[:-1]) >= 1


def test_the_first_of_prompts_goes_on_where_there_is_time_for_no_token() -> None:
    """20 us a pair after 1 900 tokens are 38 ms a token: more than a step of 10 ms."""
    room = given_pace(0.01).room([0], 10)
    assert room.take(1900, 50, 0.25) == 1
    assert room.take(0, 50, 0.25) == room.take(0, 50, 1.0) == 0


def test_prompts_that_come_together_end_one_after_another() -> None:
    """By age, whole prompts at a time: their mean wait is the least that there can be."""
    fair = machine(budget=20, seqs=6)
    groups = [fair.add(f"{i}", [i % 5] * 10, 1, key=i) for i in range(6)]
    ended = []
    while fair.scheduler.has_work:
        fair.step()
        ended.append(sum(group.finished for group in groups))
    assert ended == [2, 4, 6]


def test_a_long_prompt_ends_though_short_ones_keep_coming() -> None:
    fair = machine(budget=16, seqs=4)
    long, steps = fair.add("long", [0] * 60, 1), 0
    while not long.finished:
        fair.add(f"short {steps}", [1 + steps % 4] * 14, 1, key=steps)
        fair.step()
        steps += 1
    assert 60 // 16 < steps <= 60 // 4 + 1
    fair.run()


def test_of_two_priorities_the_first_is_computed_first_however_long() -> None:
    fair = machine(budget=16, seqs=2)
    fair.add("short", [1] * 14, 1, priority=1)
    fair.add("long", [0] * 40, 1, priority=0)
    shares = {s.request.group.request_id: s.num_tokens for s in fair.step().shares}
    assert shares == {"long": 16}
    fair.run()


def test_what_may_not_be_trusted_is_not_reused() -> None:
    failing = machine()
    group = failing.add("failing", PREFIX[:20], 24)
    failing.step()
    failing.step()
    failing.engine.abort(group, "error")
    failing.engine.check_integrity()
    failing.add("again", PREFIX[:20], 4)
    assert [s.num_tokens for s in failing.step().shares] == [20]


@pytest.mark.parametrize("damage", ["tokens", "slot", "order", "blocks"])
def test_integrity_check_sees_each_kind_of_damage(damage: str) -> None:
    scheduler = Scheduler(BlockPool(10, 4), max_num_seqs=2, max_num_batched_tokens=8)
    group = RequestGroup("damaged", None, [0] * 4, SamplingParams(max_tokens=4))
    requests = [Request(group, i, i, [0] * 4) for i in range(4)]
    group.samples = requests[:1] * 4
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    scheduler.check_integrity()
    match = {"tokens": "99 tokens", "slot": "slots", "order": "order", "blocks": "holds blocks"}
    if damage == "tokens":
        requests[0].num_computed = 99
    elif damage == "slot":
        requests[0].slot = requests[1].slot
    elif damage == "order":
        scheduler.running.reverse()
    else:
        requests[3].block_ids = [9]
    with pytest.raises(IntegrityError, match=match[damage]):
        scheduler.check_integrity()
