"""Several drafters loaded together: each request uses the one that it names, or `hybrid`.

This is a drafter made of drafters, its members. It routes requests to the members by slot and
merges the blocks that they return. Each member's state stays as correct as if it were the only
drafter. A member that runs in lock-step with the target also observes other members' requests: its
own requests may reuse the cache blocks of those requests.

`hybrid` chooses a member for each request and round. It takes looked-up drafts if they are worth it
(`choice.py`), else the drafts of the first member that runs a model.

On a host each member drafts only for its own requests. On an asynchronous device every member that
some request of the step may use gets all requests; the spare slot replaces the requests of other
members.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.config import HYBRID, EngineConfig, SpeculativeConfig, of_drafter
from foretoken.drafting.base import Drafter, DrafterSetup, no_drafts, select_requests
from foretoken.drafting.choice import Chooser, follow
from foretoken.drafting.registry import find_drafter
from foretoken.drafting.stacks import Autoregressive
from foretoken.errors import ConfigError, IntegrityError
from foretoken.models import TargetView
from foretoken.ops import DraftBlock, DraftCache
from foretoken.ops.steps import DraftRequests, ForwardBatch
from foretoken.slots.step import StepRequests, StepResult
from foretoken.slots.table import SlotTable


class Several(Drafter):
    """The drafters of `SpeculativeConfig.drafters`, numbered in its order.

    chooser: chooses for requests under `hybrid`; made by `allocate`, and may be replaced after it
    """

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """The views of all members merged; `ConfigError` if two read different hidden states."""
        merged = TargetView()
        for i, member_config in enumerate(_configs(config)):
            with of_drafter(i):
                speculation = _speculation(member_config)
                view = find_drafter(speculation).target_view(member_config)
                layers = view.aux_layers or merged.aux_layers
                if merged.aux_layers not in ((), layers):
                    bound = f"a drafter that reads hidden states {list(merged.aux_layers)}"
                    remedy = f"It reads {list(layers)}; the target gives one set of them."
                    model = speculation.model
                    raise ConfigError("speculative_config.model", model, bound, remedy)
                merged = TargetView(layers, merged.head or view.head)
        return merged

    def __init__(self, setup: DrafterSetup) -> None:
        self.members: list[Drafter] = []
        for i, config in enumerate(_configs(setup.config)):
            speculation = _speculation(config)
            with of_drafter(i):
                build = find_drafter(speculation, on_host=setup.on_host)
                self.members.append(build(replace(setup, config=config, speculation=speculation)))
        members, names = self.members, tuple(setup.speculation.members)
        look_ups = [i for i, member in enumerate(members) if member.looks_up]
        models = [i for i, member in enumerate(members) if not member.looks_up]
        self._order = look_ups + models
        self._model = models[0] if models else None  # the only model that `hybrid` may use
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
        self.measured = (self._model or 0) if method == HYBRID else names.index(method)
        self.num_behind = max(member.num_behind for member in members)
        self.kv_bytes_per_block = sum(member.kv_bytes_per_block for member in members)
        self.bytes_shared = sum(member.bytes_shared for member in members)
        shared_bytes = sum(member.cache_bytes for member in with_q[1:])  # one cache of q for all
        self.bytes_per_slot = sum(member.bytes_per_slot for member in members) - shared_bytes
        self._shares_blocks = setup.config.enable_prefix_caching

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Have all members allocate. Members that keep q share one cache."""
        self.slots, shared = slots, None
        self.chooser = Chooser()
        # By slot: under `hybrid`, the number of the member that made the latest drafts.
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
        """See `Drafter.propose`. For a request under `hybrid`, members that look up come first."""
        chooses = len(self.members) in requests.drafters  # the number of `hybrid`
        if len(requests.drafters) == 1 and not chooses:
            return self.members[min(requests.drafters)].propose(requests)
        drafter_B, merged = self.slots.drafter_S[requests.slot_B], None
        source_B = torch.zeros_like(drafter_B)
        open_B = drafter_B == len(self.members)  # requests under `hybrid` that need drafts
        if chooses:
            open_B &= requests.num_B > 0
        for number in self._order:
            mine_B, may_choose = drafter_B == number, chooses and number in self._hybrid_members
            if may_choose:
                mine_B |= open_B
            block = self._propose_for(mine_B, number, requests)
            if block is None:
                continue
            if may_choose:
                open_B &= ~self._takes(open_B, number, block, requests)
                mine_B &= ~open_B
            if chooses:
                source_B[mine_B] = number
            merged = block if merged is None else _where(mine_B, block, merged)
        if merged is None:
            merged = no_drafts(len(source_B), self.slots.device)
        if chooses:
            self._source.update(zip(requests.slot_B.tolist(), source_B.tolist(), strict=True))
            self._proposed_at = time.perf_counter()
            merged = replace(merged, source_B=source_B)
        return merged

    def _propose_for(
        self, mine_B: Tensor, number: int, requests: DraftRequests
    ) -> DraftBlock | None:
        """A member's drafts for the requests where `mine_B` is True; None if it need not draft.

        The block has a row for each request of the step; the rows of other requests have no drafts.
        """
        member = self.members[number]
        if not self.slots.on_host:
            if number not in requests.drafters:
                return None
            return member.propose(
                requests._replace(
                    slot_B=torch.where(mine_B, requests.slot_B, self.slots.spare),
                    num_B=torch.where(mine_B, requests.num_B, 0),
                    position_B=torch.where(mine_B, requests.position_B, 1),
                )
            )
        index_A = mine_B.nonzero()[:, 0]
        if not len(index_A):
            return None
        mine = select_requests(requests, index_A)
        with self.chooser.timing(number, len(index_A)):
            block = member.propose(mine)
        return block if len(index_A) == len(mine_B) else _spread(block, index_A, len(mine_B))

    def _takes(
        self, open_B: Tensor, number: int, block: DraftBlock, requests: DraftRequests
    ) -> Tensor:
        """Whether each request gets this member's drafts: bool [B], False except where `open_B`.

        Args:
            open_B: requests under `hybrid` that need drafts.
            number: of the member.
            block: the member's drafts, a row for each request.
        """
        taken_B = torch.zeros_like(open_B)
        num_B, token_BK = block.num_B.tolist(), block.token_BK.tolist()
        expected_B = num_B if block.expected_B is None else block.expected_B.tolist()
        for b in open_B.nonzero()[:, 0].tolist():
            request, wanted = self.slots.admitted[int(requests.slot_B[b])], int(requests.num_B[b])
            if not self.members[number].looks_up:
                self.chooser.leave_to_model(request, number, wanted)
                taken_B[b] = True
            elif num_B[b] and self._model is not None:
                drafts, model = token_BK[b][: num_B[b]], (self._model, wanted)
                taken_B[b] = self.chooser.takes(request, number, drafts, expected_B[b], model)
            else:
                taken_B[b] = num_B[b] > 0
        return taken_B

    def observes(self, requests: StepRequests) -> bool:
        """Always True on a host, because the chooser learns from every decision."""
        return self.slots.on_host or any(True for _ in self._observers(requests))

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """See `Drafter.observe`. A member sees other members' drafts as ordinary tokens."""
        if self.slots.on_host:
            if self._proposed_at and requests.decider_B is None:
                seconds = (time.perf_counter() - self._proposed_at) / len(requests.step.slot_B)
                self.chooser.pass_seconds = follow(self.chooser.pass_seconds, seconds)
            self._proposed_at = 0.0
            for slot, outcome in result.decisions.items():
                self.chooser.learn(slot, outcome)
        for number, member_requests in self._observers(requests):
            own_result = self._own_result(number, requests, result)
            self.members[number].observe(member_requests, batch, own_result)

    def _observers(self, requests: StepRequests) -> Iterator[tuple[int, StepRequests]]:
        """Number of each member that has something to observe, and the requests that it sees.

        With prefix caching, members that no request of the step uses observe, too: their half of
        the cache blocks may be reused.
        """
        used = requests.drafters
        if len(self.members) in used:
            used |= self._hybrid_members
        for number, member in enumerate(self.members):
            member_requests = requests._replace(has_other_drafters=bool(used - {number}))
            if (number in used or self._shares_blocks) and member.observes(member_requests):
                yield number, member_requests

    def _own_result(self, number: int, requests: StepRequests, result: StepResult) -> StepResult:
        """The result for one member: `num_drafts` is 0 where another member made the drafts. On a
        device the result is unchanged."""
        if not self.slots.on_host or requests.drafters == {number}:
            return result
        own = replace(result)
        own.decisions = {
            slot: outcome if self._source_of(slot) == number else outcome._replace(num_drafts=0)
            for slot, outcome in result.decisions.items()
        }
        return own

    def _source_of(self, slot: int) -> int:
        """The number of the member that made a slot's latest drafts."""
        return self._source.get(slot, self.slots.admitted[slot].drafter)

    def clear(self, block_ids: Sequence[int]) -> None:
        """See `Drafter.clear`."""
        for member in self.members:
            member.clear(block_ids)

    def release(self, slot: int) -> None:
        """See `Drafter.release`."""
        for member in self.members:
            member.release(slot)
        self._source.pop(slot, None)
        self.chooser.forget(slot)

    def held_slots(self) -> Iterable[int]:
        """See `Drafter.held_slots`."""
        held = {*self._source, *self.chooser.held_slots()}
        return held.union(*(member.held_slots() for member in self.members))


