"""The scheduler as a state machine: whatever happens, nothing leaks and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from foretoken.cache.block_pool import BlockPool
from foretoken.engine.request import Request, RequestGroup, Status
from foretoken.engine.scheduler import Scheduler
from foretoken.errors import CapacityError, IntegrityError
from foretoken.sampling.params import SamplingParams


def make_request(num_prompt: int, max_tokens: int, name: str = "r") -> Request:
    prompt = list(range(num_prompt))
    group = RequestGroup(name, None, prompt, SamplingParams(max_tokens=max_tokens))
    request = Request(group, 0, 0, list(prompt))
    group.samples.append(request)
    return request


def commit(scheduler: Scheduler, share, num_accepted: int) -> None:
    """What the engine does to a request after a step, without a model."""
    request = share.request
    request.draft_ids = []
    request.num_computed += share.num_tokens + num_accepted
    if share.decides:
        request.token_ids += [7] * min(num_accepted + 1, request.num_remaining)
        if not request.num_remaining:
            scheduler.finish(request)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(4, 30), seqs=st.integers(1, 4), budget=st.integers(24, 60))
    def start(self, blocks: int, seqs: int, budget: int) -> None:
        self.scheduler = Scheduler(
            BlockPool(blocks, 4), max_num_seqs=seqs, max_num_batched_tokens=budget
        )
        self.alive: list[Request] = []
        self.admitted: list[Request] = []
        self.count = 0

    @rule(num_prompt=st.integers(1, 60), max_tokens=st.integers(1, 20))
    def add(self, num_prompt: int, max_tokens: int) -> None:
        self.count += 1
        request = make_request(num_prompt, max_tokens, str(self.count))
        if -(-(num_prompt + max_tokens) // 4) > self.scheduler.pool.num_blocks:
            with pytest.raises(CapacityError, match="kv_cache_gib"):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.alive.append(request)

    @rule(accepted=st.integers(0, 5), drafts=st.integers(0, 5))
    def step(self, accepted: int, drafts: int) -> None:
        for request in self.scheduler.running:
            if request.num_uncomputed == 1:
                request.draft_ids = [3] * min(drafts, request.num_remaining - 1)
        before = list(self.scheduler.running)
        plan = self.scheduler.schedule()
        self.admitted += plan.admitted
        decoding = [r for r in before if r.num_uncomputed == 1]
        assert {s.request for s in plan.shares} >= set(decoding), "a decoding request starved"
        total = sum(s.num_tokens + len(s.drafts) for s in plan.shares)
        assert 0 < total <= self.scheduler.max_num_batched_tokens or not self.alive
        for share in plan.shares:
            end = share.request.num_computed + share.num_tokens + len(share.drafts)
            assert len(share.request.block_ids) * 4 >= end
            assert share.decides == (share.num_tokens == share.request.num_uncomputed)
            commit(self.scheduler, share, min(accepted, len(share.drafts)))
        self.alive = [r for r in self.alive if r.status is not Status.FINISHED]

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        if self.alive:
            self.scheduler.finish(self.alive.pop(pick % len(self.alive)))

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            names = [int(r.group.request_id) for r in self.admitted]
            assert names == sorted(names), "admission is in order of arrival"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            for share in self.scheduler.schedule().shares:
                commit(self.scheduler, share, len(share.drafts))
            self.scheduler.check_integrity()
        assert not self.scheduler.has_work, "every request ends"
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks


TestScheduler = SchedulerMachine.TestCase


def test_a_long_prefill_is_chunked_and_does_not_stall_decoding() -> None:
    scheduler = Scheduler(BlockPool(100, 4), max_num_seqs=4, max_num_batched_tokens=10)
    short = make_request(4, 8, "1")
    scheduler.add(short)
    for share in scheduler.schedule().shares:
        commit(scheduler, share, 0)
    scheduler.add(make_request(50, 8, "2"))
    shares = scheduler.schedule().shares
    assert [(s.request.group.request_id, s.num_tokens, s.decides) for s in shares] == [
        ("1", 1, True),
        ("2", 9, False),
    ]


def test_integrity_check_sees_a_leaked_slot_and_a_lost_token() -> None:
    scheduler = Scheduler(BlockPool(10, 4), max_num_seqs=2, max_num_batched_tokens=8)
    scheduler.add(make_request(4, 4))
    request = scheduler.schedule().shares[0].request
    request.num_computed = 99
    with pytest.raises(IntegrityError, match="99 tokens computed"):
        scheduler.check_integrity()
    request.num_computed = 0
    request.slot = 0 if request.slot else 1
    with pytest.raises(IntegrityError, match="slots"):
        scheduler.check_integrity()
