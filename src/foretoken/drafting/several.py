"""Several drafters loaded together: each request uses the one that it names, or `hybrid`.

This is a drafter made of drafters, its members. Each member drafts for some of the requests, and
the `DraftBlock`s of a round are merged. A member that runs in lock-step with the target
also observes other members' requests, because its own requests may reuse their cache blocks.

`hybrid` chooses a member for each request and round. It takes looked-up drafts if they should be
faster (`choice.py`), else the drafts of the first member that runs a model.

On a host each member drafts only for its requests. On an asynchronous device every member that a
request of the step may use gets all requests; the spare slot replaces other members' requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.config import HYBRID, EngineConfig, SpeculativeConfig, errors_of_drafter
from foretoken.drafting.base import Drafter, DrafterSetup, no_drafts, select_requests
from foretoken.drafting.choice import Chooser, update_duration
from foretoken.drafting.registry import find_drafter
from foretoken.drafting.stacks import Autoregressive
from foretoken.errors import ConfigError, IntegrityError
from foretoken.models import TargetView
from foretoken.ops import DraftBlock, DraftCache
from foretoken.ops.steps import DraftRequests, ForwardBatch
from foretoken.slots.step import StepRequests, StepResult
from foretoken.slots.table import SlotTable


class Several(Drafter):
    """The drafters of `SpeculativeConfig.drafters`, numbered in this order.

    chooser: chooses for `hybrid` requests; made by `allocate`
    """

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """The views of all members merged; `ConfigError` if two read different hidden states."""
        merged = TargetView()
        for i, member_config in enumerate(_configs(config)):
            with errors_of_drafter(i):
                speculation = _speculation(member_config)
                view = find_drafter(speculation).target_view(member_config)
                layers = view.aux_layers or merged.aux_layers
                if merged.aux_layers not in ((), layers):
                    bound = f"a drafter that reads hidden states {list(merged.aux_layers)}"
                    remedy = f"It reads {list(layers)}; all drafters must read the same states."
                    model = speculation.model
                    raise ConfigError("speculative_config.model", model, bound, remedy)
                merged = TargetView(layers, merged.head or view.head)
        return merged

    def __init__(self, setup: DrafterSetup) -> None:
        self.members: list[Drafter] = []
        for i, config in enumerate(_configs(setup.config)):
            speculation = _speculation(config)
            with errors_of_drafter(i):
                build = find_drafter(speculation, on_host=setup.on_host)
                self.members.append(build(replace(setup, config=config, speculation=speculation)))
        members, names = self.members, tuple(setup.speculation.members)
        look_ups = [i for i, member in enumerate(members) if member.looks_up]
        models = [i for i, member in enumerate(members) if not member.looks_up]
        self._order = look_ups + models  # numbers of members, as `hybrid` asks them
        self._model_number = models[0] if models else None  # the only one that `hybrid` may use
        self._hybrid_members = frozenset(look_ups + models[:1])
        has_hybrid = setup.on_host and bool(look_ups) and len(members) > 1
        self.names = (*names, HYBRID) if has_hybrid else names
        _check_default(setup, self.names)
        with_q = _members_with_q(members)
        self.reads_next_token = any(member.reads_next_token for member in members)
        pairs = zip(names, members, strict=True)
        readers = [name for name, member in pairs if member.prediction_readers]
        self.prediction_readers = (*readers, HYBRID) if readers and has_hybrid else tuple(readers)
        method = str(setup.speculation.method)
        self.measured = (self._model_number or 0) if method == HYBRID else names.index(method)
        self.num_behind = max(member.num_behind for member in members)
        self.kv_bytes_per_block = sum(member.kv_bytes_per_block for member in members)
        self.bytes_shared = sum(member.bytes_shared for member in members)
        shared_bytes = sum(member.cache_bytes for member in with_q[1:])  # one cache of q for all
        self.bytes_per_slot = sum(member.bytes_per_slot for member in members) - shared_bytes
        self._shares_blocks = setup.config.enable_prefix_caching

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Allocate all members. Members that keep q share one cache."""
        self.slots, shared = slots, None
        self.chooser = Chooser()
        # By slot of a `hybrid` request: the number of the member that made the latest drafts.
        self._source: dict[int, int] = {}
        self._proposed_at = 0.0
        for member in self.members:  # free all old caches of q before a new one is made
            if isinstance(member, Autoregressive):
                member.cache = member.shared_cache = None
        for member in self.members:
            if isinstance(member, Autoregressive):
                member.shared_cache = shared
            member.allocate(slots, num_blocks)
            if isinstance(member, Autoregressive):
                shared = shared or member.cache

    def propose(self, requests: DraftRequests) -> DraftBlock:
        has_hybrid = len(self.members) in requests.drafters  # the number of `hybrid`
        if len(requests.drafters) == 1 and not has_hybrid:
            return self.members[min(requests.drafters)].propose(requests)
        drafter_B, merged = self.slots.drafter_S[requests.slot_B], None
        source_B = torch.zeros_like(drafter_B)
        pending_B = drafter_B == len(self.members)  # `hybrid` requests that still need drafts
        if has_hybrid:
            pending_B &= requests.num_B > 0
        for number in self._order:
            member_B, in_hybrid = drafter_B == number, has_hybrid and number in self._hybrid_members
            if in_hybrid:
                member_B |= pending_B
            block = self._propose_for(member_B, number, requests)
            if block is None:
                continue
            if in_hybrid:
                pending_B &= ~self._choose(pending_B, number, block, requests)
                member_B &= ~pending_B
            if has_hybrid:
                source_B[member_B] = number
            merged = block if merged is None else _where(member_B, block, merged)
        if merged is None:
            merged = no_drafts(len(source_B), self.slots.device)
        if has_hybrid:
            self._source.update(zip(requests.slot_B.tolist(), source_B.tolist(), strict=True))
            self._proposed_at = time.perf_counter()
            merged = replace(merged, source_B=source_B)
        return merged

    def _propose_for(
        self, member_B: Tensor, number: int, requests: DraftRequests
    ) -> DraftBlock | None:
        """A member's drafts for the requests where `member_B` is True; None if it is True nowhere.
        The `DraftBlock` has a row for every request; rows of other requests have no drafts."""
        member = self.members[number]
        if not self.slots.on_host:
            if number not in requests.drafters:
                return None
            slot_B = torch.where(member_B, requests.slot_B, self.slots.spare)
            num_B = torch.where(member_B, requests.num_B, 0)
            position_B = torch.where(member_B, requests.position_B, 1)
            requests = requests._replace(slot_B=slot_B, num_B=num_B, position_B=position_B)
            return member.propose(requests)
        index_A = member_B.nonzero()[:, 0]
        if not len(index_A):
            return None
        requests_A = select_requests(requests, index_A)
        with self.chooser.timing(number, len(index_A)):
            block = member.propose(requests_A)
        return block if len(index_A) == len(member_B) else _spread(block, index_A, len(member_B))

    def _choose(
        self, pending_B: Tensor, number: int, block: DraftBlock, requests: DraftRequests
    ) -> Tensor:
        """Which requests get the drafts `block` of member `number`: bool [B], False outside of
        `pending_B`, the `hybrid` requests that need drafts."""
        taken_B = torch.zeros_like(pending_B)
        num_B, token_BK = block.num_B.tolist(), block.token_BK.tolist()
        expected_B = num_B if block.expected_B is None else block.expected_B.tolist()
        for b in pending_B.nonzero()[:, 0].tolist():
            request, num = self.slots.admitted[int(requests.slot_B[b])], int(requests.num_B[b])
            if not self.members[number].looks_up:
                self.chooser.leave_to_model(request, number, num)
                taken_B[b] = True
            elif num_B[b] and self._model_number is not None:
                drafts, model = token_BK[b][: num_B[b]], (self._model_number, num)
                taken_B[b] = self.chooser.takes(request, number, drafts, expected_B[b], model)
            else:
                taken_B[b] = num_B[b] > 0
        return taken_B

    def observes(self, requests: StepRequests) -> bool:
        # On a host the chooser learns from every decision.
        return self.slots.on_host or any(True for _ in self._observers(requests))

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        if self.slots.on_host:
            if self._proposed_at and requests.decider_B is None:
                seconds = (time.perf_counter() - self._proposed_at) / len(requests.step.slot_B)
                self.chooser.pass_seconds = update_duration(self.chooser.pass_seconds, seconds)
            self._proposed_at = 0.0
            for slot, outcome in result.decisions.items():
                self.chooser.learn(slot, outcome)
        for number, member_requests in self._observers(requests):
            member_result = self._member_result(number, requests, result)
            self.members[number].observe(member_requests, batch, member_result)

    def _observers(self, requests: StepRequests) -> Iterator[tuple[int, StepRequests]]:
        """The members that observe this step, as (number, the step's requests). Prefix caching adds
        members that no request of the step uses, since later requests may reuse the blocks."""
        used = requests.drafters
        if len(self.members) in used:
            used |= self._hybrid_members
        for number, member in enumerate(self.members):
            member_requests = requests._replace(has_other_drafters=bool(used - {number}))
            if (number in used or self._shares_blocks) and member.observes(member_requests):
                yield number, member_requests

    def _member_result(self, number: int, requests: StepRequests, result: StepResult) -> StepResult:
        """The result for a member: on a host `num_drafts` is 0 for drafts of other members."""
        if not self.slots.on_host or requests.drafters == {number}:
            return result
        member_result = replace(result)
        member_result.decisions = {
            slot: outcome if self._source_of(slot) == number else outcome._replace(num_drafts=0)
            for slot, outcome in result.decisions.items()
        }
        return member_result

    def _source_of(self, slot: int) -> int:
        return self._source.get(slot, self.slots.admitted[slot].drafter)

    def clear(self, block_ids: Sequence[int]) -> None:
        for member in self.members:
            member.clear(block_ids)

    def release(self, slot: int) -> None:
        for member in self.members:
            member.release(slot)
        self._source.pop(slot, None)
        self.chooser.forget(slot)

    def held_slots(self) -> Iterable[int]:
        slots = {*self._source, *self.chooser.held_slots()}
        return slots.union(*(member.held_slots() for member in self.members))