def _configs(config: EngineConfig) -> list[EngineConfig]:
    """The engine's options once per member, with that member's `speculative_config`."""
    members = _speculation(config).members.values()
    return [replace(config, speculative_config=member) for member in members]


def _speculation(config: EngineConfig) -> SpeculativeConfig:
    if config.speculative_config is None:
        raise IntegrityError("drafters were asked for without `speculative_config`")
    return config.speculative_config


def _check_default(setup: DrafterSetup, names: tuple[str, ...]) -> None:
    """Raise `ConfigError` if the default drafter is `hybrid` and these drafters do not allow it."""
    method = setup.speculation.method
    if method not in names:
        remedy = (
            "It needs one that looks up, for example `ngram`, beside another: add one, or set "
            f"`method` to one of {', '.join(names)}."
        )
        if not setup.on_host:
            remedy = "`hybrid` runs on a CPU alone: name the drafter that requests have by default."
        field = "speculative_config.method"
        raise ConfigError(field, method, f"one of {', '.join(names)}", remedy)


def _members_with_q(members: Sequence[Drafter]) -> list[Autoregressive]:
    """Members that keep q. They share one cache of it, because a slot has one drafter in a round.

    Raises:
        ConfigError: they keep q in different dtypes.
    """
    with_q = list[Autoregressive]()
    for i, member in enumerate(members):
        if isinstance(member, Autoregressive) and member.probabilistic:
            with_q.append(member)
            own, shared = member.cache_shape[2], with_q[0].cache_shape[2]
            if own != shared:
                bound = f"left out, or a drafter whose logits are {shared}, as an earlier one's"
                remedy = f"Its logits are {own}: give both one `dtype`, or have one draft `greedy`."
                field = f"speculative_config.drafters[{i}].model"
                raise ConfigError(field, None, bound, remedy)
    return with_q


