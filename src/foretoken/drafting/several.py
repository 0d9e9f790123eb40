"""Several drafters loaded at once: each request has the one that it names, or `hybrid`.

A drafter made of drafters: it routes what it is given by slot, and merges what they return. What a
member keeps stays as right as if it were alone: one that runs in lock-step with the target observes
requests of the others, too, since its own requests find the blocks that those have filled.

`hybrid` is a choice among them for each request and round: drafts that are looked up, where they
are worth it (`choice.py`), else those of the first drafter that runs a model.

On a host each member is asked for its own requests. On a device that nobody waits for all members
that the step's requests may have take part, each with as many rows as there are requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.config import HYBRID, EngineConfig, SpeculativeConfig, of_drafter
from foretoken.drafting.autoregressive import Autoregressive
from foretoken.drafting.base import Drafter, DrafterSetup, no_drafts
from foretoken.drafting.choice import Choice, Found, follow
from foretoken.drafting.registry import find_drafter
from foretoken.errors import ConfigError, IntegrityError
from foretoken.models import TargetView
from foretoken.ops import DraftBlock, DraftCache
from foretoken.ops.steps import DraftRequests, ForwardBatch
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.step import StepRequests, StepResult
from foretoken.slots.table import SlotTable


class Part(NamedTuple):
    """Some requests of a batch, and the rows of a block that hold their drafts."""

    at: list[int]
    block: DraftBlock
    rows: list[int]


class Several(Drafter):
    """The drafters of `SpeculativeConfig.drafters`, by number in its order."""

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """What all of them want; `ConfigError` if two want different hidden states."""
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
        models = [i for i, member in enumerate(members) if not member.looks_up]
        self._order = [i for i in range(len(members)) if i not in models] + models
        self._model = models[0] if models else None  # that of `hybrid`
        self._of_hybrid = frozenset(i for i in self._order if i not in models[1:])
        has_hybrid = setup.on_host and len(models) < len(members) and len(members) > 1
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

    def allocate(self, slots: SlotTable | DeviceSlotTable, num_blocks: int) -> None:
        """What each allocates, the q of drafts once for all."""
        self.slots, shared = slots, None
        self._choice = Choice()
        self._maker: dict[int, int] = {}  # by slot: who made the drafts of its latest round
        self._proposed_at = 0.0
        for member in self.members:  # no cache of before is kept while another is made
            if isinstance(member, Autoregressive):
                member.cache = member.shared_cache = None
        for member in self.members:
            if isinstance(member, Autoregressive):
                member.shared_cache = shared
            member.allocate(slots, num_blocks)
            if isinstance(member, Autoregressive):
                shared = shared or member.cache

    def propose(self, rows: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`."""
        if isinstance(self.slots, DeviceSlotTable):
            return self._propose_for_all(rows, self.slots)
        block = self._propose_to_each(rows, self.slots)
        self._proposed_at = time.perf_counter()
        return block

    def _propose_for_all(self, rows: DraftRequests, slots: DeviceSlotTable) -> DraftBlock:
        """Each member for all requests; the spare stands in the place of those of others."""
        numbers = sorted(slots.drafters)
        if len(numbers) == 1:
            return self.members[numbers[0]].propose(rows)
        drafter_B, merged = slots.drafter_S[rows.slot_B], None
        for number in numbers:
            mine_B = drafter_B == number
            own = rows._replace(
                slot_B=torch.where(mine_B, rows.slot_B, slots.spare),
                num_B=torch.where(mine_B, rows.num_B, 0),
                position_B=torch.where(mine_B, rows.position_B, 1),
            )
            block = self.members[number].propose(own)
            merged = block if merged is None else _where(mine_B, block, merged)
        return merged or no_drafts(len(rows.slot_B), slots.device)

    def _propose_to_each(self, rows: DraftRequests, slots: SlotTable) -> DraftBlock:
        """Each member for its own requests, and for those under `hybrid` that come to it."""
        hybrid, slot_B, asked_B = len(self.members), rows.slot_B.tolist(), rows.num_B.tolist()
        drafter_B = [slots.requests[slot].drafter for slot in slot_B]
        open_B = [b for b, number in enumerate(drafter_B) if number == hybrid and asked_B[b]]
        parts: list[Part] = []
        source_B = [0] * len(slot_B)
        for number in self._order:
            member = self.members[number]
            of_hybrid = open_B if number in self._of_hybrid else []
            own = [b for b, chosen in enumerate(drafter_B) if chosen == number]
            index = own + of_hybrid
            if not index:
                continue
            asked, kept = _at(rows, index), list(range(len(index)))
            with self._choice.timing(number, len(index)):
                block = member.propose(asked)
            if member.looks_up:
                wanted = [(slot_B[b], asked_B[b]) for b in index]
                taken = self._taken(number, block, wanted, len(own))
                open_B = [b for b, has in zip(index, taken, strict=True) if not has]
                kept = [i for i, has in enumerate(taken) if has]
            else:
                for b in of_hybrid:
                    slot, num = slot_B[b], asked_B[b]
                    self._choice.leave_to_model(slot, slots.requests[slot], number, num)
            for i in kept:
                source_B[index[i]] = number
            if kept:
                parts.append(Part([index[i] for i in kept], block, kept))
        self._maker.update(zip(slot_B, source_B, strict=True))
        # By way of numpy: torch.tensor takes 15 us in the midst of a step, this 3.
        return _joined(parts, torch.from_numpy(np.array(source_B, dtype=np.int64)))

    def _taken(
        self, number: int, block: DraftBlock, wanted: list[tuple[int, int]], first: int
    ) -> list[bool]:
        """Which requests have the drafts that were found for them; from `first` on by choice.

        wanted: slot of each, and the drafts asked for.
        """
        num_B, token_BK = block.num_B.tolist(), block.token_BK.tolist()
        expected_B = num_B if block.expected_B is None else block.expected_B.tolist()
        taken = [True] * first
        for i, (slot, asked) in enumerate(wanted[first:], first):
            has = num_B[i] > 0
            if has and self._model is not None:
                found = Found(number, token_BK[i][: num_B[i]], expected_B[i])
                request = self.slots.requests[slot]
                has = self._choice.takes(slot, request, found, (self._model, asked))
            taken.append(has)
        return taken

    def observes(self, rows: StepRequests) -> bool:
        """On a host always: decisions teach the choice."""
        return self.slots.on_host or any(True for _ in self._observers(rows))

    def observe(self, rows: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """See `Drafter.observe`; each member sees as its own what became of its own drafts."""
        if self.slots.on_host:
            if self._proposed_at and rows.of_B is None:
                seconds = (time.perf_counter() - self._proposed_at) / len(rows.step.slot_B)
                self._choice.pass_seconds = follow(self._choice.pass_seconds, seconds)
            self._proposed_at = 0.0
            for slot, outcome in result.decisions.items():
                self._choice.learn(slot, outcome)
        for number, seen in self._observers(rows):
            self.members[number].observe(seen, batch, self._own_part(number, result))

    def _observers(self, rows: StepRequests) -> Iterator[tuple[int, StepRequests]]:
        """Members that have something to observe.

        One that no request of now has is told all the same: what it keeps for cache blocks must be
        there when others find these. Where blocks are not shared, it is left out.
        """
        present = self.slots.drafters
        if len(self.members) in present:
            present |= self._of_hybrid
        for number, member in enumerate(self.members):
            seen = rows._replace(others=bool(present - {number}))
            if (number in present or self._shares_blocks) and member.observes(seen):
                yield number, seen

    def _own_part(self, number: int, result: StepResult) -> StepResult:
        """The result without the drafts of other members, as far as the host knows it."""
        if not self.slots.on_host or all(
            self._maker.get(slot, number) == number for slot in result.slot_D
        ):
            return result
        own = replace(result)
        own.decisions = {
            slot: outcome if self._maker.get(slot) == number else outcome._replace(num_drafts=0)
            for slot, outcome in result.decisions.items()
        }
        return own

    def clear(self, block_ids: Sequence[int]) -> None:
        """See `Drafter.clear`."""
        for member in self.members:
            member.clear(block_ids)

    def release(self, slot: int) -> None:
        """See `Drafter.release`."""
        for member in self.members:
            member.release(slot)
        self._maker.pop(slot, None)
        self._choice.forget(slot)

    def held_slots(self) -> Iterable[int]:
        """See `Drafter.held_slots`."""
        held = {*self._maker, *self._choice.held_slots()}
        return held.union(*(member.held_slots() for member in self.members))


def _configs(config: EngineConfig) -> list[EngineConfig]:
    """The engine's options as each of its drafters sees them."""
    members = _speculation(config).members.values()
    return [replace(config, speculative_config=member) for member in members]


def _speculation(config: EngineConfig) -> SpeculativeConfig:
    if config.speculative_config is None:
        raise IntegrityError("drafters were asked for without `speculative_config`")
    return config.speculative_config


def _check_default(setup: DrafterSetup, names: tuple[str, ...]) -> None:
    """Raise `ConfigError` for `hybrid` where there is none."""
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
    """Members that keep q, all in one cache, since a slot has one drafter in a round."""
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


def _at(rows: DraftRequests, index: list[int]) -> DraftRequests:
    """Some of the requests, in this order."""
    if index == list(range(len(rows.slot_B))):
        return rows
    at = torch.from_numpy(np.array(index, dtype=np.int64))
    slot_B, num_B, position_B = (column[at] for column in rows[:3])
    return DraftRequests(slot_B, num_B, position_B, int(num_B.max()), rows.warm)


def _joined(parts: Sequence[Part], source_B: Tensor) -> DraftBlock:
    """The drafts of all requests, each of which is in one part at most."""
    size = len(source_B)
    if len(parts) == 1 and parts[0].at == parts[0].rows == list(range(size)):
        block = parts[0].block
        return DraftBlock(block.token_BK, block.num_B, block.cache, block.real_q_B, source_B)
    most = max((part.block.token_BK.shape[1] for part in parts), default=0)
    token_BK, cache = torch.full((size, most), -1), None
    num_B, real_q_B = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
    for at, block, rows in parts:
        token_BK[at, : block.token_BK.shape[1]] = block.token_BK[rows].long()
        num_B[at], real_q_B[at] = block.num_B[rows], block.real_q_B[rows]
        cache = _one_cache(cache, block.cache)
    return DraftBlock(token_BK, num_B, cache, real_q_B, source_B)


def _where(first_B: Tensor, first: DraftBlock, second: DraftBlock) -> DraftBlock:
    """For each request one of two blocks."""
    return DraftBlock(
        torch.where(first_B[:, None], first.token_BK, second.token_BK),
        torch.where(first_B, first.num_B, second.num_B),
        _one_cache(first.cache, second.cache),
        torch.where(first_B, first.real_q_B, second.real_q_B),
    )


def _one_cache(one: DraftCache | None, other: DraftCache | None) -> DraftCache | None:
    if one is not None and other is not None and one is not other:
        raise IntegrityError("two drafters keep q apart; `Autoregressive.shared_cache` is for both")
    return one or other
