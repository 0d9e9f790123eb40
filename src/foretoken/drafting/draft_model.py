"""A small language model drafts for a large one; see `vocabulary.py` if its tokens are others.

Its K/V cache is addressed by the target's block ids, so accepting, rejecting and freeing need no
bookkeeping here beyond one number per slot: how many leading tokens its cache holds. A prompt that
the target computes in chunks it follows chunk by chunk. After steps in which it was not asked
(K = 0), the next proposal first catches up on what it missed.

The target's blocks are shared between requests that begin with the same tokens, and the draft's
half of such a block may or may not be there: whoever filled the target's half may never have been
drafted for. So each block has a mark, `complete`: every one of its positions was computed here from
a known token. A request that is new to its slot starts behind its leading complete blocks. That is
right because
- a block is in two requests' tables only if all their tokens up to its end are equal, and K/V at a
  position are a function of the tokens up to it: who computed them does not matter;
- drafts stand behind all known tokens, hence in no complete block: what a rejected draft leaves
  behind lies in a block that is not marked, and is computed again before it is;
- a block that is handed out anew passes through `clear`, which removes the mark.
Requests that share a block which is not complete each compute it; they write the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.cache.batch import gather_batch
from foretoken.drafting.autoregressive import Autoregressive
from foretoken.drafting.base import DrafterSetup, no_drafts
from foretoken.drafting.vocabulary import DraftNetwork, Match, match_tokenizers
from foretoken.errors import ConfigError
from foretoken.models import CausalLM, folder_of, load_model, load_tokenizer
from foretoken.ops import DRAFT, DraftBlock, DraftCache, DraftRound, Noise, RoundDecoder, Rows, Rule
from foretoken.ops.steps import DraftRequests, ForwardBatch, SlotSpan
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.step import StepInput, StepRequests, StepResult
from foretoken.slots.table import SlotTable

BUILT_IN_DRAFTS = {"tiny-python": "tiny-python-draft"}


class DraftModel(Autoregressive):
    """A draft model over slots on a host.

    Attributes:
        complete: by block, its mark.
    """

    slots: SlotTable

    def __init__(self, setup: DrafterSetup, network: DraftNetwork | None = None) -> None:
        self.network = network or load_draft(setup)
        self.model = self.network.model
        super().__init__(setup, self.model, setup.vocab_size)

    def allocate(self, slots: SlotTable | DeviceSlotTable, num_blocks: int) -> None:
        """See `Autoregressive`; and how far the cache reaches, by slot and by block."""
        super().allocate(slots, num_blocks)
        self._num_computed_S = [0] * slots.num_slots
        self.complete = bytearray(num_blocks)

    def propose(self, rows: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`. Drafts end where the draft model's context does."""
        slots, num_drafts = rows.slot_B.tolist(), rows.num_B.tolist()
        end = self.model.max_model_len + 1  # the last draft is drawn, not computed
        asked = zip(slots, num_drafts, strict=True)
        counts = [max(0, min(num, end - self.slots.length_S[slot])) for slot, num in asked]
        wanted = [(slot, count) for slot, count in zip(slots, counts, strict=True) if count]
        if not wanted:
            return no_drafts(len(slots), self.model.device)
        for slot, _ in wanted:
            self._skip_complete(slot)
        self._catch_up([slot for slot, _ in wanted])
        # None means argmax to a native round. Coupled requests draw, if without keeping q.
        warm = any(self.slots.requests[slot].params.temperature > 0 for slot, _ in wanted)
        cache = self.cache if warm else None
        masked = [self.has_grammar(slot) for slot, _ in wanted]
        if len(wanted) == len(slots) and not any(masked):
            token_BK = self._draft(wanted, cache, masked=False)
        else:  # apart: nobody's text may depend on what others ask for
            token_BK = torch.full((len(slots), max(counts)), -1)
            row_A = np.flatnonzero(counts)
            for is_masked in {*masked}:
                here = [a for a, one in enumerate(masked) if one == is_masked]
                drawn_BK = self._draft([wanted[a] for a in here], cache, masked=is_masked)
                token_BK[torch.from_numpy(row_A[here]), : drawn_BK.shape[1]] = drawn_BK
        for slot, _ in wanted:
            self._advance(slot, self.slots.length_S[slot])
        real = [
            cache is not None and count > 0 and self._keeps_q(slot)
            for slot, count in zip(slots, counts, strict=True)
        ]
        return DraftBlock(
            token_BK=token_BK,
            num_B=torch.from_numpy(np.array(counts, dtype=np.int64)),
            cache=cache if any(real) else None,
            real_q_B=torch.from_numpy(np.array(real, dtype=bool)),
        )

    def _draft(
        self, wanted: Sequence[tuple[int, int]], cache: DraftCache | None, *, masked: bool
    ) -> Tensor:
        """The drafts of some requests, all or none of them with a grammar."""
        fused = self.model.fused
        if isinstance(fused, RoundDecoder) and self.network.ids is None and not masked:
            return self._draft_at_once(fused, wanted, cache)
        return self._draft_by_passes(wanted, cache)

    def _keeps_q(self, slot: int) -> bool:
        """Whether verification will ask for the q of its drafts, if they are drawn from one."""
        request = self.slots.requests[slot]
        return request.params.temperature > 0 and request.rule is not Rule.COUPLED

    def _draft_at_once(
        self, decoder: RoundDecoder, wanted: Sequence[tuple[int, int]], cache: DraftCache | None
    ) -> Tensor:
        """All passes and draws in one native call; the drafts, -1 behind a request's last.

        With K = 5 the draft passes of the embedded pair took 3.7 to 4.6 ms a step through the
        modules, and the work beside them 1.5.
        """
        ahead = max(count for _, count in wanted) - 1
        first = self._gather([self._missing(slot) for slot, _ in wanted], ahead)
        slot_B, num_B = torch.from_numpy(np.array(wanted, dtype=np.int64).T.copy())
        fp64 = self.config.use_fp64_gumbel
        drafting = DraftRound(self.slots.params, slot_B, num_B, cache, fp64)
        return decoder.draft(first.token_T, self.kv.of(first.attention), drafting)

    def _draft_by_passes(
        self, wanted: Sequence[tuple[int, int]], cache: DraftCache | None
    ) -> Tensor:
        """One pass per draft index over the requests that still want one."""
        most = max(count for _, count in wanted)
        token_BK = np.full((len(wanted), most), -1, dtype=np.int64)
        for i in range(most):
            live = [row for row, (_, count) in enumerate(wanted) if count > i]
            slots = [wanted[row][0] for row in live]
            if i:
                self.slots.put_drafts(slots, token_BK[live, :i])
                spans = [SlotSpan(slot, self.slots.length_S[slot] + i - 1, 1, 1) for slot in slots]
            else:
                spans = [self._missing(slot) for slot in slots]
            logits_AV = self.network.forward(self._gather(spans), self.kv)
            logits_AV = self.mask(logits_AV, slots, token_BK[live, :i])
            if cache is None:
                token_A = logits_AV.argmax(dim=-1)
            else:
                token_A = self._draw(logits_AV, slots, i, cache)
            token_BK[live, i] = token_A.numpy()
        return torch.from_numpy(token_BK)

    def observe(self, rows: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Keep the K/V of accepted drafts; the last draft proposed was never computed."""
        for slot, outcome in result.decisions.items():
            if outcome.num_drafts:
                kept = min(outcome.num_accepted, outcome.num_drafts - 1)
                self._advance(slot, self._num_computed_S[slot] + kept)
        if not all(rows.step.decides_B):
            self._follow_prompts(rows.step)

    def _follow_prompts(self, step: StepInput) -> None:
        """Compute the chunks that the target has computed of prompts that go on.

        Otherwise the first round after a long prompt computes all of it, in one step that other
        requests wait for.
        """
        spans = []
        for slot, size, ends in zip(step.slot_B, step.num_tokens_B, step.decides_B, strict=True):
            if ends or self.slots.requests[slot].params.num_speculative_tokens == 0:
                continue
            self._skip_complete(slot)
            start = self._num_computed_S[slot]
            end = min(self.slots.computed_S[slot], self.model.max_model_len)
            if end > start:
                spans.append(SlotSpan(slot, start, min(end - start, size), 0))
        if spans:
            self.network.forward(self._gather(spans), self.kv)
        for span in spans:
            self._advance(span.slot, span.start + span.num_tokens)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Remove these blocks' marks; zero their K/V if the model multiplies masked keys."""
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)
        for block in block_ids:
            self.complete[block] = False

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._num_computed_S[slot] = 0

    def take_back(self, slot: int, length: int) -> None:
        """Of a slot that shares no block: its tokens behind the first `length` are others now."""
        self._num_computed_S[slot] = min(self._num_computed_S[slot], length)

    def held_slots(self) -> Iterable[int]:
        """Slots whose tokens it has computed."""
        return [slot for slot, count in enumerate(self._num_computed_S) if count]

    def _skip_complete(self, slot: int) -> None:
        """Start a request that is new to its slot behind the leading blocks that are complete."""
        if self._num_computed_S[slot]:
            return
        size, last = self.block_size, self.slots.length_S[slot] - 1
        for block in self.slots.block_SL[slot, : last // size].tolist():
            if not self.complete[block]:
                break
            self._num_computed_S[slot] += size

    def _advance(self, slot: int, num_computed: int) -> None:
        """Count a request's leading known tokens that were computed, and mark blocks they fill."""
        size, first = self.block_size, self._num_computed_S[slot]
        self._num_computed_S[slot] = num_computed
        for block in self.slots.block_SL[slot, first // size : num_computed // size]:
            self.complete[block] = True

    def _missing(self, slot: int) -> SlotSpan:
        """All known tokens that the cache lacks, and the logits of the last one."""
        start = self._num_computed_S[slot]
        return SlotSpan(slot, start, self.slots.length_S[slot] - start, 1)

    def _gather(self, spans: Sequence[SlotSpan], ahead: int = 0) -> ForwardBatch:
        return gather_batch(self.slots, spans, self.block_size, ahead=ahead)

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Compute missing tokens until those left fit one pass of the engine's token budget."""
        budget = self.config.max_num_batched_tokens
        share = max(budget // len(slots), 1)
        while True:
            spans, room = [], budget
            for slot in slots:
                start = self._num_computed_S[slot]
                size = min(self.slots.length_S[slot] - start - share, room)
                if size > 0:
                    spans.append(SlotSpan(slot, start, size, 0))
                    room -= size
            if not spans:
                return
            self.network.forward(self._gather(spans), self.kv)
            for span in spans:
                self._advance(span.slot, span.start + span.num_tokens)

    def _draw(self, logits_BV: Tensor, slots: Sequence[int], i: int, cache: DraftCache) -> Tensor:
        """Sample draft i of each request and keep the q it came from, by slot."""
        numbers = [slots, [self.slots.length_S[slot] + i for slot in slots], [i] * len(slots)]
        slot_B, position_B, index_B = torch.from_numpy(np.array(numbers, dtype=np.int64))
        return self.backend.draft(
            Rows(logits_BV, self.slots.params, slot_B),
            Noise(position_B, index_B, DRAFT, self.config.use_fp64_gumbel),
            cache if any(map(self._keeps_q, slots)) else None,
        )


def load_draft(setup: DrafterSetup) -> DraftNetwork:
    """Load the draft model.

    Raises:
        ConfigError: it shares too few tokens with the target; or it has another number of logits,
            and there are no two tokenizers to compare.
    """
    name, folder, tokenizer = find_draft(setup)
    match = Match(None, {})
    is_known = setup.tokenizer is not None and tokenizer is not None
    if is_known:
        match = match_tokenizers(name, setup.tokenizer, tokenizer)
    model = load_weights(setup, folder)
    if not is_known and model.vocab_size != setup.vocab_size:
        bound = "a model with the target's vocabulary, or with a tokenizer, as the target"
        remedy = (
            f"It has {model.vocab_size} logits where the target has {setup.vocab_size}; without "
            "tokenizers nothing says which tokens are the same. Choose another, or `ngram`."
        )
        raise ConfigError("speculative_config.model", name, bound, remedy)
    ids = match.ids(setup.vocab_size, model.vocab_size, setup.device)
    return DraftNetwork(model, ids)


def find_draft(setup: DrafterSetup) -> tuple[str, Path, Any]:
    """The draft model's name, its folder, and its tokenizer, if it has one."""
    config = setup.config
    name = setup.speculation.model or BUILT_IN_DRAFTS.get(config.model)
    if name is None:
        remedy = "Name a small checkpoint that shares the target's tokenizer, or use `ngram`."
        raise ConfigError("speculative_config.model", None, "a draft model", remedy)
    folder = folder_of(config, name, setup.speculation.revision)
    return name, folder, load_tokenizer(folder)


def load_weights(setup: DrafterSetup, folder: Path) -> CausalLM:
    """The draft model, of no longer a context than the target's."""
    config = setup.config
    return load_model(
        folder, device=setup.device, dtype=config.dtype, backend=setup.backend,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        max_model_len=setup.max_model_len, shorten=True,
    )  # fmt: skip