def _spread(block: DraftBlock, index_A: Tensor, size: int) -> DraftBlock:
    """A block for `size` requests. It has the rows of `block` at `index_A`; the other requests have
    no drafts."""

    def spread(column_A: Tensor, fill: int) -> Tensor:
        empty = column_A.new_full((size, *column_A.shape[1:]), fill)
        return empty.index_copy_(0, index_A, column_A)

    expected_B = block.expected_B
    return replace(
        block,
        token_BK=spread(block.token_BK, -1),
        num_B=spread(block.num_B, 0),
        real_q_B=spread(block.real_q_B, 0),
        expected_B=None if expected_B is None else spread(expected_B, 0),
    )


def _where(first_B: Tensor, first: DraftBlock, second: DraftBlock) -> DraftBlock:
    """Merge two blocks: rows of `first` where `first_B` is true, else rows of `second`."""
    width = max(first.token_BK.shape[1], second.token_BK.shape[1])
    first_BK, second_BK = (
        pad(token_BK, (0, width - token_BK.shape[1]), value=-1)
        for token_BK in (first.token_BK, second.token_BK)
    )
    return DraftBlock(
        torch.where(first_B[:, None], first_BK, second_BK),
        torch.where(first_B, first.num_B, second.num_B),
        _common_cache(first.cache, second.cache),
        torch.where(first_B, first.real_q_B, second.real_q_B),
        faults=first.faults | second.faults,
    )


def _common_cache(first: DraftCache | None, second: DraftCache | None) -> DraftCache | None:
    """The cache of q that two merged blocks share; None if neither has one."""
    if first is not None and second is not None and first is not second:
        raise IntegrityError("two drafters keep q apart; `Autoregressive.shared_cache` is for both")
    return first or second
