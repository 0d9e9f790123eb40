"""Which request computes which tokens in the next step. No torch, no sampling, no models.

A running request prefills (computes known tokens without K/V) or decodes (computes its last token
and verifies the drafts after it). Requests are admitted in order of arrival, and the youngest
running request is preempted when an older request needs a block. The oldest request is never
preempted for another, and the pool is large enough for any single request, so every request
finishes. But a request with a lower `priority` counts as older than all requests with a higher
`priority`, which may wait for ever.

A step may be scheduled before the result of the last one is known. Then blocks are reserved as if
all drafts of the last step were accepted, its known tokens count as computed, and the prefix index
gets only blocks of committed tokens.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from operator import attrgetter

from foretoken.cache.block_pool import ROOT, BlockPool, Parent
from foretoken.engine.control import DraftControl
from foretoken.engine.pace import Pace
from foretoken.engine.request import Request, Share, Status
from foretoken.errors import IntegrityError

_BY_ARRIVAL = attrgetter("arrival")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step: shares of requests, and the changes of slots and blocks before it.

    Attributes:
        shares: shares of the running requests, in order of arrival.
        admitted: requests that got a slot.
        new_blocks: (slot, first column, block ids): entries to append to block tables, in the order
            in which to write them.
        fresh_blocks: allocated blocks, which still hold the data of former requests.
        left_slots: slots of requests that were preempted.
    """

    shares: list[Share] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    new_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    fresh_blocks: list[int] = field(default_factory=list)
    left_slots: list[int] = field(default_factory=list)


