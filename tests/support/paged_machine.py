"""The engine's loop around a scheduler, with a model so naive that every mistake shows.

A cell of the cache holds the tokens up to its position, as a tuple. Reading a cell that holds
anything else than the request's own tokens, or writing one that others may read, fails at once.
Tokens and accepted drafts are functions of (key, position), so what a request is given alone is
known without a scheduler.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from foretoken.cache.block_pool import BlockPool
from foretoken.engine.request import Request, RequestGroup, Status
from foretoken.engine.scheduler import Plan, Scheduler, Share
from foretoken.sampling.params import SamplingParams

WRONG = 99  # a draft that is never accepted
MOST_DRAFTS = 5


def true_token(key: int, position: int) -> int:
    """The token that the target draws; few keys and few tokens, so that requests share outputs."""
    return (key * position + position // 3) % 3


def true_drafts(key: int, known: int, remaining: int) -> list[int]:
    """Drafts after `known` tokens: how many, and how many are right, the request alone decides."""
    count = min((5 * key + known) % (MOST_DRAFTS + 1), remaining - 1)
    right = (key + 2 * known) % (MOST_DRAFTS + 2)
    return [true_token(key, known + i) if i < right else WRONG for i in range(count)]


def alone(prompt: list[int], key: int, max_tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
    """All tokens, and (known tokens, drafts) of every decision, of a request with no neighbours."""
    tokens, decisions = [*prompt], [(len(prompt), 0)]
    tokens.append(true_token(key, len(tokens)))
    end = len(prompt) + max_tokens
    while len(tokens) < end:
        drafts = true_drafts(key, len(tokens), end - len(tokens))
        decisions.append((len(tokens), len(drafts)))
        taken = 1 + (drafts.index(WRONG) if WRONG in drafts else len(drafts))
        tokens += [true_token(key, len(tokens) + i) for i in range(taken)]
    return tokens, decisions


def make_group(name: str, prompt: list[int], max_tokens: int, n: int = 1, **params: Any) -> Any:
    """A group whose samples have the keys key, key + 1, ..."""
    key = params.pop("key", 0)
    group = RequestGroup(name, None, prompt, SamplingParams(max_tokens=max_tokens, n=n, **params))
    group.samples = [Request(group, j, key + j, list(prompt)) for j in range(n)]
    if group.params.prompt_logprobs is not None:
        group.prompt_logprobs = [None]
    return group


class PagedMachine:
    """A scheduler, the naive cache, and what was decided for whom."""

    def __init__(self, num_blocks: int, block_size: int = 4, **options: Any) -> None:
        self.size = block_size
        self.scheduler = Scheduler(BlockPool(num_blocks, block_size), **options)
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        self.decisions: dict[Request, list[tuple[int, int]]] = {}
        self.num_preempted = 0
        self.num_reused = 0

    def add(self, group: RequestGroup) -> RequestGroup:
        for request in group.samples:
            self.scheduler.add(request)
            self.decisions[request] = []
        return group

    def step(self) -> Plan:
        """Schedule, compute, commit, draft: as `Engine.step` does."""
        before = list(self.scheduler.running)
        decoding = [request for request in before if request.decodes]
        plan = self.scheduler.schedule()
        running = self.scheduler.running
        if before:
            assert before[0] in running, "the oldest gives way to nobody"
        served = [share.request for share in plan.shares]
        assert served == running, "every running request advances, in order of arrival"
        stayed = set(running) - set(plan.admitted)  # one that gives way may come back at once
        assert set(decoding) & stayed <= {s.request for s in plan.shares if s.decides}
        self._check_order(plan)
        self._clear()
        for request in plan.admitted:
            self.num_reused += request.num_computed
            assert request.num_computed % self.size == 0
        for share in plan.shares:
            self._compute(share)
        for share in plan.shares:
            self._commit(share)
        self._draft()
        return plan

    def run(self, most_steps: int = 3000) -> None:
        """Step until nothing is left."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return
            self.step()
            self.scheduler.check_integrity()
        raise AssertionError("requests are left over")

    def finish(self, request: Request) -> None:
        """An abort, at any moment."""
        self.scheduler.finish(request)
        self._clear()

    def _check_order(self, plan: Plan) -> None:
        last = max((request.arrival for request in plan.admitted), default=0)
        for request in self.scheduler.waiting:
            leader = request.group.samples[0]
            held = request is not leader and leader.status is Status.RUNNING
            assert held or request.arrival > last, "admitted before one that came first"

    def _clear(self) -> None:
        for block in self.scheduler.take_fresh_blocks():
            for offset in range(self.size):
                self.cells.pop((block, offset), None)

    def _compute(self, share: Share) -> None:
        request = share.request
        tokens = [*request.token_ids[: request.num_computed + share.num_tokens], *share.drafts]
        owners = Counter(b for r in self.scheduler.running for b in r.block_ids)
        for position in range(len(tokens)):
            block = request.block_ids[position // self.size]
            cell, upto = (block, position % self.size), tuple(tokens[: position + 1])
            if position < request.num_computed:
                assert self.cells.get(cell) == upto, "K/V of other tokens"
            else:
                assert owners[block] == 1, "a shared block is written"
                assert block not in self.scheduler.pool._index, "a cached block is written"
                self.cells[cell] = upto

    def _commit(self, share: Share) -> None:
        request = share.request
        request.draft_ids = []
        rows = request.group.prompt_logprobs
        if rows is not None and request.needs_prompt_logits:
            end = min(request.num_computed + share.num_tokens + 1, request.num_prompt)
            rows += [{}] * (end - len(rows))
        accepted = share.drafts.index(WRONG) if WRONG in share.drafts else len(share.drafts)
        known = len(request.token_ids)
        request.num_computed += share.num_tokens + accepted
        if share.decides:
            self.decisions[request].append((known, len(share.drafts)))
            request.token_ids += [true_token(request.key, known + i) for i in range(accepted + 1)]
            if not request.num_remaining:
                self._check_result(request)
                self.scheduler.finish(request)

    def _draft(self) -> None:
        preempted = sum(r.num_preemptions for r in self.decisions)
        for request in [*self.scheduler.running]:
            if request.decodes:
                known = len(request.token_ids)
                drafts = true_drafts(request.key, known, request.num_remaining)
                if drafts and self.scheduler.grow(request, known + len(drafts)):
                    request.draft_ids = drafts
        for request in self.scheduler.waiting:
            assert not request.draft_ids, "drafts of a request that gave way"
        self._clear()
        self.num_preempted = max(preempted, sum(r.num_preemptions for r in self.decisions))

    def _check_result(self, request: Request) -> None:
        group = request.group
        expected = alone(group.prompt_ids, request.key, group.params.max_tokens)
        assert (request.token_ids, self.decisions[request]) == expected
        if request.index == 0 and group.prompt_logprobs is not None:
            assert len(group.prompt_logprobs) == request.num_prompt
