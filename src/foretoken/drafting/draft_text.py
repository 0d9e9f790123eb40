"""A draft model whose tokenizer is wholly another: it continues the text.

What the target has said is cut anew by the draft's tokenizer; the draft model continues it by its
likeliest tokens, and what these say is cut into tokens of the target. No q: they are verified as
one-hot. Drafts by ids (`vocabulary.py`) have one, so they are better where tokens are drawn at
random and the tokenizers share nine tenths of the text.

Its positions are not the target's, so its K/V cannot lie in the target's blocks: each slot has rows
of its own, as long as the draft model's context. What was computed stays as far as the tokens do;
those at the end of a text may become others as it grows.

Drafts are a function of the request's tokens alone: texts are cut at fixed multiples of tokens,
wherever rounds end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from foretoken.drafting.base import Drafter, DrafterSetup, one_hot_block
from foretoken.drafting.stacks import DraftModel
from foretoken.drafting.vocabulary import DraftNetwork, find_draft, load_weights
from foretoken.errors import ConfigError
from foretoken.models.tokenizer import decode_after, encode_after
from foretoken.ops import DraftBlock
from foretoken.ops.steps import DraftRequests
from foretoken.slots.step import StepPlan
from foretoken.slots.table import SlotSizes, SlotTable

_PIECE = 32  # tokens of the target that are cut together, once as many have followed
_MOST = 4  # tokens of the draft model for each draft that is asked for, at most
_BYTES = 4  # of a character, at most
_PARTIAL = "\ufffd"  # what bytes decode to that are no whole character


@dataclass(slots=True)
class Transcript:
    """A request's tokens by the draft's tokenizer.

    Attributes:
        ids: as of the latest `read`; the first `num_settled` stay, `num_read` tokens of the target.
    """

    target: Any
    draft: Any
    ids: list[int] = field(default_factory=list)
    num_settled: int = 0
    num_read: int = 0

    def read(self, known: list[int]) -> int | None:
        """Take in all known tokens; how many ids are as before. None: a character is incomplete."""
        before = self.ids
        settled = before[: self.num_settled]
        while len(known) >= self.num_read + 2 * _PIECE:
            ends = range(self.num_read + _PIECE, self.num_read + _PIECE + _BYTES)
            end = next((end for end in ends if self._is_whole(known[:end])), ends[0])
            settled += self._cut(settled, known, end)
            self.num_settled, self.num_read = len(settled), end
        if not self._is_whole(known):
            self.ids = settled
            return None
        self.ids = settled + self._cut(settled, known, len(known))
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, self.ids, strict=False))
        return sum(1 for _ in same)

    def _is_whole(self, known: list[int]) -> bool:
        last = decode_after(self.target, known[:-_BYTES], known[-_BYTES:])
        return not last.endswith(_PARTIAL)

    def _cut(self, settled: Sequence[int], known: list[int], end: int) -> list[int]:
        text = decode_after(self.target, known[: self.num_read], known[self.num_read : end])
        return encode_after(self.draft, settled, text)

    def drafts(self, known: Sequence[int], continuation: Sequence[int]) -> list[int]:
        """Tokens of the target in a continuation; without the last, which may go on, unless the
        text ends there."""
        end = self.draft.eos_token_id
        said = [*takewhile(lambda token: token != end, continuation)]
        text = decode_after(self.draft, self.ids, said).partition(_PARTIAL)[0]
        tokens = encode_after(self.target, known, text)
        if len(said) == len(continuation) or self.target.eos_token_id is None:
            return tokens[:-1]
        return [*tokens, self.target.eos_token_id]


class DraftText(Drafter):
    """Drafts what a draft model's text says."""

    options = frozenset({"model", "revision"})

    def __init__(self, setup: DrafterSetup) -> None:
        name, folder, tokenizer = find_draft(setup)
        if tokenizer is None or setup.tokenizer is None:
            bound, remedy = "a model with a tokenizer, as the target", "Choose another, or `ngram`."
            raise ConfigError("speculative_config.model", name, bound, remedy)
        self._tokenizers = setup.tokenizer, tokenizer
        model, size = load_weights(setup, folder), setup.block_size
        most = _MOST * setup.speculation.num_drafts
        greedy = replace(setup.speculation, method="draft_model", draft_sample_method="greedy")
        self._model = DraftModel(replace(setup, speculation=greedy), DraftNetwork(model, None))
        self._model.follows_grammars = False
        self._max_tokens, self._max_drafts = model.max_model_len, most
        self._num_blocks = -(-(model.max_model_len + most) // size)
        tokens = SlotTable.bytes_per_slot(model.max_model_len + most, size)
        self.bytes_per_slot = self._num_blocks * self._model.kv_bytes_per_block + tokens

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """A table of the draft model's own tokens, and blocks that no slots share."""
        self.slots, count, total = slots, self._num_blocks, slots.num_slots * self._num_blocks
        sizes = SlotSizes(slots.num_slots, self._max_tokens, self._max_drafts, count, total)
        own = SlotTable(sizes, slots.device, self._model.backend.steps, on_host=True)
        own.admitted = slots.admitted
        ranges = ((s, 0, range(s * count, (s + 1) * count)) for s in range(slots.num_slots))
        own.apply(StepPlan(new_blocks=[*ranges]))
        self._own = own
        self._model.allocate(own, total + 1)
        self._transcripts: dict[int, Transcript] = {}

    def propose(self, asked: DraftRequests) -> DraftBlock:
        """One-hot drafts; none while a character is incomplete. See `Drafter.propose`."""
        pairs = list(zip(asked.slot_B.tolist(), asked.num_B.tolist(), strict=True))
        wanted = {slot: self._read(slot, num) for slot, num in pairs if num}
        wanted = {slot: num for slot, num in wanted.items() if num}
        drafts: dict[int, list[int]] = {}
        if wanted:
            numbers = [[*wanted], [*wanted.values()], [self._own.length_S[s] for s in wanted]]
            slot_B, num_B, position_B = torch.from_numpy(np.array(numbers, dtype=np.int64))
            most = max(wanted.values())
            block = self._model.propose(
                asked._replace(slot_B=slot_B, num_B=num_B, position_B=position_B, most=most)
            )
            rows_B = zip(wanted, block.token_BK.tolist(), block.num_B.tolist(), strict=True)
            for slot, tokens, num in rows_B:
                known = self.slots.text(slot).tolist()
                drafts[slot] = self._transcripts[slot].drafts(known, tokens[:num])
        return one_hot_block([drafts.get(slot, [])[:num] for slot, num in pairs], self.slots.device)

    def _read(self, slot: int, num_drafts: int) -> int:
        """Let the draft model have a request's text; how many of its tokens may say that much."""
        transcript = self._transcripts.setdefault(slot, Transcript(*self._tokenizers))
        known = self.slots.text(slot).tolist()
        same, ids = transcript.read(known), transcript.ids
        if same is None or not 0 < len(ids) <= self._max_tokens:
            return 0
        if not same:
            self._forget(slot)
        # The last one again, if the target's tokens said nothing: drafts go on from its row.
        self._model.take_back(slot, min(same, len(ids) - 1))
        own = self._own
        own.token_SL[slot, : len(ids)], own.length_S[slot] = ids, len(ids)
        return min(-(-num_drafts * len(ids) // len(known)) + 1, _MOST * num_drafts)

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        if self._transcripts.pop(slot, None):
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        first = slot * self._num_blocks
        self._model.clear(range(first, first + self._num_blocks))
        self._model.release(slot)

    def held_slots(self) -> Iterable[int]:
        """Slots whose text it has read."""
        return self._transcripts
