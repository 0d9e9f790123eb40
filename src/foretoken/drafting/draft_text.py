"""A draft model with a completely different tokenizer: it continues the text.

The draft's tokenizer encodes the text so far, the draft model continues it with its likeliest
tokens, and the target's tokenizer encodes their text as drafts. There is no q: drafts are verified
as one-hot. Drafts by ids (`vocabulary.py`) do have a q, so they are better where tokens are drawn
at random and the tokenizers share nine tenths of the text.

Positions differ from the target's, so K/V cannot use the target's blocks: each slot has blocks of
its own, for the draft model's longest context. K/V stay valid as long as the tokens do; the last
tokens of a text may change as it grows.

Drafts depend only on the request's tokens: texts are cut at fixed multiples of tokens, wherever
rounds end.
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
from foretoken.drafting.vocabulary import PARTIAL, DraftNetwork, find_draft, load_weights
from foretoken.errors import ConfigError
from foretoken.models.tokenizer import decode_after, encode_after
from foretoken.ops import DraftBlock
from foretoken.ops.steps import DraftRequests
from foretoken.slots.plan import StepPlan
from foretoken.slots.table import SlotSizes, SlotTable

_PIECE = 32  # target tokens that are encoded together, once as many have followed them
_MOST = 4  # at most so many tokens of the draft model for each draft asked for
_BYTES = 4  # the most bytes of a character


@dataclass(slots=True)
class Transcript:
    """A request's text in tokens of the draft's tokenizer.

    Attributes:
        ids: as of the latest `read`. The first `num_settled` of them are final; they encode the
            first `num_read` tokens of the target.
    """

    target: Any
    draft: Any
    ids: list[int] = field(default_factory=list)
    num_settled: int = 0
    num_read: int = 0

    def read(self, known: list[int]) -> int | None:
        """Encode all known tokens; return how many leading ids are unchanged, or None if the last
        character is incomplete."""
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
        return not last.endswith(PARTIAL)

    def _cut(self, settled: Sequence[int], known: list[int], end: int) -> list[int]:
        text = decode_after(self.target, known[: self.num_read], known[self.num_read : end])
        return encode_after(self.draft, settled, text)

    def drafts(self, known: Sequence[int], continuation: Sequence[int]) -> list[int]:
        """A continuation as target tokens; without the last one, which may be incomplete, unless
        the text ends there."""
        end = self.draft.eos_token_id
        said = [*takewhile(lambda token: token != end, continuation)]
        text = decode_after(self.draft, self.ids, said).partition(PARTIAL)[0]
        tokens = encode_after(self.target, known, text)
        if len(said) == len(continuation) or self.target.eos_token_id is None:
            return tokens[:-1]
        return [*tokens, self.target.eos_token_id]


class DraftText(Drafter):
    """Drafts the text of a draft model with another tokenizer."""

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
        """Make a slot table of the draft model's own tokens, with blocks that no slots share."""
        self.slots, count, total = slots, self._num_blocks, slots.num_slots * self._num_blocks
        sizes = SlotSizes(slots.num_slots, self._max_tokens, self._max_drafts, count, total)
        own = SlotTable(sizes, slots.device, self._model.backend.steps, on_host=True)
        own.admitted = slots.admitted
        ranges = ((s, 0, range(s * count, (s + 1) * count)) for s in range(slots.num_slots))
        own.apply(StepPlan(new_blocks=[*ranges]))
        self._own = own
        self._model.allocate(own, total + 1)
        self._transcripts: dict[int, Transcript] = {}

    def propose(self, requests: DraftRequests) -> DraftBlock:
        """One-hot drafts; none while a character is incomplete. See `Drafter.propose`."""
        pairs = list(zip(requests.slot_B.tolist(), requests.num_B.tolist(), strict=True))
        wanted = {slot: self._read(slot, num) for slot, num in pairs if num}
        wanted = {slot: num for slot, num in wanted.items() if num}
        drafts: dict[int, list[int]] = {}
        if wanted:
            numbers = [[*wanted], [*wanted.values()], [self._own.length_S[s] for s in wanted]]
            slot_B, num_B, position_B = torch.from_numpy(np.array(numbers, dtype=np.int64))
            most = max(wanted.values())
            block = self._model.propose(
                requests._replace(slot_B=slot_B, num_B=num_B, position_B=position_B, most=most)
            )
            rows_B = zip(wanted, block.token_BK.tolist(), block.num_B.tolist(), strict=True)
            for slot, tokens, num in rows_B:
                known = self.slots.text(slot).tolist()
                drafts[slot] = self._transcripts[slot].drafts(known, tokens[:num])
        return one_hot_block([drafts.get(slot, [])[:num] for slot, num in pairs], self.slots.device)

    def _read(self, slot: int, num_drafts: int) -> int:
        """Give the draft model a request's text; return how many of its tokens may be needed for
        `num_drafts` target tokens, 0 if it cannot draft."""
        transcript = self._transcripts.setdefault(slot, Transcript(*self._tokenizers))
        known = self.slots.text(slot).tolist()
        same, ids = transcript.read(known), transcript.ids
        if same is None or not 0 < len(ids) <= self._max_tokens:
            return 0
        if not same:
            self._forget(slot)
        # Compute the last id again even if no id changed: drafts start from its row.
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
        """Slots with a text that it has read."""
        return self._transcripts
