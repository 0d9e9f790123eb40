"""Who computes which tokens in the next step. No torch, no sampling, no models.

Charter: admission, the token budget of a step, blocks and slots. Every running request is treated
alike: it has known tokens whose K/V are missing (one when decoding, many in prefill) and perhaps
drafts to verify; a step gives each a share of the budget. Requests are admitted in order of
arrival, and only when the pool can hold all they may come to need, so a running request is never
short of blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from foretoken.cache.block_pool import BlockPool
from foretoken.engine.request import Request, Status
from foretoken.errors import CapacityError, IntegrityError


@dataclass(frozen=True, slots=True)
class Share:
    """One request's share of a step.

    Attributes:
        num_tokens: known tokens to compute, from `request.num_computed` on.
        drafts: tokens to verify after them; only if the known tokens end in this step.
        decides: whether this step computes the last known token, so that a new one is drawn.
    """

    request: Request
    num_tokens: int
    drafts: list[int]
    decides: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A step: every running request's share of it, and the requests it admitted."""

    shares: list[Share]
    admitted: list[Request]


class Scheduler:
    """First come, first served, with chunked prefill beside decoding."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._fresh_blocks: list[int] = []
        self._num_reserved = 0

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; `CapacityError` if the pool could never hold it."""
        request.num_reserved = self.pool.blocks_for(request.num_prompt + request.params.max_tokens)
        if request.num_reserved > self.pool.num_blocks:
            raise CapacityError(
                "max_tokens",
                request.params.max_tokens,
                f"such that prompt ({request.num_prompt}) and output fit the cache of "
                f"{self.pool.num_blocks * self.pool.block_size} tokens",
                "Lower `max_tokens`, shorten the prompt, or raise `kv_cache_gib` or `num_blocks`.",
            )
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Shares of the next step, in order of admission; admits waiting requests that fit.

        A decoding request always gets its token and all its drafts, and prefill what room is left:
        a long prefill cannot stall the others, and no draft is ever dropped for what else is in
        the batch, which would make sampled tokens depend on it.
        """
        admitted = self._admit()
        decoding = (r for r in self.running if r.num_uncomputed == 1)
        budget = self.max_num_batched_tokens - sum(1 + len(r.draft_ids) for r in decoding)
        shares: list[Share] = []
        for request in self.running:
            known = request.num_uncomputed
            if known == 1:
                shares.append(Share(request, 1, request.draft_ids, True))
            elif budget > 0:
                chunk = min(known, budget)
                budget -= chunk
                shares.append(Share(request, chunk, [], chunk == known))
        for share in shares:
            end = share.request.num_computed + share.num_tokens + len(share.drafts)
            self.grow(share.request, end)
        return Plan(shares, admitted)

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give a request the blocks for its first `num_tokens` tokens."""
        missing = self.pool.blocks_for(num_tokens) - len(request.block_ids)
        if missing > 0:
            fresh = self.pool.allocate(missing)
            request.block_ids += fresh
            self._fresh_blocks += fresh

    def take_fresh_blocks(self) -> list[int]:
        """Blocks handed out since the last call: they hold what their last owner left there."""
        fresh, self._fresh_blocks = self._fresh_blocks, []
        return fresh

    def finish(self, request: Request) -> None:
        """Take back the slot and blocks of a request that ended; also ends a waiting one."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.pool.free(request.block_ids)
            self._free_slots.append(request.slot)
            self._num_reserved -= request.num_reserved
            request.block_ids = []
            request.draft_ids = []
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            if self._num_reserved + request.num_reserved > self.pool.num_blocks:
                break
            self.waiting.popleft()
            self._num_reserved += request.num_reserved
            request.slot = self._free_slots.pop()
            request.status = Status.RUNNING
            self.running.append(request)
            admitted.append(request)
        return admitted

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if a block or slot is leaked, doubly owned or over-reserved."""
        self.pool.check_integrity(r.block_ids for r in self.running)
        slots = sorted([*self._free_slots, *(r.slot for r in self.running)])
        if slots != list(range(self.max_num_seqs)):
            raise IntegrityError(f"slots are leaked or shared: {slots}")
        if self._num_reserved != sum(r.num_reserved for r in self.running):
            raise IntegrityError(f"{self._num_reserved} blocks reserved, not what requests hold")
        self._check_requests(self.running)

    @staticmethod
    def _check_requests(running: Iterable[Request]) -> None:
        for request in running:
            if request.status is not Status.RUNNING:
                raise IntegrityError(f"{request.group.request_id} runs but is {request.status}")
            if not 0 <= request.num_computed < len(request.token_ids):
                raise IntegrityError(
                    f"{request.group.request_id}: {request.num_computed} tokens computed of "
                    f"{len(request.token_ids)} known"
                )
            if len(request.block_ids) > request.num_reserved:
                raise IntegrityError(f"{request.group.request_id} holds more than it reserved")
