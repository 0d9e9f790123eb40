"""The scheduler as a state machine: whatever happens, nothing leaks, starves or changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from foretoken.cache.block_pool import BlockPool
from foretoken.engine.request import RequestGroup, Status
from foretoken.engine.scheduler import Scheduler
from foretoken.errors import IntegrityError
from tests.support.paged_machine import PagedMachine, make_group

PREFIX = [0, 0, 1, 0, 2, 0, 1, 1, 2, 0, 0, 1] * 5


def machine(num_blocks: int = 100, seqs: int = 4, budget: int = 64, **options: Any) -> PagedMachine:
    return PagedMachine(
        num_blocks, max_num_seqs=seqs, max_num_batched_tokens=budget, **options
    )  # fmt: skip


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order, around a cache that notices every wrong cell."""

    @initialize(
        blocks=st.integers(4, 30),
        seqs=st.integers(1, 5),
        budget=st.integers(30, 60),
        caching=st.booleans(),
    )
    def start(self, blocks: int, seqs: int, budget: int, caching: bool) -> None:
        self.machine = machine(blocks, seqs, budget, enable_prefix_caching=caching)
        self.groups: list[RequestGroup] = []

    @rule(
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, 2), max_size=8),
        max_tokens=st.integers(1, 24),
        n=st.sampled_from([1, 1, 2, 3]),
        key=st.integers(0, 3),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(self, shared: int, own: list[int], **params: Any) -> None:
        prompt = [*PREFIX[:shared], *own] or [0]
        group = make_group(str(len(self.groups)), prompt, **params)
        pool = self.machine.scheduler.pool
        if pool.blocks_for(len(prompt) + params["max_tokens"]) <= pool.num_blocks:
            self.groups.append(self.machine.add(group))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            plan = self.machine.step()
            total = sum(s.num_tokens + len(s.drafts) for s in plan.shares)
            assert total <= self.machine.scheduler.max_num_batched_tokens
            assert total or not self.machine.scheduler.has_work
            self.machine.scheduler.check_integrity()

    @rule(pick=st.integers(0, 100), sample=st.integers(0, 2), whole=st.booleans())
    def abort(self, pick: int, sample: int, whole: bool) -> None:
        if not self.groups:
            return
        samples = self.groups[pick % len(self.groups)].samples
        for request in samples if whole else [samples[sample % len(samples)]]:
            if request.status is not Status.FINISHED:
                self.machine.finish(request)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "machine"):
            self.machine.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        self.machine.run()
        assert all(group.finished for group in self.groups)
        pool = self.machine.scheduler.pool
        assert pool.num_free == pool.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=30)


def test_a_crowd_in_a_small_pool_is_preempted_and_shares() -> None:
    """The machine's own checks see every token; here, that the hard cases do happen."""
    crowd = machine(num_blocks=24, seqs=5)
    groups = [
        crowd.add(make_group(str(i), PREFIX[: 4 + 5 * i % 30], 40, n=1 + i % 2, key=i % 3))
        for i in range(12)
    ]
    crowd.run()
    assert all(group.finished for group in groups)
    assert crowd.num_preempted > 10
    assert crowd.num_reused > 100
    assert sum(g.metrics.num_preemptions for g in groups) == crowd.num_preempted


def test_the_youngest_gives_way_and_returns_to_its_place_in_the_queue() -> None:
    small = machine(num_blocks=7, seqs=3)
    old, young = (make_group(name, [0] * 8, 12, key=2) for name in ("old", "young"))
    late = make_group("late", [1] * 8, 12)
    for group in (old, young, late):
        small.add(group)
    seen = 0
    while not old.finished:
        small.step()
        small.scheduler.check_integrity()
        if young.samples[0].num_preemptions and young.samples[0] in small.scheduler.waiting:
            seen += 1
            assert small.scheduler.waiting[0] is young.samples[0]
    assert seen > 0
    assert old.metrics.num_preemptions == 0
    small.run()


