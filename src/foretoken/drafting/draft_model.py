"""A small language model drafts for a large one; see `vocabulary.py` if its tokens are others.

Its K/V cache is addressed by the target's block ids, so accepting, rejecting and freeing need no
bookkeeping here beyond one number per slot: how many leading tokens its cache holds. A prompt that
the target computes in chunks it follows chunk by chunk. After steps in which it was not asked
(K = 0), the next proposal first catches up on what it missed.

The target's blocks are shared between requests that begin with the same tokens, and the draft's
half of such a block may or may not be there: whoever filled the target's half may never have been
drafted for. So each block has a mark, `complete`: every one of its positions was computed here from
a known token. A request that is new to its slot starts after its leading complete blocks. That is
right because
- a block is in two requests' tables only if all their tokens up to its end are equal, and K/V at a
  position are a function of the tokens up to it: who computed them does not matter;
- drafts stand after all known tokens, hence in no complete block: what a rejected draft leaves
  there lies in a block that is not marked, and is computed again before it is;
- a block that is handed out anew passes through `clear`, which removes the mark.
Requests that share a block which is not complete each compute it; they write the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.drafting.autoregressive import Autoregressive
from foretoken.drafting.base import DrafterSetup, no_drafts
from foretoken.drafting.vocabulary import DraftNetwork, Match, match_tokenizers
from foretoken.errors import ConfigError
from foretoken.models import CausalLM, folder_of, load_model, load_tokenizer
from foretoken.ops import (
    DRAFT,
    AttentionBatch,
    DraftBlock,
    DraftCache,
    DraftRound,
    Noise,
    RoundDecoder,
    Rows,
    Rule,
    SlotParams,
)
from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, StepTokens
from foretoken.slots.plan import StepInput
from foretoken.slots.step import StepRequests, StepResult
from foretoken.slots.table import Array, SlotTable

_ALL = 2**62  # a limit that no request reaches
BUILT_IN_DRAFTS = {"tiny-python": "tiny-python-draft"}


class DraftModel(Autoregressive):
    """A draft model on a host.

    Attributes:
        complete: by block, its mark.
    """

    def __init__(self, setup: DrafterSetup, network: DraftNetwork | None = None) -> None:
        self.network = network or load_draft(setup)
        self.model = self.network.model
        super().__init__(setup, self.model, setup.vocab_size)

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """See `Autoregressive`; and how far the cache reaches, by slot and by block."""
        super().allocate(slots, num_blocks)
        state = slots.state
        computed_S, all_S = torch.zeros_like(state.computed_S), torch.full_like(state.limit_S, _ALL)
        self._num_computed_S: Array = computed_S.numpy()
        own = state._replace(computed_S=computed_S, limit_S=all_S)
        self._steps = self.backend.steps(own)  # the same tokens, other K/V
        self.complete = bytearray(num_blocks)

    def propose(self, asked: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`. Drafts end where the draft model's context does."""
        slots, length_S = asked.slot_B.tolist(), self.slots.length_S
        end = self.model.max_model_len + 1  # the last draft is drawn, not computed
        pairs = zip(slots, asked.num_B.tolist(), strict=True)
        counts = [max(0, min(num, end - int(length_S[slot]))) for slot, num in pairs]
        wanted = [(slot, count) for slot, count in zip(slots, counts, strict=True) if count]
        if not wanted:
            return no_drafts(len(slots), self.model.device)
        for slot, _ in wanted:
            self._skip_complete(slot)
        self._catch_up([slot for slot, _ in wanted])
        # None means argmax to a native round. Coupled requests draw, if without keeping q.
        samples = self.slots.draws_at_random(slot for slot, _ in wanted)
        cache = self.cache if samples else None
        masked = [self.has_grammar(slot) for slot, _ in wanted]
        if len(wanted) == len(slots) and not any(masked):
            token_BK = self._draft(wanted, cache, asked.params, masked=False)
        else:  # apart: no request's text may depend on what others ask for
            token_BK = torch.full((len(slots), max(counts)), -1)
            row_A = np.flatnonzero(counts)
            for is_masked in {*masked}:
                here = [a for a, one in enumerate(masked) if one == is_masked]
                some = [wanted[a] for a in here]
                drawn_BK = self._draft(some, cache, asked.params, masked=is_masked)
                token_BK[torch.from_numpy(row_A[here]), : drawn_BK.shape[1]] = drawn_BK
        for slot, _ in wanted:
            self._advance(slot, length_S[slot])
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
        self,
        wanted: Sequence[tuple[int, int]],
        cache: DraftCache | None,
        params: SlotParams,
        *,
        masked: bool,
    ) -> Tensor:
        """The drafts of some requests, all or none of them with a grammar; -1 after the last.

        Where the model has a native round, all passes and draws are one call: with K = 5 the draft
        passes of the embedded pair took 3.7 to 4.6 ms a step through the modules, and the work
        between them 1.5.
        """
        slot_B, num_B = torch.from_numpy(np.array(wanted, dtype=np.int64).T.copy())
        length_B = torch.from_numpy(self.slots.length_S[slot_B.numpy()])
        missing_B = length_B - torch.from_numpy(self._num_computed_S[slot_B.numpy()])
        most = max(count for _, count in wanted)
        fused, fp64 = self.model.fused, self.config.use_fp64_gumbel
        if isinstance(fused, RoundDecoder) and self.network.ids is None and not masked:
            first = self._pack(slot_B, missing_B, ahead=most - 1)
            drafting = DraftRound(params, slot_B, num_B, cache, fp64)
            return fused.draft(first.token_T, self.kv.of(first.attention), drafting)
        batch = self._pack(slot_B, missing_B)
        token_BK = torch.full((len(wanted), most), -1)
        for i in range(most):
            live_A = (num_B > i).nonzero()[:, 0]
            slot_A, length_A = slot_B[live_A], length_B[live_A]
            if i:
                batch = self._pack_drafts(slot_A, length_A + i, token_BK[live_A, i - 1])
            logits_AV = self.network.forward(batch, self.kv)
            slots = slot_A.tolist()
            logits_AV = self.mask(logits_AV, slots, token_BK[live_A, :i].numpy())
            if cache is None:
                token_BK[live_A, i] = logits_AV.argmax(dim=-1)
                continue
            noise = Noise(length_A + i, torch.full_like(slot_A, i), DRAFT, fp64)
            kept = cache if any(map(self._keeps_q, slots)) else None
            rows = Rows(logits_AV, params, slot_A)
            token_BK[live_A, i] = self.backend.draft(rows, noise, kept)
        return token_BK

    def _keeps_q(self, slot: int) -> bool:
        """Whether verification will ask for the q of its drafts, if they are drawn from one."""
        request = self.slots.admitted[slot]
        return request.params.temperature > 0 and request.rule is not Rule.COUPLED

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Keep the K/V of accepted drafts; the last draft proposed was never computed."""
        for slot, outcome in result.decisions.items():
            if outcome.num_drafts:
                kept = min(outcome.num_accepted, outcome.num_drafts - 1)
                self._advance(slot, self._num_computed_S[slot] + kept)
        if not all(requests.step.decides_B):
            self._follow_prompts(requests.step)

    def _follow_prompts(self, step: StepInput) -> None:
        """Compute the chunks that the target has computed of prompts that go on.

        Otherwise the first round after a long prompt computes all of it, in one step that other
        requests wait for.
        """
        counts = {}
        for slot, size, ends in zip(step.slot_B, step.num_tokens_B, step.decides_B, strict=True):
            if ends or self.slots.admitted[slot].params.num_speculative_tokens == 0:
                continue
            self._skip_complete(slot)
            end = min(int(self.slots.computed_S[slot]), self.model.max_model_len)
            counts[slot] = min(end - int(self._num_computed_S[slot]), size)
        self._compute({slot: count for slot, count in counts.items() if count > 0})

    def clear(self, block_ids: Sequence[int]) -> None:
        """Remove these blocks' marks; zero their K/V if the model multiplies masked keys."""
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)
        for block in block_ids:
            self.complete[block] = False

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        super().release(slot)
        self._num_computed_S[slot] = 0

    def take_back(self, slot: int, length: int) -> None:
        """Of a slot that shares no block: its tokens after the first `length` are others now."""
        self._num_computed_S[slot] = min(self._num_computed_S[slot], length)

    def held_slots(self) -> Iterable[int]:
        """Slots whose tokens it has computed, or read."""
        return [*np.flatnonzero(self._num_computed_S).tolist(), *super().held_slots()]

    def _skip_complete(self, slot: int) -> None:
        """Start a request that is new to its slot after the leading blocks that are complete."""
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

    def _pack(
        self, slot_B: Tensor, count_B: Tensor, *, ahead: int = 0, wanted: bool = True
    ) -> ForwardBatch:
        """So many missing tokens of each request; with the logits of the last one, if wanted."""
        none_B = torch.zeros_like(count_B)
        tokens = StepTokens(slot_B, count_B, None, none_B)
        if not wanted:
            tokens = StepTokens(slot_B, count_B, none_B - 1, none_B[:0])
        total = int(count_B.sum())
        sizes = PackSizes(total, len(slot_B), total, ahead)
        return self._steps.pack(tokens, sizes, self.block_size)

    def _pack_drafts(self, slot_A: Tensor, length_A: Tensor, token_A: Tensor) -> ForwardBatch:
        """A draft of each request, which then has so many tokens in the cache."""
        index_A1, size = torch.arange(len(slot_A) + 1), self.block_size
        block_AL = self.slots.state.block_SL[slot_A, : -(-int(length_A.max()) // size)]
        attention = AttentionBatch(index_A1, length_A, block_AL, size, values_fit=True)
        return ForwardBatch(token_A, length_A - 1, index_A1[:-1], attention)

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Compute missing tokens until those left fit one pass of the engine's token budget."""
        budget = self.config.max_num_batched_tokens
        share, counts = max(budget // len(slots), 1), {0: 1}
        while counts:
            counts, room = {}, budget
            for slot in slots:
                missing = int(self.slots.length_S[slot] - self._num_computed_S[slot])
                if (size := min(missing - share, room)) > 0:
                    counts[slot] = size
                    room -= size
            self._compute(counts)

    def _compute(self, counts: Mapping[int, int]) -> None:
        """Compute so many tokens of each slot that the cache lacks."""
        if not counts:
            return
        numbers = np.array([[*counts], [*counts.values()]], dtype=np.int64)
        self.network.forward(self._pack(*torch.from_numpy(numbers), wanted=False), self.kv)
        for slot, count in counts.items():
            self._advance(slot, self._num_computed_S[slot] + count)


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