class Scheduler:
    """First come, first served, with chunked prefill next to decoding.

    Args:
        num_behind: see `Drafter`.
        control: chooses K of requests if the engine's K is `auto`.
        pace: bounds the prompt tokens of steps in which requests decode; None: only
            `max_num_batched_tokens` bounds them, as in steps without decoding requests.
    """

    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int,
        enable_prefix_caching: bool = True, num_behind: int = 0,
        control: DraftControl | None = None, pace: Pace | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.control, self.pace, self.num_behind = pool, control, pace, num_behind
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.waiting: list[Request] = []  # in order of arrival; preempted requests wait, too
        self.running: list[Request] = []  # in order of arrival
        self._num_arrived = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._next = Schedule()  # collects the changes for the next step

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; the caller has checked that the whole pool can hold it."""
        self._num_arrived += 1
        request.arrival = request.params.priority, self._num_arrived
        insort(self.waiting, request, key=_BY_ARRIVAL)

    def schedule(self) -> Schedule:
        """Admit waiting requests that fit, and return the next step.

        A decoding request always gets its token and all its drafts: if drafts were dropped to make
        room for other requests, these would change its tokens. Prompts get the rest of
        `max_num_batched_tokens`, and with a pace no more than there is time for.
        """
        for request in self.running:
            self._enter_blocks(request)
        decoding = [r for r in self.running if r.decodes and r.most_remaining]
        if self.control is not None:
            self.control.choose(decoding)
        for request in decoding:
            # Tokens past the request's limit need no blocks.
            self._grow(request, min(request.most_known + request.max_drafts, request.limit - 1))
        self._admit()
        self._share()
        schedule, self._next = self._next, Schedule()
        return schedule

    def finish(self, request: Request, *, keep_blocks: bool = True) -> None:
        """End a running or waiting request.

        Args:
            keep_blocks: whether later requests may reuse its K/V.
        """
        if request.status is Status.RUNNING:
            if keep_blocks:
                self._enter_blocks(request)
            else:
                self.pool.forget(request.block_ids)
            self._release(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def _grow(self, request: Request, num_tokens: int) -> None:
        """Give a running request the blocks that it lacks for its first `num_tokens` tokens.

        While too few blocks are free, the youngest request is preempted, maybe `request` itself.
        """
        while request.status is Status.RUNNING:
            first = len(request.block_ids)
            missing = self.pool.blocks_for(num_tokens) - first
            if missing <= self.pool.num_free:
                if missing > 0:
                    self._allocate(request, missing)
                    self._next.new_blocks.append((request.slot, first, request.block_ids[first:]))
                return
            self.preempt(self.running[-1])

    def _admit(self) -> None:
        """Give slots and blocks to waiting requests, in order of arrival, while they fit."""
        for request in [*self.waiting]:
            if self._waits_for_leader(request):
                continue
            # A preempted request waits until the tokens of its last step are known.
            if request.launched_share or not self._free_slots or not self._take_blocks(request):
                break
            self.waiting.remove(request)
            request.slot = self._free_slots.pop()
            request.status = Status.RUNNING
            insort(self.running, request, key=_BY_ARRIVAL)
            self._next.admitted.append(request)
            self._next.new_blocks.append((request.slot, 0, request.block_ids[:]))

    def _waits_for_leader(self, request: Request) -> bool:
        """Whether to wait until the first sample of the group has computed the prompt's blocks."""
        leader = request.group.samples[0]
        if not self.enable_prefix_caching or request is leader:
            return False
        shared = (request.num_prompt - 1) // self.pool.block_size * self.pool.block_size
        return leader.status is Status.RUNNING and leader.num_computed < shared

    def _take_blocks(self, request: Request) -> bool:
        """Give a waiting request blocks for all known tokens, cached blocks among them; False if
        too few are free. One block stays free for each running request: otherwise the next request
        that grows might undo the admission."""
        cached = []
        if self.enable_prefix_caching and not request.needs_prompt_logits:
            # At least one token is left to prefill: the last token of a prompt is always computed,
            # because its logits draw the next token.
            num_known = len(request.token_ids) - (request.num_output > 0)
            most_cached = (num_known - 1) // self.pool.block_size
            cached = self.pool.match(request.token_ids, most_cached, _root(request))
        missing = self.pool.blocks_for(len(request.token_ids)) - len(cached)
        num_unheld = self.pool.num_unheld(block for block, _ in cached)
        if missing + num_unheld + len(self.running) > self.pool.num_free:
            return False
        request.block_ids = [block for block, _ in cached]
        request.block_serials = [serial for _, serial in cached]
        request.num_computed = len(cached) * self.pool.block_size
        self.pool.take(request.block_ids)
        self._allocate(request, missing)
        return True

    def _allocate(self, request: Request, count: int) -> None:
        fresh = self.pool.allocate(count)
        request.block_ids += fresh
        self._next.fresh_blocks.extend(fresh)

    def _enter_blocks(self, request: Request) -> None:
        """Enter a request's blocks that have become full into the prefix index."""
        if not self.enable_prefix_caching:
            return
        pool, serials = self.pool, request.block_serials
        # `num_computed` may count accepted drafts after a stop, which are no tokens of the request.
        num_known = len(request.token_ids) - pool.lookahead
        num_full = min(request.num_computed - self.num_behind, num_known) // pool.block_size
        for i in range(len(serials), num_full):
            parent = serials[-1] if serials else _root(request)
            tokens = pool.key(request.token_ids, i)
            serials.append(pool.enter(parent, tokens, request.block_ids[i]))

    def _share(self) -> None:
        """Schedule all decoding requests, and chunks of prompts while there is room."""
        # Known tokens to compute, by prefilling request.
        missing = {r: count for r in self.running if (count := r.num_prefill)}
        drafts = {r: r.max_drafts for r in self.running if r not in missing and r.most_remaining}
        chunks = self._chunks(missing, drafts) if missing else {}
        shares = self._next.shares
        for request in self.running:
            slot, start, preemptions = request.slot, request.num_scheduled, request.num_preemptions
            if request in drafts:
                shares.append(Share(request, slot, start, 1, drafts[request], True, preemptions))
            elif chunk := chunks.get(request, 0):
                ends_prompt = chunk == missing[request] and not request.num_output
                shares.append(Share(request, slot, start, chunk, 0, ends_prompt, preemptions))

    def _chunks(
        self, missing: Mapping[Request, int], drafts: Mapping[Request, int]
    ) -> dict[Request, int]:
        """The sizes of the chunks of prompts in the step, by request.

        A quarter of the tokens that decoding requests leave for prompts goes to the oldest prompts,
        the rest to the prompts with the fewest missing tokens, priority by priority. So a short
        prompt does not wait for a long one, and no long prompt waits for ever. Of prompts that
        arrive together, the first is completed before the next begins.

        Args:
            missing: known tokens to compute, by prefilling request in order of arrival.
            drafts: number of drafts, by decoding request.
        """
        max_tokens = max(self.max_num_batched_tokens - len(drafts) - sum(drafts.values()), 0)
        room = None
        if self.pace is not None and drafts:
            room = self.pace.room([*drafts.values()], sum(r.num_scheduled + 1 for r in drafts))
        chunks = dict.fromkeys(missing, 0)

        def distribute(requests: Iterable[Request], part: float) -> None:
            """Give tokens to requests in this order, up to `part` of all tokens and of the time."""
            remaining = ceil(part * max_tokens) - sum(chunks.values())
            for request in requests:
                chunk = min(missing[request] - chunks[request], remaining)
                if chunk and room is not None:
                    chunk = room.take(request.num_scheduled + chunks[request], chunk, part)
                chunks[request] += chunk
                remaining -= chunk

        distribute(missing, part=0.25)
        distribute(sorted(missing, key=lambda r: (r.params.priority, missing[r])), part=1.0)
        return chunks

    def preempt(self, request: Request) -> None:
        """Take slot and blocks from a running request and queue it again; it keeps its tokens."""
        self._enter_blocks(request)
        self._next.left_slots.append(request.slot)
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.group.metrics.num_preemptions += 1
        request.status = Status.WAITING
        insort(self.waiting, request, key=_BY_ARRIVAL)

    def _release(self, request: Request) -> None:
        """Take slot and blocks from a running request."""
        self.running.remove(request)
        self.pool.free(request.block_ids)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.block_ids = []
        request.block_serials = []

    def check_integrity(self) -> None:
        """Raise `IntegrityError` for leaked or shared blocks or slots, and for a wrong queue."""
        self.pool.check_integrity(r.block_ids for r in self.running)
        slots = sorted([*self._free_slots, *(r.slot for r in self.running)])
        if slots != list(range(self.max_num_seqs)):
            raise IntegrityError(f"slots are leaked or shared: {slots}")
        for queue, status in ((self.waiting, Status.WAITING), (self.running, Status.RUNNING)):
            if queue != sorted(queue, key=_BY_ARRIVAL):
                raise IntegrityError(f"requests that are {status.value} are out of order")
            for request in queue:
                _check_request(request, status)


def _root(request: Request) -> Parent:
    """The parent of the request's first block in the prefix index."""
    return request.params.cache_salt or ROOT


def _check_request(request: Request, status: Status) -> None:
    """Raise `IntegrityError` if a request cannot be in the queue of this status."""
    name, num_known = request.group.request_id, len(request.token_ids)
    if request.status is not status:
        raise IntegrityError(f"{name} is queued as {status} but is {request.status}")
    if not 0 <= request.num_computed < num_known:
        raise IntegrityError(f"{name}: {request.num_computed} tokens computed of {num_known} known")
    if status is Status.WAITING and (request.num_computed or request.block_ids):
        raise IntegrityError(f"{name} waits but holds blocks")