def _configs(config: EngineConfig) -> list[EngineConfig]:
    """The engine's options once per member, with that member's `speculative_config`."""
    members = _speculation(config).members.values()
    return [replace(config, speculative_config=member) for member in members]


def _speculation(config: EngineConfig) -> SpeculativeConfig:
    if config.speculative_config is None:
        raise IntegrityError("drafters were asked for without `speculative_config`")
    return config.speculative_config


def _check_default(setup: DrafterSetup, names: tuple[str, ...]) -> None:
    """Raise `ConfigError` if `hybrid` is the default drafter but not in `names`."""
    method = setup.speculation.method
    if method not in names:
        remedy = "`hybrid` needs a drafter that looks drafts up (`ngram`), and another drafter."
        if not setup.on_host:
            remedy = "`hybrid` runs only on a CPU: name the drafter that requests have by default."
        field = "speculative_config.method"
        raise ConfigError(field, method, f"one of {', '.join(names)}", remedy)


def _members_with_q(members: Sequence[Drafter]) -> list[Autoregressive]:
    """Members that keep q. They share a cache of q, because a slot has one drafter in a round.
    `ConfigError` if the dtypes of their q differ."""
    with_q = list[Autoregressive]()
    for i, member in enumerate(members):
        if isinstance(member, Autoregressive) and member.probabilistic:
            with_q.append(member)
            dtype, shared_dtype = member.cache_shape[2], with_q[0].cache_shape[2]
            if dtype != shared_dtype:
                bound = f"a model with {shared_dtype} logits, as an earlier drafter's model has"
                remedy = f"Its logits are {dtype}. Or set `draft_sample_method` to `greedy`."
                field = f"speculative_config.drafters[{i}].model"
                raise ConfigError(field, _speculation(member.config).model, bound, remedy)
    return with_q


