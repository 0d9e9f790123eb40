"""The real engine, around a model and a drafter so naive that every mistake shows.

A cell of the cache holds the tokens up to its position, as a tuple. The model fails at once if it
is to read a cell that holds anything else than the request's own tokens, or to write one that
others may read. Slots, prefix entries and schedules are checked where they are made, and what a
request is given in the end is what it is given alone (`naive.py`).

Steps are committed at once, or one late: after the next one was launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.cache.block_pool import BlockPool
from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.drafting.base import Drafter, one_hot_block
from foretoken.drafting.control import StepTable
from foretoken.engine.boundary import prepare
from foretoken.engine.engine import Engine
from foretoken.engine.pace import Pace, PromptCosts
from foretoken.engine.request import Request, RequestGroup, Share, Status
from foretoken.engine.runner import Runner, Sampler
from foretoken.engine.scheduler import Schedule, Scheduler
from foretoken.engine.threads import StepThreads
from foretoken.ops import DraftBlock, ForwardOutput, get_backend, unavailable
from foretoken.ops.steps import DraftRequests, ForwardBatch
from foretoken.sampling.params import SamplingParams
from foretoken.slots.step import StepRequests, StepResult
from foretoken.slots.table import SlotSizes, SlotTable
from tests.engine.naive import (
    MOST_DRAFTS,
    VOCABULARY,
    NaiveTokenizer,
    Truth,
    ending,
    logprob_of,
    naive_logits,
    truth_of,
)
from tests.support.steps import OneLate

CPU = torch.device("cpu")


def given_pace(max_seconds: float) -> Pace:
    """A decode step takes 4 ms for one request and 1 more for each other; a row of a prompt takes
    1 ms, and 20 us for each token before it."""
    drafts = np.arange(MOST_DRAFTS + 1)
    rest_JK1 = 1e-3 * (np.array([[4], [11]]) + drafts)
    table = StepTable(np.array([1, 8]), rest_JK1, 0 * rest_JK1, np.full(len(drafts), 1e-5))
    return Pace(table, PromptCosts((1, 101), (4e-3, 104e-3), 20e-6), max_seconds, lockstep=False)


class Cells:
    """The cache: what was computed for each position, by block and offset."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.held: dict[tuple[int, int], tuple[int, ...]] = {}

    def at(self, blocks: Sequence[int], position: int) -> tuple[int, int]:
        return blocks[position // self.block_size], position % self.block_size

    def clear(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            for offset in range(self.block_size):
                self.held.pop((block, offset), None)


class NaiveModel:
    """Writes tokens where others write K/V, and reads what it needs from there."""

    vocab_size, max_model_len, multiplies_masked_keys = VOCABULARY, 4096, True

    def __init__(self, scheduler: Scheduler, slots: SlotTable) -> None:
        self.scheduler, self.slots = scheduler, slots

    def forward(self, batch: ForwardBatch, kv: Cells) -> ForwardOutput:
        attention = batch.attention
        first = attention.query_start_B1.tolist()
        upto_T: list[tuple[int, ...]] = []
        for b, (length, blocks) in enumerate(
            zip(attention.length_B.tolist(), attention.block_BL.tolist(), strict=True)
        ):
            tokens = batch.token_T[first[b] : first[b + 1]].tolist()
            start = length - len(tokens)
            positions = batch.position_T[first[b] : first[b + 1]].tolist()
            assert positions == list(range(start, length))
            is_spare = blocks[0] == self.scheduler.pool.num_blocks
            upto_T += [()] * len(tokens) if is_spare else self.compute(kv, blocks, start, tokens)
        rows = [naive_logits(upto_T[row]) for row in batch.logit_row_N.tolist()]
        return ForwardOutput(torch.from_numpy(np.array(rows, np.float32).reshape(-1, VOCABULARY)))

    def compute(
        self, kv: Cells, blocks: list[int], start: int, tokens: list[int]
    ) -> list[tuple[int, ...]]:
        """The tokens up to each new position, as far as the cache knows."""
        end = start + len(tokens)
        owners = Counter(b for r in self.scheduler.running for b in r.block_ids)
        last = kv.at(blocks, end - 1)[0]
        request = next((r for r in self.scheduler.running if last in r.block_ids), None)
        assert request is not None, "no block for these tokens"
        known = self.slots.length_S[request.slot]
        text = truth_of(request).upto(known)
        for position in range(start):
            held = kv.held.get(kv.at(blocks, position))
            assert held == text[: position + 1], "K/V of other tokens"
        upto, computed = text[:start], []
        for position, token in enumerate(tokens, start):
            upto = (*upto, token)
            assert position >= known or upto == text[: position + 1], "another request's token"
            cell = kv.at(blocks, position)
            assert owners[cell[0]] == 1, "a shared block is written"
            assert cell[0] not in self.scheduler.pool._keys, "a cached block is written"
            kv.held[cell] = upto
            computed.append(upto)
        return computed


class NaiveDrafter(Drafter):
    """Drafts some tokens that are right and some that are wrong; looks on as slots advance."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.decisions: dict[Request, list[tuple[int, int]]] = {}
        self.seen: set[int] = set()

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        self.slots = slots

    def of(self, slot: int) -> Request:
        (request,) = (r for r in self.scheduler.running if r.slot == slot)
        return request

    def propose(self, rows: DraftRequests) -> DraftBlock:
        drafts = [
            truth_of(self.of(slot)).drafts(self.slots.length_S[slot], most) if most else []
            for slot, most in zip(rows.slot_B.tolist(), rows.num_B.tolist(), strict=True)
        ]
        return one_hot_block(drafts, CPU)

    def observe(self, rows: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        slots, step, table = self.slots, rows.step, batch.attention.block_BL
        start_B = (batch.attention.length_B - batch.attention.query_start_B1.diff()).tolist()
        # In the place of a request that has all its tokens stands the spare.
        going_on = {s for s, blocks in zip(step.slot_B, table.tolist(), strict=True)
                    if blocks[0] != self.scheduler.pool.num_blocks}  # fmt: skip
        for slot, outcome in result.decisions.items():
            if slot not in going_on:
                continue
            known = slots.length_S[slot] - len(outcome.token_ids)
            self.decisions.setdefault(self.of(slot), []).append((known, outcome.num_drafts))
        for b, slot in enumerate(step.slot_B):
            self.seen.add(slot)
            if slot not in going_on:
                continue
            length, text = slots.length_S[slot], truth_of(self.of(slot))
            assert tuple(slots.text(slot).tolist()) == text.upto(length), "other tokens in the slot"
            assert slots.computed_S[slot] < length, "more is computed than known"
            assert slots.computed_S[slot] >= start_B[b] + step.num_tokens_B[b]

    def release(self, slot: int) -> None:
        self.seen.discard(slot)

    def held_slots(self) -> Iterable[int]:
        return self.seen


class WatchedPool(BlockPool):
    """A pool that checks what a block holds when it enters the prefix index."""

    cells: Cells
    scheduler: Scheduler

    def enter(self, before: int, tokens: Sequence[int], block: int) -> int:
        for request in self.scheduler.running:
            if block in request.block_ids:
                start = request.block_ids.index(block) * self.block_size
                end = start + self.block_size
                assert request.num_computed >= end, "entered before its step was committed"
                assert request.token_ids[start:end] == [*tokens]
                for position in range(start, end):
                    held = self.cells.held[self.cells.at(request.block_ids, position)]
                    assert list(held) == request.token_ids[: position + 1], "K/V of other tokens"
        return super().enter(before, tokens, block)


class WatchedScheduler(Scheduler):
    """A scheduler that checks its own schedules."""

    latest: Schedule | None = None
    num_preempted = num_reused = 0

    def schedule(self) -> Schedule:
        before = list(self.running)
        preempted = {r: r.num_preemptions for r in [*before, *self.waiting]}
        decoding = [r for r in before if r.decodes and r.most_remaining]
        plan = self.latest = super().schedule()
        if before:
            assert before[0] in self.running, "the oldest was preempted"
        unfinished = [r for r in self.running if r.num_prefill or r.most_remaining]
        advancing = [s.request for s in plan.shares]
        assert advancing == [r for r in unfinished if r in advancing], "not in order of arrival"
        left = {r: r.num_prefill for r in unfinished if r.num_prefill}
        assert {*unfinished} - {*left} <= {*advancing}, "a request that decodes was left out"
        room = self.max_num_batched_tokens - sum(
            s.num_tokens + s.max_drafts for s in plan.shares if s.request not in left
        )
        computed = {s.request: s.num_tokens for s in plan.shares if s.request in left}
        all_of_it = min(sum(left.values()), max(room, 0))
        decodes = [s for s in plan.shares if s.request not in left]
        if self.pace is not None and decodes and computed:
            self.check_pace(self.pace, decodes, [s for s in plan.shares if s.request in left])
            assert 0 < sum(computed.values()) <= all_of_it
        else:
            assert sum(computed.values()) == all_of_it, "room was left"
        if left and room > 0 and not (self.pace and decodes):
            oldest = next(iter(left))
            assert computed[oldest] >= min(left[oldest], room / 4), "the oldest prompt waits"
        stayed = set(self.running) - set(plan.admitted)  # one that gives way may come back at once
        drafts = {s.request: s.max_drafts for s in plan.shares if s.decides}
        for request in drafts:
            unresolved = bool(request.launched_share and request.launched_share.decides)
            assert request.num_remaining > unresolved, "a request that has surely ended"
        for request in set(decoding) & stayed:
            assert drafts[request] == request.max_drafts, "drafts were dropped"
        last = max((request.arrival for request in plan.admitted), default=(-2, 0))
        for request in self.waiting:
            leader = request.group.samples[0]
            held = request is not leader and leader.status is Status.RUNNING
            assert held or request.arrival > last, "admitted before one that came first"
        for request in plan.admitted:
            self.num_reused += request.num_computed
            assert request.num_computed % self.pool.block_size == 0
        self.num_preempted += sum(r.num_preemptions - n for r, n in preempted.items())
        return plan

    def check_pace(self, pace: Pace, decodes: list[Share], prompts: list[Share]) -> None:
        """A step with prompts takes no longer than it may, or computes one token of them."""
        asked, context = [s.max_drafts for s in decodes], sum(s.start + 1 for s in decodes)
        room, tokens = pace.room(asked, context), sum(s.num_tokens for s in prompts)
        pairs = sum(s.num_tokens * (s.start + s.num_tokens / 2) for s in prompts)
        seconds = pace.prompts.mixed_step(room.decoding, room.rows, tokens, pairs)
        assert seconds <= room.max_seconds + 1e-9 or tokens == 1


@dataclass(frozen=True)
class Parts:
    engine: type[Engine] = Engine
    scheduler: type[WatchedScheduler] = WatchedScheduler
    slots: type[SlotTable] = SlotTable


class PagedMachine:
    """An engine of these parts, its steps committed at once or one late."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        *,
        late: bool = False,
        parts: Parts = Parts(),
        **options: Any,
    ) -> None:
        self.late = late
        pool, tokens = WatchedPool(num_blocks, block_size), num_blocks * block_size
        self.scheduler = pool.scheduler = parts.scheduler(pool, **options)
        kv: Any = Cells(block_size)
        pool.cells = kv
        backend = get_backend("torch" if unavailable("native") else "native")
        count = self.scheduler.max_num_seqs
        sizes = SlotSizes(count, tokens, MOST_DRAFTS, num_blocks, spare_block=num_blocks)
        slots = parts.slots(sizes, CPU, backend.steps, on_host=True)
        self.drafter = NaiveDrafter(self.scheduler)
        self.drafter.allocate(slots, num_blocks)
        slots.register("drafts", self.drafter)
        model: Any = NaiveModel(self.scheduler, slots)
        runner = Runner(model, kv, Sampler(backend, slots), self.drafter)
        speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=MOST_DRAFTS)
        config = EngineConfig(model="naive", speculative_config=speculation)
        threads = StepThreads(1, get_backend("torch"), native_target=False)
        given = (config, runner, self.scheduler, NaiveTokenizer(), frozenset[int]())
        self.engine = parts.engine(*given, SamplingParams(), threads)
        self.steps = OneLate(self.engine) if late else self.engine
        self.unchecked: list[RequestGroup] = []
        self.with_other_drafts: set[Request] = set()

    def add(
        self, name: str, prompt: list[int], max_tokens: int | None, **params: Any
    ) -> RequestGroup:
        """Queue a prompt; `key` is the seed, and drawing takes the rule that drafts do not move."""
        given = {"temperature": 1.0, "rejection_sample_method": "coupled", "ignore_eos": True}
        given |= {"seed": params.pop("key", 0), "max_tokens": max_tokens, **params}
        params = SamplingParams(**given)
        group = self.engine.add(*prepare(self.engine, name, prompt, params))
        self.unchecked.append(group)
        return group

    def step(self) -> Schedule:
        self.steps.step()
        self.settle()
        assert self.scheduler.latest is not None
        return self.scheduler.latest

    def settle(self) -> None:
        """Check what there is, and what has ended."""
        self.engine.check_integrity()
        for group in [group for group in self.unchecked if group.finished]:
            self.unchecked.remove(group)
            self.check(group)

    def finish(self, *requests: Request) -> None:
        self.engine.abort(replace(requests[0].group, samples=[*requests]))
        self.settle()

    def draft(self, request: Request, most: int) -> None:
        request.num_speculative_tokens = most
        self.with_other_drafts.add(request)

    def run(self, most_steps: int = 3000) -> None:
        """Step until nothing is left."""
        for _ in range(most_steps):
            if not self.steps.has_work:
                return
            self.step()
        raise AssertionError("requests are left over")

    def check(self, group: RequestGroup) -> None:
        """What a group was given is what it is given alone."""
        if group.error is not None:
            raise group.error
        for request in group.samples:
            self.check_sample(request)
        rows = group.prompt_logprobs
        if rows is not None and group.samples[0].finish_reason in ("length", "stop"):
            assert rows[0] is None
            found = [row[token].logprob for row, token in zip(rows[1:], group.prompt_ids[1:],
                                                              strict=True) if row]  # fmt: skip
            expected = [logprob_of(group.prompt_ids, i) for i in range(1, len(group.prompt_ids))]
            assert found == pytest.approx(expected, abs=1e-5)

    def check_sample(self, request: Request) -> None:
        output, truth = request.token_ids[request.num_prompt :], truth_of(request)
        given = (output, "".join(request.pieces), request.finish_reason, request.stop_reason)
        assert request.token_ids == list(truth.upto(len(request.token_ids)))
        assert request.finish_reason in ("abort", "error") or given == ending(request)
        if request not in self.with_other_drafts:
            self.check_decisions(request, truth)
        if request.params.logprobs is not None:
            at = range(request.num_prompt, len(request.token_ids))
            expected_logprobs = [logprob_of(request.token_ids, i) for i in at]
            found = [row[t].logprob for row, t in zip(request.logprobs, output, strict=True)]
            assert found == pytest.approx(expected_logprobs, abs=1e-5)

    def check_decisions(self, request: Request, truth: Truth) -> None:
        """As many drafts were verified at each position as without neighbours."""
        made = self.drafter.decisions.get(request, [])
        expected = truth.decisions(request.num_speculative_tokens, request.limit)
        assert made == expected[: len(made)], "drafts were dropped"
        needed = sum(known < len(request.token_ids) for known, _ in expected)
        most = needed + 2 * self.late  # when a request ends, two steps may wait for their commit
        assert needed <= len(made) <= most
