"""Drafters that run a stack: a small language model, or an EAGLE-3 head on the target's states.

Their K/V use the target's block ids, so that accepting, rejecting and freeing need little code
here. The q of their drafts is kept by slot. A round of drafting is one native call if the backend
has such a call, else one pass per draft. All requests take part in every pass. A request that needs
no more drafts writes K/V that count as a rejected draft's: they are overwritten before they are
read. Past the end of its own blocks, the round's block table names the spare slot's block.

Blocks are shared between requests that begin with the same tokens. Each block has a half for the
target's K/V and one for the drafter's. The drafter's half may be missing, because the request that
filled the target's half may never have had drafts.

- `DraftModel` (on a host) counts for each slot how many leading tokens its cache holds. It catches
  up on the tokens of steps in which it made no drafts. A block is marked `complete` once all of its
  positions were computed here from known tokens. A request that is new to its slot starts after its
  leading complete blocks. This is correct for three reasons. Two tables share a block only if all
  tokens up to its end are equal, so it does not matter which request computed it. Drafts come after
  all known tokens, so no complete block contains a draft. Reused blocks pass through `clear`, which
  removes the mark. Requests that share an incomplete block each compute it, with equal values.
- `LockstepDraftModel` (on a device, where the host does not know how far the cache reaches)
  computes in every step what the target computes. After a step only the last of these tokens may be
  missing: if all drafts of a round are accepted, the last draft was drawn but not computed. The
  next step computes it. Other requests find a block once the target has computed two tokens past
  its end (`num_behind`), because two tokens of an ended request may be missing. If it reaches its
  limit in a step that only decodes, it takes no part in that step's draft pass, so the step's token
  is missing. The last draft of the round before may be missing, too.
- `Eagle3` runs over exactly the rows that the target has computed, each with the token after it. It
  does so also in steps without drafts, so it never has to catch up.

Shape suffixes: B requests, K drafts, S slots, L tokens or blocks of a slot, T packed rows, V the
target's vocabulary, C a head's hidden size, N rows with logits; A, G some of the requests, W words.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.config import EngineConfig
from foretoken.drafting.base import Drafter, DrafterSetup, draft_by_kind, no_drafts, q_flags
from foretoken.drafting.vocabulary import DraftNetwork, load_draft
from foretoken.errors import ConfigError, IntegrityError, RequestError
from foretoken.models import CausalLM, TargetView, folder_of
from foretoken.models.causal_lm import ModuleNetwork
from foretoken.models.checkpoint import parse_config, quiet_transformers, read_config
from foretoken.models.eagle3 import lacks_head, load_head
from foretoken.models.eagle3_config import default_aux_layers, read_eagle3_config
from foretoken.ops.stack import Features, Outcome
from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, Round, StepTokens
from foretoken.sampling.grammar import Matcher, fill_ahead
from foretoken.slots.step import StepInput, StepRequests, StepResult
from foretoken.slots.table import Array, SlotTable

from foretoken.ops import (  # isort: skip
    DRAFT, AttentionBatch, DraftBlock, DraftCache, DraftRound, ForwardOutput, LoadedStack, Noise,
    RoundStack, Rows, Rule, Stack,
)  # fmt: skip

BUILT_IN_HEADS = {"tiny-python": "tiny-python-eagle3", "smollm2-135m": "smollm2-135m-eagle3"}
_NO_LIMIT = 2**62  # more tokens than any request has
_NUM_KNOWN = 2  # known tokens of a request that the first pass of a lock-step round computes


class Autoregressive(Drafter):
    """Memory and passes of drafters that run a stack; a subclass adds the round and its pass.

    A drafter is `probabilistic` (q is kept for verification) or `greedy` (q is one-hot).

    Attributes:
        cache_shape: K, V and dtype of the q that is kept for each slot; K = 0: no q is kept.
        follows_grammars: whether the drafter uses the target's token ids, which a grammar's masks
            are made for.
        shared_cache: a `DraftCache` shared with other drafters; None: `allocate` makes a new one.
    """

    options = frozenset({"model", "revision", "draft_sample_method"})
    follows_grammars = True
    shared_cache: DraftCache | None = None
    _pass_offset: ClassVar[int] = 0  # the pass for draft i uses row i - _pass_offset of `Round`

    def __init__(
        self, setup: DrafterSetup, sizes: CausalLM | Stack, stack: LoadedStack | ModuleNetwork
    ) -> None:
        """Compute memory sizes. `sizes` states the shapes of the K/V that `stack` keeps."""
        self.config, self.backend, self.block_size = setup.config, setup.backend, setup.block_size
        self._sizes, self._stack = sizes, stack
        self.probabilistic = setup.speculation.draft_sample_method != "greedy"
        num_drafts = setup.speculation.num_drafts if self.probabilistic else 0
        self.cache_shape = (num_drafts, setup.vocab_size, stack.dtype)
        of_slot = DraftCache.empty(1, *self.cache_shape, torch.device("meta"))
        parts = (of_slot.logits_SKV, of_slot.threshold_SK, of_slot.lse_SK)
        self.cache_bytes = sum(tensor.nbytes for tensor in parts)
        self.bytes_per_slot = self.cache_bytes
        shape = (sizes.layer_shapes, setup.block_size, stack.dtype)
        self.kv_bytes_per_block = KVPool.bytes_per_block(*shape)

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Allocate K/V for as many blocks as the target has, and q for all slots with the spare."""
        sizes, stack = self._sizes, self._stack
        self.slots, self.cache = slots, self.shared_cache if self.probabilistic else None
        if self.probabilistic and self.cache is None:
            count = len(slots.state.length_S)
            self.cache = DraftCache.empty(count, *self.cache_shape, sizes.device)
        shape = (sizes.layer_shapes, num_blocks, self.block_size)
        self.kv = KVPool(*shape, dtype=stack.dtype, device=sizes.device)
        self._rounds = stack if slots.on_host and isinstance(stack, RoundStack) else None
        # By slot: the matcher, and how many tokens it has read.
        self._matchers: dict[int, tuple[Matcher | None, int]] = {}

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero the K/V of reused blocks if the stack multiplies masked keys: a NaN would spread."""
        if self._stack.multiplies_masked_keys:
            self.kv.clear(block_ids)

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._matchers.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        """Slots of requests that have a grammar and have had drafts."""
        return self._matchers

    def has_grammar(self, slot: int) -> bool:
        """Whether the request's drafts must match a grammar; always False on a device."""
        may_follow = self.slots.on_host and self.follows_grammars
        return may_follow and self.slots.admitted[slot].has_grammar

    def _matcher(self, slot: int) -> Matcher | None:
        """The matcher of the request's grammar after all known tokens.

        None if the grammar became too complex. The request's drafts are then unconstrained, but
        accepted tokens still match the grammar.
        """
        admission = self.slots.admitted[slot]
        if slot not in self._matchers and admission.params.grammar is not None:
            self._matchers[slot] = admission.params.grammar.matcher(), admission.num_prompt
        matcher, num_read = self._matchers[slot]
        new = self.slots.text(slot, num_read).tolist()
        # Without new tokens the matcher may stay advanced over drafts: see `Matcher.advance`.
        if matcher is not None and new:
            try:
                matcher.append(new)
            except RequestError:
                matcher = None
            self._matchers[slot] = matcher, num_read + len(new)
        return matcher

    def _mask(self, logits_BV: Tensor, slots: Sequence[int], drafts: Sequence[Tensor]) -> Tensor:
        """The logits with -inf for tokens that the request's grammar forbids after its drafts of
        this round, one tensor [B] per draft. The target cannot draw these tokens: their p is 0.

        For JSON by the embedded pair, K = 5, temperature 1, 3.1 drafts per round are accepted;
        without the mask 0.3.
        """
        matcher_B = [self._matcher(slot) for slot in slots]
        matchers = {b: matcher for b, matcher in enumerate(matcher_B) if matcher is not None}
        if not matchers:
            return logits_BV
        index_G, vocab_size = [*matchers], logits_BV.shape[1]
        drafts_KB = [draft_B.tolist() for draft_B in drafts]
        drafts_GK = [[draft_B[b] for draft_B in drafts_KB] for b in index_G]
        mask_GW = fill_ahead([*matchers.values()], drafts_GK, -(-vocab_size // 32))
        bit_GV = np.unpackbits(mask_GW.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
        # A copy, because logits made in inference mode cannot be written to.
        logits_GV = logits_BV[index_G].masked_fill(torch.from_numpy(bit_GV == 0), -torch.inf)
        return logits_BV.index_copy(0, torch.tensor(index_G), logits_GV)

    @abstractmethod
    def _pass(self, batch: ForwardBatch, features: Features | None = None) -> ForwardOutput:
        """Run a batch. `features` are hidden states that only an EAGLE-3 head reads."""

    def _native_round(
        self, requests: DraftRequests, cache: DraftCache | None, hidden_SC: Tensor | None = None
    ) -> DraftRound:
        """The arguments of a native round: one call that makes all passes and draws all drafts."""
        fp64 = self.config.use_fp64_gumbel
        return DraftRound(requests.params, requests.slot_B, requests.num_B, cache, fp64, hidden_SC)

    def _passes(
        self,
        requests: DraftRequests,
        places: Round,
        first: ForwardOutput,
        cache: DraftCache | None,
        *,
        masked: bool = False,
    ) -> Tensor:
        """Draw drafts [B, K]; -1 after a request's last draft.

        Each draft after the first is drawn from the output of a pass over the draft before it.

        Args:
            first: the output that the first draft is drawn from.
            masked: whether to apply the requests' grammars.
        """
        output, drafts, fp64 = first, list[Tensor](), self.config.use_fp64_gumbel
        slots = requests.slot_B.tolist() if masked else []
        for i in range(requests.most):
            if i:
                batch = places.batch(i - self._pass_offset, drafts[-1])
                output = self._pass(batch, output.hidden_NC)
            logits_BV = output.logits_NV
            if masked:
                logits_BV = self._mask(logits_BV, slots, drafts)
            if cache is None and (requests.samples or self.slots.on_host):
                drafts.append(logits_BV.argmax(dim=-1))
                continue
            noise = Noise(places.length_KB[i], places.index_KB[i], DRAFT, fp64)
            logits = Rows(logits_BV, requests.params, requests.slot_B)
            drafts.append(self.backend.draft(logits, noise, cache))
        return self.slots.steps.join_drafts(drafts, places.num_B)

    def _block(self, token_BK: Tensor, num_B: Tensor, cache: DraftCache | None) -> DraftBlock:
        """A block of these drafts. Their q is real if there is a `cache`, else one-hot. At T=0 and
        under COUPLED verification does not read q."""
        # One flag for all requests saves the comparison `num_B > 0`, 25 us on the host.
        if cache is None or (self.slots.on_host and all(num_B.tolist())):
            real_q_B = q_flags(len(num_B), self.slots.device, real=cache is not None)
        else:
            real_q_B = num_B > 0
        return DraftBlock(token_BK, num_B, cache, real_q_B)


class _ModelDrafter(Autoregressive):
    """A draft model, on a host or a device."""

    def __init__(self, setup: DrafterSetup, network: DraftNetwork | None = None) -> None:
        self.network = network or load_draft(setup)
        self.model = self.network.model
        super().__init__(setup, self.model, self.model.network)

    def _pass(self, batch: ForwardBatch, features: Features | None = None) -> ForwardOutput:
        return self.network.forward(batch, self.kv)

    def _fill(self, batch: ForwardBatch) -> None:
        """Run a batch only to write its K/V."""
        self._pass(batch._replace(logit_row_N=batch.logit_row_N[:0]))


class DraftModel(_ModelDrafter):
    """A draft model on a host.

    Attributes:
        complete: for each block whether its K/V are complete (see the module's docstring).
    """

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """See `Autoregressive`. Also begin to track how far the K/V reach, by slot and by block."""
        super().allocate(slots, num_blocks)
        if self.network.ids is not None:  # a native round cannot map ids between vocabularies
            self._rounds = None
        state = slots.state
        computed_S = torch.zeros_like(state.computed_S)
        self._num_computed_S: Array = computed_S.numpy()
        limit_S = torch.full_like(state.limit_S, _NO_LIMIT)
        # The drafter's view of the slots: the same tokens, but other numbers of computed ones.
        self._steps = self.backend.steps(state._replace(computed_S=computed_S, limit_S=limit_S))
        self.complete = bytearray(num_blocks)

    def propose(self, requests: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`. No draft lies past the draft model's longest context."""
        slots, length_S = requests.slot_B.tolist(), self.slots.length_S
        end = self.model.max_model_len + 1  # one more, since the last draft is not computed
        pairs = zip(slots, requests.num_B.tolist(), strict=True)
        counts = [max(0, min(num, end - int(length_S[slot]))) for slot, num in pairs]
        wanted = [slot for slot, count in zip(slots, counts, strict=True) if count]
        if not wanted:
            return no_drafts(len(slots), self.model.device)
        for slot in wanted:
            self._skip_complete(slot)
        self._catch_up(wanted)
        # Coupled requests draw at random, too, but their drafts have no real q in the block.
        samples = self.slots.draws_at_random(wanted)
        cache, num_B = self.cache if samples else None, torch.from_numpy(np.array(counts))
        requests = requests._replace(num_B=num_B, most=max(counts), samples=samples)
        drafting = set(wanted)
        kinds = [self.has_grammar(slot) if slot in drafting else None for slot in slots]
        token_BK = draft_by_kind(requests, kinds, partial(self._round, cache))
        for slot in wanted:
            self._advance(slot, length_S[slot])
        real = [cache is not None and slot in drafting and self._needs_q(slot) for slot in slots]
        real_q_B = torch.from_numpy(np.array(real))
        return DraftBlock(token_BK, num_B, cache if any(real) else None, real_q_B)

    def _round(self, cache: DraftCache | None, requests: DraftRequests, masked: bool) -> Tensor:
        """Draw the drafts [B, K] of a round; `masked`: the requests have grammars."""
        slot_B, length_B = requests.slot_B, requests.position_B
        missing_B = length_B - torch.from_numpy(self._num_computed_S[slot_B.numpy()])
        first = self._pack(slot_B, missing_B, requests.most - 1)
        if self._rounds is not None and not masked:
            return self._rounds.draft(first, self.kv, self._native_round(requests, cache))
        places = self._steps.begin_round(requests, 1, self.model.max_model_len, self.block_size)
        return self._passes(requests, places, self._pass(first), cache, masked=masked)

    def _needs_q(self, slot: int) -> bool:
        """Whether verification reads the q of the request's drafts."""
        request = self.slots.admitted[slot]
        return request.params.temperature > 0 and request.rule is not Rule.COUPLED

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Count the accepted drafts as computed, except the last proposed draft, which was only
        drawn. Also compute the chunks of prompts in this step."""
        for slot, outcome in result.decisions.items():
            if outcome.num_drafts:
                num_kept = min(outcome.num_accepted, outcome.num_drafts - 1)
                self._advance(slot, self._num_computed_S[slot] + num_kept)
        if not all(requests.step.decides_B):
            self._follow_prompts(requests.step)

    def _follow_prompts(self, step: StepInput) -> None:
        """Compute the chunks of unfinished prompts that the target has computed in this step.

        Otherwise the first round after a long prompt would compute the whole prompt in one step,
        and other requests would wait for it.
        """
        counts = {}
        for slot, size, decides in zip(step.slot_B, step.num_tokens_B, step.decides_B, strict=True):
            if decides or self.slots.admitted[slot].params.num_speculative_tokens == 0:
                continue
            self._skip_complete(slot)
            end = min(int(self.slots.computed_S[slot]), self.model.max_model_len)
            counts[slot] = min(end - int(self._num_computed_S[slot]), size)
        self._compute({slot: count for slot, count in counts.items() if count > 0})

    def clear(self, block_ids: Sequence[int]) -> None:
        """See `Autoregressive`. Also mark these blocks as not complete."""
        super().clear(block_ids)
        for block in block_ids:
            self.complete[block] = False

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        super().release(slot)
        self._num_computed_S[slot] = 0

    def take_back(self, slot: int, length: int) -> None:
        """Count at most `length` leading tokens of a slot as computed, because later tokens
        changed. Only for a slot that shares no block."""
        self._num_computed_S[slot] = min(self._num_computed_S[slot], length)

    def held_slots(self) -> Iterable[int]:
        """Slots with computed tokens or a matcher."""
        return [*np.flatnonzero(self._num_computed_S).tolist(), *super().held_slots()]

    def _skip_complete(self, slot: int) -> None:
        """Let a request that is new to its slot start after its leading complete blocks."""
        if self._num_computed_S[slot]:
            return
        # Without the last known token: drafts start from its row, so it is computed again.
        size, num_tokens = self.block_size, self.slots.length_S[slot] - 1
        for block in self.slots.block_SL[slot, : num_tokens // size].tolist():
            if not self.complete[block]:
                break
            self._num_computed_S[slot] += size

    def _advance(self, slot: int, num_computed: int) -> None:
        """Set how many leading tokens of a slot are computed. Mark the blocks that they fill."""
        size, num_before = self.block_size, self._num_computed_S[slot]
        self._num_computed_S[slot] = num_computed
        for block in self.slots.block_SL[slot, num_before // size : num_computed // size]:
            self.complete[block] = True

    def _pack(self, slot_B: Tensor, count_B: Tensor, ahead: int = 0) -> ForwardBatch:
        """A batch of each slot's next `count_B` tokens to compute, with logits of the last token.
        The block table covers `ahead` positions more."""
        tokens, total = StepTokens(slot_B, count_B, None, torch.zeros_like(count_B)), count_B.sum()
        sizes = PackSizes(int(total), len(slot_B), int(total), ahead)
        return self._steps.pack(tokens, sizes, self.block_size)

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Compute missing tokens until no slot lacks more than its share of the engine's token
        budget. One pass can then compute the rest."""
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
        """Compute missing tokens; `counts` states how many by slot."""
        if not counts:
            return
        slot_B, count_B = torch.from_numpy(
            np.array([[*counts], [*counts.values()]], dtype=np.int64)
        )
        self._fill(self._pack(slot_B, count_B))
        for slot, count in counts.items():
            self._advance(slot, self._num_computed_S[slot] + count)


class LockstepDraftModel(_ModelDrafter):
    """A draft model on an asynchronous device, in lock-step with the target."""

    num_behind = 2

    def propose(self, requests: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`. Every request takes part in every pass, at least as padding."""
        max_len, cache = self.model.max_model_len, self.cache if requests.samples else None
        places = self.slots.steps.begin_round(requests, _NUM_KNOWN, max_len, self.block_size)
        token_BK = self._passes(requests, places, self._pass(places.first), cache)
        return self._block(token_BK, places.num_B, cache)

    def observes(self, requests: StepRequests) -> bool:
        """False if this step's round of drafting has already computed the target's tokens."""
        return requests.has_other_drafters or not (requests.most_drafts and _decodes(requests))

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Compute the tokens that the target computed, other drafters' drafts included.

        In a step without drafts, each decoding request has one new token. Then also compute the
        token before it: that token is missing if it was the last draft of a round in which all
        drafts were accepted.
        """
        if not requests.most_drafts:
            if _decodes(requests):
                batch = self._last_two(requests)
            elif 1 in requests.step.num_tokens_B:
                batch = self._with_prompts(requests)
        max_position = self.model.max_model_len - 1
        self._fill(batch._replace(position_T=batch.position_T.clamp(max=max_position)))

    def _last_two(self, requests: StepRequests) -> ForwardBatch:
        """The batch for a step that only decodes: the last two tokens that the target computed."""
        max_len, length_S = self.model.max_model_len, self.slots.state.length_S
        # Without the last known token, which may have no block yet.
        end_B = (length_S[requests.slot_D] - 1).clamp(min=1)
        no_drafts_B = torch.zeros_like(end_B)
        known = DraftRequests(requests.slot_D, no_drafts_B, end_B, 1, requests.params)
        return self.slots.steps.begin_round(known, _NUM_KNOWN, max_len, self.block_size).first

    def _with_prompts(self, requests: StepRequests) -> ForwardBatch:
        """The batch for a step that also computes prompts: the tokens that the target computed, and
        for each decoding request the token before them, too.

        No token is missing before a chunk of a prompt. Such steps are not captured and have no
        padding. The slots already hold the outcome, so `pack` gets the state from before the step.
        A request that has just reached its limit takes part, since it may be a prompt with one
        token to generate. A request that had reached its limit earlier computes its last tokens
        again.
        """
        state, num_tokens_B = self.slots.state, requests.num_tokens_B
        end_B = state.computed_S[requests.slot_B]
        start_B = (end_B - num_tokens_B - (num_tokens_B == 1).long()).clamp(min=0)
        state_before = state._replace(
            computed_S=state.computed_S.index_copy(0, requests.slot_B, start_B),
            limit_S=state.length_S + 1,
        )
        count_B, counts = end_B - start_B, requests.step.num_tokens_B
        tokens = StepTokens(requests.slot_B, count_B, None, torch.zeros_like(count_B))
        sizes = PackSizes(sum(counts) + counts.count(1), len(counts), max(*counts, _NUM_KNOWN))
        return self.backend.steps(state_before).pack(tokens, sizes, self.block_size)


class Eagle3(Autoregressive):
    """A drafter that runs an EAGLE-3 head.

    It keeps for each slot the head's hidden state at the last valid row. The first draft is drawn
    from this state, each further draft after a pass of one row per request.

    Rows at and after a request's last known token belong to rejected drafts. Their K/V are
    overwritten before another row reads them. Drafts are target ids, even if the head can draft
    only some of these. So q is real, and `coupled` drafts share the target's noise.
    """

    reads_next_token = True
    _pass_offset = 1

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """The hidden states that the head reads, and whether it needs the target's output layer.

        The layers of these states come from the head's `config.json`, else from the target's depth.
        """
        is_dummy, folder = config.load_format == "dummy", _head_folder(config)
        head = read_eagle3_config(folder)
        target = folder_of(config, config.model, config.revision, weights=False)
        with quiet_transformers():
            parsed = parse_config(target, read_config(target)["model_type"])
        depth = parsed.get_text_config().num_hidden_layers
        layers = head.aux_layers or default_aux_layers(depth)
        if not all(0 <= layer < depth for layer in layers):
            # Layer `depth` would be the last layer's output, which only exists normed here.
            bound = f"a head that reads hidden states in 0..{depth - 1} of its target"
            remedy = f"It reads {list(layers)}; the target has {depth} layers."
            name = config.speculative_config and config.speculative_config.model
            raise ConfigError("speculative_config.model", name, bound, remedy)
        return TargetView(layers, head=not is_dummy and lacks_head(folder, head))

    def __init__(self, setup: DrafterSetup) -> None:
        self.head = _load_head(setup)
        stack = self.head.stack
        super().__init__(setup, stack, self.head)
        # A backend with its own layout of weights also has a buffer for logits.
        num_logits = 0 if self.head.multiplies_masked_keys else setup.vocab_size
        self.bytes_per_slot += (stack.hidden_size + num_logits) * self.head.dtype.itemsize

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """See `Autoregressive`. Also allocate a hidden state for every slot."""
        super().allocate(slots, num_blocks)
        stack, dtype = self.head.stack, self.head.dtype
        shape = (len(slots.state.length_S), stack.hidden_size)
        self._hidden_SC = torch.zeros(shape, dtype=dtype, device=stack.device)

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Run the head over the rows that the target computed, each with the token after it."""
        slots, slot_B = self.slots, requests.slot_B
        if self._rounds is not None:  # the native call leaves out rows of rejected drafts
            length_B = [int(slots.length_S[slot]) for slot in requests.step.slot_B]
            outcome = Outcome(slots.state.token_SL, length_B, slot_B, self._hidden_SC)
            self._rounds.observe(batch, self.kv, result.aux, outcome)
            return
        token_T, row_B = slots.steps.shift(slot_B, batch.attention, len(batch.token_T))
        batch = batch._replace(token_T=token_T, logit_row_N=row_B)
        output: Any = self.head.run(batch, self.kv, features=result.aux, logits=False)
        self._hidden_SC.index_copy_(0, slot_B, output.hidden_NC)

    def propose(self, requests: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`."""
        if requests.most == 0:
            return no_drafts(len(requests.slot_B), self.slots.device)
        cache, kinds = self.cache if requests.samples else None, [False]
        if self.slots.on_host:
            kinds = [self.has_grammar(slot) for slot in requests.slot_B.tolist()]
        token_BK = draft_by_kind(requests, kinds, partial(self._round, cache))
        return self._block(token_BK, requests.num_B, cache)

    def _round(self, cache: DraftCache | None, requests: DraftRequests, masked: bool) -> Tensor:
        """Draw the drafts [B, K] of a round; `masked`: the requests have grammars."""
        slot_B, block_SL = requests.slot_B, self.slots.state.block_SL
        if self._rounds is not None and not masked:
            # The block table of all slots: gathering the requests' rows would take 45 us.
            attention = AttentionBatch(slot_B, requests.position_B, block_SL, self.block_size)
            batch = ForwardBatch(slot_B, slot_B, slot_B, attention)  # only `attention` is read
            native_round = self._native_round(requests, cache, self._hidden_SC)
            return self._rounds.draft(batch, self.kv, native_round)
        longest = block_SL.shape[1] * self.block_size
        places = self.slots.steps.begin_round(requests, 1, longest, self.block_size)
        hidden_BC = self._hidden_SC[slot_B]
        first = ForwardOutput(self.head.logits(hidden_BC), (), hidden_BC)
        return self._passes(requests, places, first, cache, masked=masked)

    def _pass(self, batch: ForwardBatch, features: Features | None = None) -> ForwardOutput:
        return self.head.run(batch, self.kv, features=features)


def _load_head(setup: DrafterSetup) -> LoadedStack:
    """Load the head; `ConfigError` if its vocabulary or hidden size does not fit the target."""
    is_dummy, embedding = setup.config.load_format == "dummy", setup.embedding
    if embedding is None:
        raise IntegrityError("`eagle3` was given no embedding of its target")
    folder = _head_folder(setup.config)
    config = read_eagle3_config(folder)
    width = embedding.shape[1]
    for unit, head_size, target_size in (
        ("logits", config.vocab_size, setup.vocab_size),
        ("numbers in a hidden state of its target", config.target_hidden_size, width),
    ):
        if head_size != target_size:
            bound = "a head that was trained for this target"
            remedy = f"It takes {head_size} {unit}; the target has {target_size}."
            raise ConfigError("speculative_config.model", setup.speculation.model, bound, remedy)
    return load_head(
        folder, config, embedding=embedding, backend=setup.backend, head=setup.head,
        # Blocks may reach past the end of the longest request.
        positions=setup.max_model_len + setup.block_size, most_rows=setup.config.max_num_seqs,
        dummy_seed=setup.config.seed if is_dummy else None,
    )  # fmt: skip


def _head_folder(config: EngineConfig) -> Path:
    """The head's folder; `ConfigError` if the options name no head and the target has none."""
    speculation = config.speculative_config
    if speculation is None:
        raise IntegrityError("`eagle3` was asked for a head without a configuration")
    name = speculation.model or BUILT_IN_HEADS.get(config.model)
    if name is None:
        known = ", ".join(f"`{head}` for `{target}`" for target, head in BUILT_IN_HEADS.items())
        remedy = f"Name a folder or hub id of a head that was trained for it. Built in are {known}."
        raise ConfigError("speculative_config.model", None, "an EAGLE-3 head", remedy)
    return folder_of(config, name, speculation.revision)


def _decodes(requests: StepRequests) -> bool:
    """Whether every request of a step decides and has one known token to compute."""
    return requests.decider_B is None and max(requests.step.num_tokens_B, default=1) == 1