def test_whoever_gives_way_may_come_back_in_the_same_step_to_blocks_that_are_cached() -> None:
    small = machine(num_blocks=15, seqs=2, budget=30)
    old, young = make_group("old", PREFIX[:22], 20, key=2), make_group("y", PREFIX[:22], 16, key=2)
    for i, count in enumerate((1, 1, 1, 1, 2)):
        small.add(make_group(str(i), [0], count))
    small.add(old)
    small.add(make_group("short", [0], 1))
    small.add(young)
    (request,) = young.samples
    came_back = 0
    while small.scheduler.has_work:
        before = request.num_preemptions
        plan = small.step()
        came_back += request in plan.admitted and request.num_preemptions > before
    assert came_back
    assert old.metrics.num_preemptions == 0


def test_samples_wait_for_their_leader_and_share_its_blocks_while_others_pass() -> None:
    shared = machine(budget=20, seqs=5)
    group, other = make_group("n", PREFIX[:30], 10, n=3), make_group("other", [2] * 5, 10)
    shared.add(group)
    shared.add(other)
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
    plan_of_all = alone.add(make_group("n", PREFIX[:30], 10, n=3))
    assert [share.request for share in alone.step().shares] == plan_of_all.samples


@pytest.mark.parametrize("moment", [0, 1, 2, 4])
def test_samples_go_on_when_their_leader_is_aborted(moment: int) -> None:
    shared = machine(budget=20, seqs=3)
    group = shared.add(make_group("n", PREFIX[:50], 10, n=2))
    for _ in range(moment):
        shared.step()
    shared.finish(group.samples[0])
    shared.run()
    assert group.finished


def test_a_long_prefill_stalls_neither_decoding_nor_a_short_prompt_behind_it() -> None:
    fair = machine(budget=12)
    fair.add(make_group("decoding", [1] * 4, 30))
    fair.step()
    fair.add(make_group("long", [0] * 60, 8))
    fair.add(make_group("short", [2] * 5, 8))
    drafts = len(fair.scheduler.running[0].draft_ids)
    shares = {s.request.group.request_id: s for s in fair.step().shares}
    room = 12 - 1 - drafts
    short = min(5, room // 2)
    assert {name: s.num_tokens for name, s in shares.items()} == {
        "decoding": 1,
        "long": room - short,
        "short": short,
    }
    assert shares["short"].decides == (short == 5)
    fair.run()


def test_a_prompt_that_ends_in_a_chunk_of_one_is_not_drafted_for() -> None:
    """What stands before the first token must not depend on how the prompt was cut."""
    cut = machine(budget=30)
    group = cut.add(make_group("cut", [0] * 31, 8, key=1))
    cut.step()
    request = group.samples[0]
    assert (request.num_prefill, request.decodes, request.draft_ids) == (1, False, [])
    cut.run()


def test_a_prompt_whose_logprobs_are_wanted_is_computed_in_full() -> None:
    wanting = machine()
    wanting.add(make_group("first", PREFIX[:20], 4))
    wanting.run()
    wanting.add(make_group("wants", PREFIX[:20], 4, prompt_logprobs=0))
    wanting.add(make_group("does not", PREFIX[:20], 4))
    assert [s.num_tokens for s in wanting.step().shares] == [20, 4]


def test_what_may_not_be_trusted_is_not_reused() -> None:
    failing = machine()
    group = failing.add(make_group("failing", PREFIX[:20], 4))
    failing.step()
    failing.step()
    failing.scheduler.finish(group.samples[0], keep_blocks=False)
    failing.scheduler.check_integrity()
    failing.add(make_group("again", PREFIX[:20], 4))
    assert [s.num_tokens for s in failing.step().shares] == [20]


@pytest.mark.parametrize("damage", ["tokens", "slot", "order", "blocks"])
def test_integrity_check_sees_each_kind_of_damage(damage: str) -> None:
    scheduler = Scheduler(BlockPool(10, 4), max_num_seqs=2, max_num_batched_tokens=8)
    groups = [make_group(str(i), [0] * 4, 4) for i in range(4)]
    requests = [group.samples[0] for group in groups]
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
