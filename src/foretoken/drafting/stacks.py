"""Drafters that run a stack: a small language model, or an EAGLE-3 head on the target's states.

Their K/V (`kv`) use the target's block ids, so that accepting, rejecting and freeing need little
code here. The q of their drafts is kept by slot in a `DraftCache` (`cache`, `q_cache`). A round of
drafting is one native call if the backend has such a call, else one pass per draft. All requests
take part in every pass. A request that needs no more drafts writes K/V like those of a rejected
draft, which are overwritten before they are read; after the end of the request's blocks, the block
table names the spare slot's block.

Requests that begin with the same tokens share blocks. Each block has a half for the target's K/V
and a half for the drafter's. The drafter's half may be missing, because the request that filled the
target's half may never have had drafts.

- `DraftModel` (on a host) counts for each slot how many of the first tokens have K/V here, and
  computes the tokens of steps without drafts later. A block is `complete` once all of its positions
  were computed from known tokens. A request that is new to its slot starts after its first complete
  blocks. This is correct for three reasons. Two tables share a block only if all tokens up to its
  end are equal, so it does not matter which request computed the block. Drafts come after all known
  tokens, so no complete block has a draft. `clear` removes the mark of a reused block. Requests
  that share an incomplete block each compute it, with equal values.
- `LockstepDraftModel` (on a device, where the host does not know which tokens have K/V here)
  computes in every step what the target computes. After a step only the last of these tokens may be
  missing: if all drafts of a round are accepted, the last draft was drawn but not computed. The
  next step computes it. Other requests find a block once the target has computed two tokens past
  the block's end (`num_behind`), because two tokens of an ended request may be missing: the last
  draft of a round, and the token that the target computes in the next step, if that step has no
  drafts: the drafter's pass after the step leaves out ended requests.
- `Eagle3` runs over exactly the rows that the target has computed, each with the token after it,
  also in steps without drafts.

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
from foretoken.drafting.base import Drafter, DrafterSetup, draft_by_grammar, no_drafts, q_flags
from foretoken.drafting.vocabulary import DraftNetwork, load_draft
from foretoken.errors import ConfigError, IntegrityError, RequestError
from foretoken.models import CausalLM, TargetView, folder_of
from foretoken.models.causal_lm import ModuleNetwork
from foretoken.models.checkpoint import parse_config, quiet_transformers, read_config
from foretoken.models.eagle3 import lacks_output_layer, load_head
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
    """Memory and passes of drafters that run a stack; a subclass adds the round and the pass.

    Args:
        sizes: has the shapes of the K/V that `stack` writes.

    Attributes:
        probabilistic: whether q is kept for verification; False: drafts are greedy, q is one-hot.
        cache_shape: K, V and dtype of the q that is kept for each slot; K = 0: no q is kept.
        follows_grammars: whether grammars may mask drafts, because these have the target's ids.
        shared_cache: a `DraftCache` shared with other drafters; None: `allocate` makes a new one.
    """

    options = frozenset({"model", "revision", "draft_sample_method"})
    follows_grammars = True
    shared_cache: DraftCache | None = None
    _pass_offset: ClassVar[int] = 0  # the pass for draft i uses row i - _pass_offset of `Round`

    def __init__(
        self, setup: DrafterSetup, sizes: CausalLM | Stack, stack: LoadedStack | ModuleNetwork
    ) -> None:
        self.config, self.backend, self.block_size = setup.config, setup.backend, setup.block_size
        self._sizes, self._stack = sizes, stack
        self.probabilistic = setup.speculation.draft_sample_method != "greedy"
        num_drafts = setup.speculation.num_drafts if self.probabilistic else 0
        self.cache_shape = (num_drafts, setup.vocab_size, stack.dtype)
        one_slot = DraftCache.empty(1, *self.cache_shape, torch.device("meta"))
        parts = (one_slot.logits_SKV, one_slot.threshold_SK, one_slot.lse_SK)
        self.bytes_per_slot = self.cache_bytes = sum(tensor.nbytes for tensor in parts)
        shape = (sizes.layer_shapes, setup.block_size, stack.dtype)
        self.kv_bytes_per_block = KVPool.bytes_per_block(*shape)

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        sizes, stack = self._sizes, self._stack
        self.slots, self.cache = slots, self.shared_cache if self.probabilistic else None
        if self.probabilistic and self.cache is None:
            count = len(slots.state.length_S)
            self.cache = DraftCache.empty(count, *self.cache_shape, sizes.device)
        shape = (sizes.layer_shapes, num_blocks, self.block_size)
        self.kv = KVPool(*shape, dtype=stack.dtype, device=sizes.device)
        self._round_stack = stack if slots.on_host and isinstance(stack, RoundStack) else None
        # By slot: the matcher, and the number of tokens that it has read.
        self._matchers: dict[int, tuple[Matcher | None, int]] = {}

    def clear(self, block_ids: Sequence[int]) -> None:
        if self._stack.multiplies_masked_keys:
            self.kv.clear(block_ids)

    def release(self, slot: int) -> None:
        self._matchers.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        return self._matchers

    def has_grammar(self, slot: int) -> bool:
        """Whether the request's drafts are masked by a grammar; always False on a device."""
        uses_grammars = self.slots.on_host and self.follows_grammars
        return uses_grammars and self.slots.admitted[slot].has_grammar

    def _matcher(self, slot: int) -> Matcher | None:
        """The matcher of the request's grammar after all known tokens; None if the grammar became
        too complex. Drafts are then unconstrained, but accepted tokens still match the grammar."""
        admission = self.slots.admitted[slot]
        if slot not in self._matchers and admission.params.grammar is not None:
            self._matchers[slot] = admission.params.grammar.matcher(), admission.num_prompt
        matcher, num_read = self._matchers[slot]
        new = self.slots.text(slot, num_read).tolist()
        # Without new tokens the matcher may stay advanced over drafts (`Matcher.advance`).
        if matcher is not None and new:
            try:
                matcher.append(new)
            except RequestError:
                matcher = None
            self._matchers[slot] = matcher, num_read + len(new)
        return matcher

    def _mask(self, logits_BV: Tensor, slots: Sequence[int], drafts: Sequence[Tensor]) -> Tensor:
        """Set the logits of tokens that a request's grammar forbids after the drafts of this round
        (one tensor [B] per draft) to -inf. The target cannot draw these tokens: their p is 0.

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
        """Run a batch; only an EAGLE-3 head reads `features`."""

    def _round_arguments(
        self, requests: DraftRequests, q_cache: DraftCache | None, hidden_SC: Tensor | None = None
    ) -> DraftRound:
        fp64 = self.config.use_fp64_gumbel
        slot_B, num_B = requests.slot_B, requests.num_B
        return DraftRound(requests.params, slot_B, num_B, q_cache, fp64, hidden_SC)

    def _draw(
        self,
        requests: DraftRequests,
        plan: Round,
        first: ForwardOutput,
        q_cache: DraftCache | None,
        *,
        masked: bool = False,
    ) -> Tensor:
        """Draw drafts [B, K], -1 after a request's last draft: the first from the output `first`,
        each further draft from a pass over the draft before it. `masked`: apply grammars."""
        output, drafts, fp64 = first, list[Tensor](), self.config.use_fp64_gumbel
        slots = requests.slot_B.tolist() if masked else []
        for i in range(requests.most):
            if i:
                batch = plan.batch(i - self._pass_offset, drafts[-1])
                output = self._pass(batch, output.hidden_NC)
            logits_BV = output.logits_NV
            if masked:
                logits_BV = self._mask(logits_BV, slots, drafts)
            if q_cache is None and (requests.samples or self.slots.on_host):
                drafts.append(logits_BV.argmax(dim=-1))
                continue
            noise = Noise(plan.length_KB[i], plan.index_KB[i], DRAFT, fp64)
            logits = Rows(logits_BV, requests.params, requests.slot_B)
            drafts.append(self.backend.draft(logits, noise, q_cache))
        return self.slots.steps.join_drafts(drafts, plan.num_B)

    def _draft_block(
        self, token_BK: Tensor, num_B: Tensor, q_cache: DraftCache | None
    ) -> DraftBlock:
        """The `DraftBlock` of these drafts. With a `q_cache`, q is real in every row with drafts,
        even if q is never read there."""
        # Equal flags for all requests save the comparison `num_B > 0`, 25 us on the host.
        if q_cache is None or (self.slots.on_host and all(num_B.tolist())):
            real_q_B = q_flags(len(num_B), self.slots.device, real=q_cache is not None)
        else:
            real_q_B = num_B > 0
        return DraftBlock(token_BK, num_B, q_cache, real_q_B)


class _ModelDrafter(Autoregressive):
    """A draft model, on a host or a device."""

    def __init__(self, setup: DrafterSetup, network: DraftNetwork | None = None) -> None:
        self.network = network or load_draft(setup)
        self.model = self.network.model
        super().__init__(setup, self.model, self.model.network)

    def _pass(self, batch: ForwardBatch, features: Features | None = None) -> ForwardOutput:
        return self.network.forward(batch, self.kv)

    def _write_kv(self, batch: ForwardBatch) -> None:
        self._pass(batch._replace(logit_row_N=batch.logit_row_N[:0]))


class DraftModel(_ModelDrafter):
    """A draft model on a host.

    complete: for each block whether its K/V are complete (see the module's docstring).
    """

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        super().allocate(slots, num_blocks)
        if self.network.ids is not None:  # native rounds cannot map ids
            self._round_stack = None
        state = slots.state
        computed_S = torch.zeros_like(state.computed_S)
        self._num_computed_S: Array = computed_S.numpy()
        limit_S = torch.full_like(state.limit_S, _NO_LIMIT)
        # The slots for the drafter: the same tokens, but other numbers of computed tokens.
        self._steps = self.backend.steps(state._replace(computed_S=computed_S, limit_S=limit_S))
        self.complete = bytearray(num_blocks)

    def propose(self, requests: DraftRequests) -> DraftBlock:
        slots, length_S = requests.slot_B.tolist(), self.slots.length_S
        end = self.model.max_model_len + 1  # one more, since the last draft is not computed
        pairs = zip(slots, requests.num_B.tolist(), strict=True)
        counts = [max(0, min(num, end - int(length_S[slot]))) for slot, num in pairs]
        drafting_slots = [slot for slot, count in zip(slots, counts, strict=True) if count]
        if not drafting_slots:
            return no_drafts(len(slots), self.model.device)
        for slot in drafting_slots:
            self._skip_complete_blocks(slot)
        self._catch_up(drafting_slots)
        # Coupled requests draw at random, too, but their drafts have no real q in the `DraftBlock`.
        samples = self.slots.draws_at_random(drafting_slots)
        q_cache, num_B = self.cache if samples else None, torch.from_numpy(np.array(counts))
        requests = requests._replace(num_B=num_B, most=max(counts), samples=samples)
        drafting = set(drafting_slots)
        grammar_B = [self.has_grammar(slot) if slot in drafting else None for slot in slots]
        token_BK = draft_by_grammar(requests, grammar_B, partial(self._round, q_cache))
        for slot in drafting_slots:
            self._advance(slot, length_S[slot])
        real = [q_cache is not None and slot in drafting and self._needs_q(slot) for slot in slots]
        real_q_B = torch.from_numpy(np.array(real))
        return DraftBlock(token_BK, num_B, q_cache if any(real) else None, real_q_B)

    def _round(self, q_cache: DraftCache | None, requests: DraftRequests, masked: bool) -> Tensor:
        """Draw the drafts [B, K] of a round; `masked`: the requests have grammars."""
        slot_B, length_B = requests.slot_B, requests.position_B
        missing_B = length_B - torch.from_numpy(self._num_computed_S[slot_B.numpy()])
        first = self._pack(slot_B, missing_B, requests.most - 1)
        if self._round_stack is not None and not masked:
            return self._round_stack.draft(first, self.kv, self._round_arguments(requests, q_cache))
        plan = self._steps.begin_round(requests, 1, self.model.max_model_len, self.block_size)
        return self._draw(requests, plan, self._pass(first), q_cache, masked=masked)

    def _needs_q(self, slot: int) -> bool:
        request = self.slots.admitted[slot]
        return request.params.temperature > 0 and request.rule is not Rule.COUPLED

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Count accepted drafts as computed, except a round's last draft, which was only drawn;
        compute the step's chunks of prompts."""
        for slot, outcome in result.decisions.items():
            if outcome.num_drafts:
                num_kept = min(outcome.num_accepted, outcome.num_drafts - 1)
                self._advance(slot, self._num_computed_S[slot] + num_kept)
        if not all(requests.step.decides_B):
            self._compute_prompts(requests.step)

    def _compute_prompts(self, step: StepInput) -> None:
        """Compute the chunks of unfinished prompts that the target computed in this step, so that
        the first round after a long prompt need not compute it while other requests wait."""
        counts = {}
        for slot, size, decides in zip(step.slot_B, step.num_tokens_B, step.decides_B, strict=True):
            if decides or self.slots.admitted[slot].params.num_speculative_tokens == 0:
                continue
            self._skip_complete_blocks(slot)
            end = min(int(self.slots.computed_S[slot]), self.model.max_model_len)
            counts[slot] = min(end - int(self._num_computed_S[slot]), size)
        self._compute_tokens({slot: count for slot, count in counts.items() if count > 0})

    def clear(self, block_ids: Sequence[int]) -> None:
        super().clear(block_ids)
        for block in block_ids:
            self.complete[block] = False

    def release(self, slot: int) -> None:
        super().release(slot)
        self._num_computed_S[slot] = 0

    def limit_computed(self, slot: int, length: int) -> None:
        """Count at most the first `length` tokens of a slot as computed, because later tokens have
        changed. Only for a slot that shares no block."""
        self._num_computed_S[slot] = min(self._num_computed_S[slot], length)

    def held_slots(self) -> Iterable[int]:
        return [*np.flatnonzero(self._num_computed_S).tolist(), *super().held_slots()]

    def _skip_complete_blocks(self, slot: int) -> None:
        """Let a request that is new to its slot start after its first complete blocks."""
        if self._num_computed_S[slot]:
            return
        # Without the last known token, which is always computed: drafts start from its row.
        size, num_tokens = self.block_size, self.slots.length_S[slot] - 1
        for block in self.slots.block_SL[slot, : num_tokens // size].tolist():
            if not self.complete[block]:
                break
            self._num_computed_S[slot] += size

    def _advance(self, slot: int, num_computed: int) -> None:
        """Count the first `num_computed` tokens of a slot as computed; mark complete blocks."""
        size, num_before = self.block_size, self._num_computed_S[slot]
        self._num_computed_S[slot] = num_computed
        for block in self.slots.block_SL[slot, num_before // size : num_computed // size]:
            self.complete[block] = True

    def _pack(self, slot_B: Tensor, count_B: Tensor, ahead: int = 0) -> ForwardBatch:
        """A batch of the next `count_B` tokens to compute, with logits of each slot's last token
        and `ahead` more positions in the block table."""
        tokens, total = StepTokens(slot_B, count_B, None, torch.zeros_like(count_B)), count_B.sum()
        sizes = PackSizes(int(total), len(slot_B), int(total), ahead)
        return self._steps.pack(tokens, sizes, self.block_size)

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Compute missing tokens until one pass within the engine's budget can compute the rest:
        each slot gets an equal share of the pass."""
        budget = self.config.max_num_batched_tokens
        share = max(budget // len(slots), 1)
        while True:
            counts, room = dict[int, int](), budget
            for slot in slots:
                missing = int(self.slots.length_S[slot] - self._num_computed_S[slot])
                if (size := min(missing - share, room)) > 0:
                    counts[slot] = size
                    room -= size
            if not counts:
                return
            self._compute_tokens(counts)

    def _compute_tokens(self, counts: Mapping[int, int]) -> None:
        """Compute the next tokens; `counts` is their number by slot."""
        if not counts:
            return
        columns = np.array([[*counts], [*counts.values()]], dtype=np.int64)
        slot_B, count_B = torch.from_numpy(columns)
        self._write_kv(self._pack(slot_B, count_B))
        for slot, count in counts.items():
            self._advance(slot, self._num_computed_S[slot] + count)


class LockstepDraftModel(_ModelDrafter):
    """A draft model on an asynchronous device, in lock-step with the target."""

    num_behind = 2

    def propose(self, requests: DraftRequests) -> DraftBlock:
        max_len, q_cache = self.model.max_model_len, self.cache if requests.samples else None
        plan = self.slots.steps.begin_round(requests, _NUM_KNOWN, max_len, self.block_size)
        token_BK = self._draw(requests, plan, self._pass(plan.first), q_cache)
        return self._draft_block(token_BK, plan.num_B, q_cache)

    def observes(self, requests: StepRequests) -> bool:
        # Without other drafters, a round of drafting has already computed the target's tokens.
        return requests.has_other_drafters or not (requests.most_drafts and _only_decodes(requests))

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Compute the tokens that the target computed, other drafters' drafts included.

        In a step without drafts, also compute the token before a decoding request's new token: it
        is missing if it was the last draft of a round in which all drafts were accepted.
        """
        if not requests.most_drafts:
            if _only_decodes(requests):
                batch = self._last_two_tokens(requests)
            elif 1 in requests.step.num_tokens_B:
                batch = self._prompts_and_last_two(requests)
        max_position = self.model.max_model_len - 1
        self._write_kv(batch._replace(position_T=batch.position_T.clamp(max=max_position)))

    def _last_two_tokens(self, requests: StepRequests) -> ForwardBatch:
        """The batch of each request's last two tokens that the target has computed."""
        max_len, length_S = self.model.max_model_len, self.slots.state.length_S
        # Without the last known token, which may have no block yet.
        end_B = (length_S[requests.slot_D] - 1).clamp(min=1)
        no_drafts_B = torch.zeros_like(end_B)
        known = DraftRequests(requests.slot_D, no_drafts_B, end_B, 1, requests.params)
        return self.slots.steps.begin_round(known, _NUM_KNOWN, max_len, self.block_size).first

    def _prompts_and_last_two(self, requests: StepRequests) -> ForwardBatch:
        """The batch of the target's chunks of prompts, and of each decoding request's last two
        tokens.

        No token is missing before a chunk of a prompt. Steps with prompts are not captured and have
        no padding. The slots already have the outcome, so `pack` gets the state from before the
        step. Requests that have reached their limit take part, because a prompt may have one token
        to generate; if they reached it earlier, their last tokens are computed again.
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

    It keeps the head's hidden state at each slot's last valid row. The first draft is drawn from
    this state, each further draft after a pass of one row per request.

    Rows from a request's last known token on belong to rejected drafts. Their K/V are overwritten
    before another row reads them. Drafts have the target's ids, even if the head can draft only
    some of these. So q is real, and `coupled` drafts share the target's noise.
    """

    reads_next_token = True
    _pass_offset = 1

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """The layers of the hidden states that the head reads, by its `config.json` or the target's
        depth, and whether it needs the target's output layer."""
        is_dummy, folder = config.load_format == "dummy", _head_folder(config)
        head = read_eagle3_config(folder)
        target = folder_of(config, config.model, config.revision, weights=False)
        with quiet_transformers():
            parsed = parse_config(target, read_config(target)["model_type"])
        depth = parsed.get_text_config().num_hidden_layers
        layers = head.aux_layers or default_aux_layers(depth)
        if not all(0 <= layer < depth for layer in layers):
            # State number `depth` is the last layer's output, which only exists normed.
            bound = f"a head that reads hidden states in 0..{depth - 1} of its target"
            remedy = f"It reads {list(layers)}; the target has {depth} layers."
            name = config.speculative_config and config.speculative_config.model
            raise ConfigError("speculative_config.model", name, bound, remedy)
        return TargetView(layers, head=not is_dummy and lacks_output_layer(folder, head))

    def __init__(self, setup: DrafterSetup) -> None:
        self.head = _load_head(setup)
        stack = self.head.stack
        super().__init__(setup, stack, self.head)
        # Only a stack in a backend's own layout, which multiplies no masked keys, buffers logits.
        num_logits = 0 if self.head.multiplies_masked_keys else setup.vocab_size
        self.bytes_per_slot += (stack.hidden_size + num_logits) * self.head.dtype.itemsize

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        super().allocate(slots, num_blocks)
        stack, dtype = self.head.stack, self.head.dtype
        shape = (len(slots.state.length_S), stack.hidden_size)
        self._hidden_SC = torch.zeros(shape, dtype=dtype, device=stack.device)

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        # Run the head over the rows that the target computed, each with the token after it.
        slots, slot_B = self.slots, requests.slot_B
        if self._round_stack is not None:  # the native call skips rows of rejected drafts
            length_B = [int(slots.length_S[slot]) for slot in requests.step.slot_B]
            outcome = Outcome(slots.state.token_SL, length_B, slot_B, self._hidden_SC)
            self._round_stack.observe(batch, self.kv, result.aux, outcome)
            return
        token_T, row_B = slots.steps.shift(slot_B, batch.attention, len(batch.token_T))
        batch = batch._replace(token_T=token_T, logit_row_N=row_B)
        output: Any = self.head.run(batch, self.kv, features=result.aux, logits=False)
        self._hidden_SC.index_copy_(0, slot_B, output.hidden_NC)

    def propose(self, requests: DraftRequests) -> DraftBlock:
        if requests.most == 0:
            return no_drafts(len(requests.slot_B), self.slots.device)
        q_cache, grammar_B = self.cache if requests.samples else None, [False]
        if self.slots.on_host:
            grammar_B = [self.has_grammar(slot) for slot in requests.slot_B.tolist()]
        token_BK = draft_by_grammar(requests, grammar_B, partial(self._round, q_cache))
        return self._draft_block(token_BK, requests.num_B, q_cache)

    def _round(self, q_cache: DraftCache | None, requests: DraftRequests, masked: bool) -> Tensor:
        """Draw the drafts [B, K] of a round; `masked`: the requests have grammars."""
        slot_B, block_SL = requests.slot_B, self.slots.state.block_SL
        if self._round_stack is not None and not masked:
            # The block table has all slots, because gathering the requests' rows would take 45 us.
            attention = AttentionBatch(slot_B, requests.position_B, block_SL, self.block_size)
            batch = ForwardBatch(slot_B, slot_B, slot_B, attention)  # only `attention` is read
            native_round = self._round_arguments(requests, q_cache, self._hidden_SC)
            return self._round_stack.draft(batch, self.kv, native_round)
        longest = block_SL.shape[1] * self.block_size
        plan = self.slots.steps.begin_round(requests, 1, longest, self.block_size)
        hidden_BC = self._hidden_SC[slot_B]
        first = ForwardOutput(self.head.logits(hidden_BC), (), hidden_BC)
        return self._draw(requests, plan, first, q_cache, masked=masked)

    def _pass(self, batch: ForwardBatch, features: Features | None = None) -> ForwardOutput:
        return self.head.run(batch, self.kv, features=features)


def _load_head(setup: DrafterSetup) -> LoadedStack:
    """Load the head; `ConfigError` if no head is named, or its sizes do not fit the target."""
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
            remedy = f"It was trained for {head_size} {unit}; the target has {target_size}."
            raise ConfigError("speculative_config.model", setup.speculation.model, bound, remedy)
    return load_head(
        folder, config, embedding=embedding, backend=setup.backend, output_layer=setup.head,
        # Blocks may reach past the end of the longest request.
        positions=setup.max_model_len + setup.block_size, most_rows=setup.config.max_num_seqs,
        dummy_seed=setup.config.seed if is_dummy else None,
    )  # fmt: skip


def _head_folder(config: EngineConfig) -> Path:
    """The head's folder; `ConfigError` if neither the options nor `BUILT_IN_HEADS` name one."""
    speculation = config.speculative_config
    if speculation is None:
        raise IntegrityError("`eagle3` was built without `speculative_config`")
    name = speculation.model or BUILT_IN_HEADS.get(config.model)
    if name is None:
        known = ", ".join(f"`{head}` for `{target}`" for target, head in BUILT_IN_HEADS.items())
        remedy = f"Name the folder or hub id of a head for this target. Built in are {known}."
        raise ConfigError("speculative_config.model", None, "an EAGLE-3 head", remedy)
    return folder_of(config, name, speculation.revision)


def _only_decodes(requests: StepRequests) -> bool:
    return requests.decider_B is None and max(requests.step.num_tokens_B, default=1) == 1