def _spread(block: DraftBlock, index_A: Tensor, size: int) -> DraftBlock:
    """A `DraftBlock` for `size` requests. Row a of `block` becomes row `index_A[a]`; the other rows
    have no drafts."""

    def spread(column_A: Tensor, fill: int) -> Tensor:
        empty = column_A.new_full((size, *column_A.shape[1:]), fill)
        return empty.index_copy_(0, index_A, column_A)

    expected_B = None if block.expected_B is None else spread(block.expected_B, 0)
    return replace(
        block, token_BK=spread(block.token_BK, -1), num_B=spread(block.num_B, 0),
        real_q_B=spread(block.real_q_B, 0), expected_B=expected_B,
    )  # fmt: skip


def _where(first_B: Tensor, first: DraftBlock, second: DraftBlock) -> DraftBlock:
    """Merge two blocks: rows of `first` where `first_B` is True, else rows of `second`."""
    blocks = (first.token_BK, second.token_BK)
    width = max(block.shape[1] for block in blocks)
    first_BK, second_BK = (pad(x, (0, width - x.shape[1]), value=-1) for x in blocks)
    return DraftBlock(
        torch.where(first_B[:, None], first_BK, second_BK),
        torch.where(first_B, first.num_B, second.num_B),
        _common_cache(first.cache, second.cache),
        torch.where(first_B, first.real_q_B, second.real_q_B),
        faults=first.faults | second.faults,
    )


def _common_cache(first: DraftCache | None, second: DraftCache | None) -> DraftCache | None:
    if first is not None and second is not None and first is not second:
        raise IntegrityError("two drafters do not share a cache of q: see `shared_cache`")
    return first or second
