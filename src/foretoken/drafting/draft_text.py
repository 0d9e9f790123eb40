"""A draft model with a completely different tokenizer: it continues the text.

The draft's tokenizer encodes the text, the draft model continues it with its likeliest tokens, and
the target's tokenizer encodes the continuation as drafts. There is no q: drafts are verified as
one-hot. `vocabulary.py`, which maps the draft model's logits to the target's ids, has a q. It is
better where tokens are drawn at random and the shared tokens cover nine tenths of the text.

The draft model's positions differ from the target's, so its K/V cannot use the target's blocks:
each slot has blocks of its own, enough for the draft model's longest context. K/V are valid as long
as the draft model's tokens do not change. Only the last tokens of a text may change as it grows.

Drafts depend only on the request's tokens, not on where rounds end, because texts are encoded in
pieces of a fixed number of tokens.
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
from foretoken.slots.step import StepPlan
from foretoken.slots.table import SlotSizes, SlotTable

_PIECE = 32  # target tokens per piece of text; a piece is final once 32 more tokens follow it
_TOKENS_PER_DRAFT = 4  # the most tokens that the draft model draws for each requested draft
_CHARACTER_BYTES = 4  # the most bytes of a character in UTF-8


@dataclass(slots=True)
class Transcript:
    """A request's text in tokens of the draft model's tokenizer.

    target, draft: the two tokenizers.
    ids: the draft tokenizer's ids as of the latest `read`.
    num_final: how many of the first `ids` do not change any more.
    num_read: how many of the first target tokens these final ids encode.
    """

    target: Any
    draft: Any
    ids: list[int] = field(default_factory=list)
    num_final: int = 0
    num_read: int = 0

    def read(self, known: list[int]) -> int | None:
        """Encode a request's known target tokens as `ids`. Returns how many of the first ids have
        not changed; None if the last character is incomplete: then `ids` has only final ids."""
        ids_before = self.ids
        final_ids = ids_before[: self.num_final]
        while len(known) >= self.num_read + 2 * _PIECE:
            ends = range(self.num_read + _PIECE, self.num_read + _PIECE + _CHARACTER_BYTES)
            end = next((end for end in ends if self._is_whole(known[:end])), ends[0])
            final_ids += self._encode(final_ids, known, end)
            self.num_final, self.num_read = len(final_ids), end
        if not self._is_whole(known):
            self.ids = final_ids
            return None
        self.ids = final_ids + self._encode(final_ids, known, len(known))
        pairs = zip(ids_before, self.ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _is_whole(self, known: list[int]) -> bool:
        """Whether the last character of these target tokens is complete."""
        before, last_tokens = known[:-_CHARACTER_BYTES], known[-_CHARACTER_BYTES:]
        last = decode_after(self.target, before, last_tokens)
        return not last.endswith(PARTIAL)

    def _encode(self, before: Sequence[int], known: list[int], end: int) -> list[int]:
        """Draft ids for the text of target tokens `num_read` to `end`, after the ids `before`."""
        text = decode_after(self.target, known[: self.num_read], known[self.num_read : end])
        return encode_after(self.draft, before, text)

    def drafts(self, known: Sequence[int], continuation: Sequence[int]) -> list[int]:
        """The draft model's continuation as target tokens. If the continuation ends the text,
        the target's end-of-text token follows; otherwise, or if the target has no such token, the
        last token is left out, because it may be incomplete."""
        end = self.draft.eos_token_id
        before_end = [*takewhile(lambda token: token != end, continuation)]
        text = decode_after(self.draft, self.ids, before_end).partition(PARTIAL)[0]
        tokens = encode_after(self.target, known, text)
        if len(before_end) == len(continuation) or self.target.eos_token_id is None:
            return tokens[:-1]
        return [*tokens, self.target.eos_token_id]


class DraftText(Drafter):
    """Drafts the text of a draft model with another tokenizer."""

    options = frozenset({"model", "revision"})

    def __init__(self, setup: DrafterSetup) -> None:
        name, folder, tokenizer = find_draft(setup)
        if tokenizer is None or setup.tokenizer is None:
            bound, remedy = "a model with a tokenizer, for a target with one", "Or use `ngram`."
            raise ConfigError("speculative_config.model", name, bound, remedy)
        self._tokenizers = setup.tokenizer, tokenizer
        model, size = load_weights(setup, folder), setup.block_size
        max_drawn = _TOKENS_PER_DRAFT * setup.speculation.num_drafts  # tokens of one round
        greedy = replace(setup.speculation, method="draft_model", draft_sample_method="greedy")
        self._model = DraftModel(replace(setup, speculation=greedy), DraftNetwork(model, None))
        self._model.follows_grammars = False
        self._max_tokens, self._max_drafts = model.max_model_len, max_drawn
        self._num_blocks = -(-(model.max_model_len + max_drawn) // size)  # per slot
        table_bytes = SlotTable.bytes_per_slot(model.max_model_len + max_drawn, size)
        self.bytes_per_slot = self._num_blocks * self._model.kv_bytes_per_block + table_bytes

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Make a second slot table, for the draft model's tokens, with blocks for each slot."""
        self.slots, count, total = slots, self._num_blocks, slots.num_slots * self._num_blocks
        sizes = SlotSizes(slots.num_slots, self._max_tokens, self._max_drafts, count, total)
        self._draft_slots = SlotTable(sizes, slots.device, self._model.backend.steps, on_host=True)
        self._draft_slots.admitted = slots.admitted
        ranges = ((s, 0, range(s * count, (s + 1) * count)) for s in range(slots.num_slots))
        self._draft_slots.apply(StepPlan(new_blocks=[*ranges]))
        self._model.allocate(self._draft_slots, total + 1)
        self._transcripts: dict[int, Transcript] = {}

    def propose(self, requests: DraftRequests) -> DraftBlock:
        pairs = list(zip(requests.slot_B.tolist(), requests.num_B.tolist(), strict=True))
        num_tokens = {slot: self._read(slot, num) for slot, num in pairs if num}
        num_tokens = {slot: count for slot, count in num_tokens.items() if count}
        drafts: dict[int, list[int]] = {}
        if num_tokens:
            lengths = [self._draft_slots.length_S[slot] for slot in num_tokens]
            columns = np.array([[*num_tokens], [*num_tokens.values()], lengths], dtype=np.int64)
            slot_A, num_A, position_A = torch.from_numpy(columns)
            most = max(num_tokens.values())
            block = self._model.propose(
                requests._replace(slot_B=slot_A, num_B=num_A, position_B=position_A, most=most)
            )
            rows = zip(num_tokens, block.token_BK.tolist(), block.num_B.tolist(), strict=True)
            for slot, tokens, count in rows:
                known = self.slots.text(slot).tolist()
                drafts[slot] = self._transcripts[slot].drafts(known, tokens[:count])
        return one_hot_block([drafts.get(slot, [])[:num] for slot, num in pairs], self.slots.device)

    def _read(self, slot: int, num_drafts: int) -> int:
        """Write a request's text into the draft model's slot. Returns how many tokens of the draft
        model may be needed for `num_drafts` target tokens; 0 if the text has no tokens or too many
        for the draft model's context, or ends within a character."""
        transcript = self._transcripts.setdefault(slot, Transcript(*self._tokenizers))
        known = self.slots.text(slot).tolist()
        num_same, ids = transcript.read(known), transcript.ids
        if num_same is None or not 0 < len(ids) <= self._max_tokens:
            return 0
        if not num_same:
            self._forget(slot)
        # Compute the last id again even if no id changed: drafts start from the last id's row.
        self._model.limit_computed(slot, min(num_same, len(ids) - 1))
        table = self._draft_slots
        table.token_SL[slot, : len(ids)], table.length_S[slot] = ids, len(ids)
        return min(-(-num_drafts * len(ids) // len(known)) + 1, _TOKENS_PER_DRAFT * num_drafts)

    def release(self, slot: int) -> None:
        if self._transcripts.pop(slot, None):
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        first = slot * self._num_blocks
        self._model.clear(range(first, first + self._num_blocks))
        self._model.release(slot)

    def held_slots(self) -> Iterable[int]:
        return self._transcripts
