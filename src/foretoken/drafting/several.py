"""Several drafters loaded together: each request uses the one that it names, or `hybrid`.

This is a drafter made of drafters, its members. It routes requests to them by slot and merges the
blocks that they return. Each member's state stays as correct as if it were alone: one that runs in
lock-step with the target also observes other members' requests, because its own requests may reuse
the blocks that those have filled.

`hybrid` chooses a member for each request and round: looked-up drafts if they are worth it
(`choice.py`), else those of the first drafter that runs a model.

On a host each member is asked only for its own requests. On an asynchronous device every member
that some request of the step may have is asked for all requests, with the spare slot in the place
of other members' requests.
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
    """The drafters of `SpeculativeConfig.drafters`, numbered in its order."""

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """What all members want; `ConfigError` if two want different hidden states."""
        merged = TargetView()
        for i, own in enumerate(_configs(config)):
            with of_drafter(i):
                view = find_drafter(_speculation(own)).target_view(own)
                layers = view.aux_layers or merged.aux_layers
                if merged.aux_layers not in ((), layers):
                    bound = f"a drafter that reads hidden states {list(merged.aux_layers)}"
                    remedy = f"It reads {list(layers)}; the target gives one set of them."
                    model = _speculation(own).model
                    raise ConfigError("speculative_config.model", model, bound, remedy)
                merged = TargetView(layers, merged.head or view.head)
        return merged

    def __init__(self, setup: DrafterSetup) -> None:
        self.members: list[Drafter] = []
        for i, config in enumerate(_configs(setup.config)):
            own = _speculation(config)
            with of_drafter(i):
                build = find_drafter(own, on_host=setup.on_host)
                self.members.append(build(replace(setup, config=config, speculation=own)))
        members, names = self.members, tuple(setup.speculation.members)
        look_ups = [i for i, member in enumerate(members) if member.looks_up]
        models = [i for i, member in enumerate(members) if not member.looks_up]
        self._order = look_ups + models
        self._model = models[0] if models else None  # the one that `hybrid` may use
        self._of_hybrid = frozenset(look_ups + models[:1])
        has_hybrid = setup.on_host and bool(look_ups) and len(members) > 1
        self.names = (*names, HYBRID) if has_hybrid else names
        _check_default(setup, self.names)
        keep = _keepers(members)
        self.reads_next_token = any(member.reads_next_token for member in members)
        readers = [n for n, m in zip(names, members, strict=True) if m.prediction_readers]
        self.prediction_readers = (*readers, HYBRID) if readers and has_hybrid else tuple(readers)
        method = str(setup.speculation.method)
        self.measured = (self._model or 0) if method == HYBRID else names.index(method)
        self.num_behind = max(member.num_behind for member in members)
        self.kv_bytes_per_block = sum(member.kv_bytes_per_block for member in members)
        self.bytes_shared = sum(member.bytes_shared for member in members)
        twice = sum(member.cache_bytes for member in keep[1:])
        self.bytes_per_slot = sum(member.bytes_per_slot for member in members) - twice
        self._shares_blocks = setup.config.enable_prefix_caching

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Have all members allocate; those that keep q share one cache."""
        self.slots, shared = slots, None
        self._chooser = Chooser()
        self._maker: dict[int, int] = {}  # by slot: the member of its latest drafts under `hybrid`
        self._proposed_at = 0.0
        for member in self.members:  # free all old caches before a new one is made
            if isinstance(member, Autoregressive):
                member.cache = member.shared_cache = None
        for member in self.members:
            if isinstance(member, Autoregressive):
                member.shared_cache = shared
            member.allocate(slots, num_blocks)
            if isinstance(member, Autoregressive):
                shared = shared or member.cache

    def propose(self, requests: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`; for a request under `hybrid` look-ups come first."""
        chooses = len(self.members) in requests.drafters  # the number of `hybrid`
        if len(requests.drafters) == 1 and not chooses:
            return self.members[min(requests.drafters)].propose(requests)
        drafter_B, merged = self.slots.drafter_S[requests.slot_B], None
        source_B = torch.zeros_like(drafter_B)
        open_B = drafter_B == len(self.members)  # under `hybrid`, still without drafts
        if chooses:
            open_B &= requests.num_B > 0
        for number in self._order:
            mine_B, may_choose = drafter_B == number, chooses and number in self._of_hybrid
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
            self._maker.update(zip(requests.slot_B.tolist(), source_B.tolist(), strict=True))
            self._proposed_at = time.perf_counter()
            merged = replace(merged, source_B=source_B)
        return merged

    def _propose_for(
        self, mine_B: Tensor, number: int, requests: DraftRequests
    ) -> DraftBlock | None:
        """A member's drafts for the requests in `mine_B`, in a block with a row for each request of
        the step; None if it has no requests."""
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
        with self._chooser.timing(number, len(index_A)):
            block = member.propose(select_requests(requests, index_A))
        return block if len(index_A) == len(mine_B) else _spread(block, index_A, len(mine_B))

    def _takes(
        self, open_B: Tensor, number: int, block: DraftBlock, requests: DraftRequests
    ) -> Tensor:
        """Which of the open requests under `hybrid` take a member's drafts."""
        taken_B = torch.zeros_like(open_B)
        num_B, token_BK = block.num_B.tolist(), block.token_BK.tolist()
        expected_B = num_B if block.expected_B is None else block.expected_B.tolist()
        for b in open_B.nonzero()[:, 0].tolist():
            request, wanted = self.slots.admitted[int(requests.slot_B[b])], int(requests.num_B[b])
            if not self.members[number].looks_up:
                self._chooser.leave_to_model(request, number, wanted)
                taken_B[b] = True
            elif num_B[b] and self._model is not None:
                found, rival = token_BK[b][: num_B[b]], (self._model, wanted)
                taken_B[b] = self._chooser.takes(request, number, found, expected_B[b], rival)
            else:
                taken_B[b] = num_B[b] > 0
        return taken_B

    def observes(self, requests: StepRequests) -> bool:
        """On a host always, because the chooser learns from every decision."""
        return self.slots.on_host or any(True for _ in self._observers(requests))

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """See `Drafter.observe`; each member sees only its own drafts as drafts."""
        if self.slots.on_host:
            if self._proposed_at and requests.of_B is None:
                seconds = (time.perf_counter() - self._proposed_at) / len(requests.step.slot_B)
                self._chooser.pass_seconds = follow(self._chooser.pass_seconds, seconds)
            self._proposed_at = 0.0
            for slot, outcome in result.decisions.items():
                self._chooser.learn(slot, outcome)
        for number, seen in self._observers(requests):
            self.members[number].observe(seen, batch, self._own_part(number, requests, result))

    def _observers(self, requests: StepRequests) -> Iterator[tuple[int, StepRequests]]:
        """Members that have something to observe.

        Unused members still observe: their blocks may be reused. Without prefix caching they do
        not.
        """
        present = requests.drafters
        if len(self.members) in present:
            present |= self._of_hybrid
        for number, member in enumerate(self.members):
            seen = requests._replace(others=bool(present - {number}))
            if (number in present or self._shares_blocks) and member.observes(seen):
                yield number, seen

    def _own_part(self, number: int, requests: StepRequests, result: StepResult) -> StepResult:
        """The result without other members' drafts; on a device unchanged."""
        if not self.slots.on_host or requests.drafters == {number}:
            return result
        own = replace(result)
        own.decisions = {
            slot: outcome if self._made_by(slot) == number else outcome._replace(num_drafts=0)
            for slot, outcome in result.decisions.items()
        }
        return own

    def _made_by(self, slot: int) -> int:
        """The number of the member that made a slot's latest drafts."""
        return self._maker.get(slot, self.slots.admitted[slot].drafter)

    def clear(self, block_ids: Sequence[int]) -> None:
        """See `Drafter.clear`."""
        for member in self.members:
            member.clear(block_ids)

    def release(self, slot: int) -> None:
        """See `Drafter.release`."""
        for member in self.members:
            member.release(slot)
        self._maker.pop(slot, None)
        self._chooser.forget(slot)

    def held_slots(self) -> Iterable[int]:
        """See `Drafter.held_slots`."""
        held = {*self._maker, *self._chooser.held_slots()}
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
    """Raise `ConfigError` if the default is `hybrid` and these drafters do not allow it."""
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


def _keepers(members: Sequence[Drafter]) -> list[Autoregressive]:
    """Members that keep q. They can share one cache: a slot has one drafter in a round."""
    keep = list[Autoregressive]()
    for i, member in enumerate(members):
        if isinstance(member, Autoregressive) and member.probabilistic:
            keep.append(member)
            own, shared = (m.cache_shape[2] for m in (member, keep[0]))
            if own != shared:
                bound = f"left out, or a drafter whose logits are {shared}, as an earlier one's"
                remedy = f"Its logits are {own}: give both one `dtype`, or have one draft `greedy`."
                field = f"speculative_config.drafters[{i}].model"
                raise ConfigError(field, None, bound, remedy)
    return keep


def _spread(block: DraftBlock, index_A: Tensor, size: int) -> DraftBlock:
    """A block for `size` requests: the given one's rows at `index_A`, no drafts elsewhere."""

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
    """Merge two blocks: rows of `first` where `first_B` is true, else of `second`."""
    most = max(first.token_BK.shape[1], second.token_BK.shape[1])
    one_BK, other_BK = (
        pad(token_BK, (0, most - token_BK.shape[1]), value=-1)
        for token_BK in (first.token_BK, second.token_BK)
    )
    return DraftBlock(
        torch.where(first_B[:, None], one_BK, other_BK),
        torch.where(first_B, first.num_B, second.num_B),
        _one_cache(first.cache, second.cache),
        torch.where(first_B, first.real_q_B, second.real_q_B),
        faults=first.faults | second.faults,
    )


def _one_cache(one: DraftCache | None, other: DraftCache | None) -> DraftCache | None:
    if one is not None and other is not None and one is not other:
        raise IntegrityError("two drafters keep q apart; `Autoregressive.shared_cache` is for both")
    return one or other
