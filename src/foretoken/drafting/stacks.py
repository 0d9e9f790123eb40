"""Drafters that run a stack: a small language model, or an EAGLE-3 head on the target's states.

Their K/V use the target's block ids, so that accepting, rejecting and freeing need little code
here; q of their drafts is kept by slot. A round of drafting is one native call where a backend has
one, else one pass per draft. All requests take part in every pass. A request that wants no more
drafts writes K/V that count as a rejected draft's: they are overwritten before they are read. After
the end of its blocks, the round's table leads to the spare slot's block.

Blocks are shared between requests that begin with the same tokens. The drafter's half of a block
may be missing, because the request that filled the target's half may never have had drafts.

- `DraftModel` (on a host) counts for each slot how many leading tokens its cache holds, and catches
  up on tokens of steps in which it was not asked. A block is marked `complete` once all of its
  positions were computed here from known tokens. A request that is new to its slot starts after its
  leading complete blocks. This is correct for three reasons: two tables share a block only if all
  tokens up to its end are equal, so it does not matter which request computed it; drafts come after
  all known tokens, so no complete block contains one; and reused blocks pass through `clear`, which
  removes the mark. Requests that share an incomplete block each compute it, with equal values.
- `LockstepDraftModel` (on a device, where the host does not know how far the cache reaches)
  computes in every step what the target computes. After a step only the last of these tokens may be
  missing: if all drafts of a round are accepted, the last was drawn but not computed. The next step
  computes it. Other requests find a block once the target has computed two tokens past its end
  (`num_behind`): a request that reaches its limit in a step of only decoding takes no part in that
  step's draft pass, so the step's token is missing, and so may be the last draft of the round
  before.
- `Eagle3` runs over exactly the rows that the target has computed, each with the token after it,
  also in steps without drafts: it never has to catch up.

Shape suffixes: B requests, K drafts, S slots, L tokens or blocks of a slot, T packed rows, V the
target's vocabulary, C a head's hidden size, N wanted rows; A, G some of the requests, W words.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.config import EngineConfig
from foretoken.drafting.base import Drafter, DrafterSetup, no_drafts, q_flags, select_requests
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
from foretoken.slots.plan import StepInput
from foretoken.slots.step import StepRequests, StepResult
from foretoken.slots.table import Array, SlotTable

from foretoken.ops import (  # isort: skip
    DRAFT, AttentionBatch, DraftBlock, DraftCache, DraftRound, ForwardOutput, LoadedStack, Noise,
    RoundStack, Rows, Rule, Stack,
)  # fmt: skip

BUILT_IN_HEADS = {"tiny-python": "tiny-python-eagle3", "smollm2-135m": "smollm2-135m-eagle3"}
_NO_LIMIT = 2**62  # more tokens than any request has
_FIRST = 2  # known tokens that a round in lock-step computes


class Autoregressive(Drafter):
    """Memory and passes of drafters that run a stack; a subclass adds the round and its pass.

    A drafter is `probabilistic` (q is kept for verification) or `greedy` (q is one-hot).

    Attributes:
        cache_shape: K, V and dtype of the q that it keeps for a slot; K = 0: none.
        follows_grammars: whether its tokens are the target's, so that a grammar's masks fit them.
        shared_cache: a `DraftCache` shared with other drafters; None: it makes its own.
    """

    options = frozenset({"model", "revision", "draft_sample_method"})
    follows_grammars = True
    shared_cache: DraftCache | None = None
    _pass_offset: ClassVar[int] = 0  # the pass for draft i uses row i - _pass_offset of `Round`

    def __init__(
        self, setup: DrafterSetup, sizes: CausalLM | Stack, stack: LoadedStack | ModuleNetwork
    ) -> None:
        """`sizes` has the shapes of the K/V that `stack` keeps."""
        self.config, self.backend, self.block_size = setup.config, setup.backend, setup.block_size
        self._sizes, self._stack = sizes, stack
        self.probabilistic = setup.speculation.draft_sample_method != "greedy"
        num_drafts = setup.speculation.num_drafts if self.probabilistic else 0
        self.cache_shape = (num_drafts, setup.vocab_size, stack.dtype)
        one = DraftCache.empty(1, *self.cache_shape, torch.device("meta"))
        self.cache_bytes = one.logits_SKV.nbytes + one.threshold_SK.nbytes + one.lse_SK.nbytes
        self.bytes_per_slot = self.cache_bytes
        shape = (sizes.layer_shapes, setup.block_size, stack.dtype)
        self.kv_bytes_per_block = KVPool.bytes_per_block(*shape)

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Allocate K/V for as many blocks as the target has, and q for every slot and the spare."""
        sizes, stack = self._sizes, self._stack
        self.slots, self.cache = slots, self.shared_cache if self.probabilistic else None
        if self.probabilistic and self.cache is None:
            count = len(slots.state.length_S)
            self.cache = DraftCache.empty(count, *self.cache_shape, sizes.device)
        shape = (sizes.layer_shapes, num_blocks, self.block_size)
        self.kv = KVPool(*shape, dtype=stack.dtype, device=sizes.device)
        self._rounds = stack if slots.on_host and isinstance(stack, RoundStack) else None
        self._matchers: dict[int, tuple[Matcher | None, int]] = {}  # with the tokens it has read

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero K/V of reused blocks if masked keys are multiplied, too: a NaN would spread."""
        if self._stack.multiplies_masked_keys:
            self.kv.clear(block_ids)

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._matchers.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        """Slots that have a grammar and have had drafts."""
        return self._matchers

    def has_grammar(self, slot: int) -> bool:
        """Whether the request's drafts must match a grammar; always False on a device."""
        may_follow = self.slots.on_host and self.follows_grammars
        return may_follow and self.slots.admitted[slot].has_grammar

    def _matcher(self, slot: int) -> Matcher | None:
        """The state of a request's output in its grammar; None: it became too complex.

        Its drafts are then unconstrained; accepted tokens still match the grammar.
        """
        admission = self.slots.admitted[slot]
        if slot not in self._matchers and admission.params.grammar is not None:
            self._matchers[slot] = admission.params.grammar.matcher(), admission.num_prompt
        matcher, num_read = self._matchers[slot]
        new = self.slots.text(slot, num_read).tolist()
        if matcher is not None and new:  # without new tokens it may be ahead, after drafts
            try:
                matcher.append(new)
            except RequestError:
                matcher = None
            self._matchers[slot] = matcher, num_read + len(new)
        return matcher

    def _mask(self, logits_BV: Tensor, slots: Sequence[int], drafts: Sequence[Tensor]) -> Tensor:
        """Remove from q the tokens that a request's grammar forbids after its drafts so far: p is
        0 there.

        For JSON by the embedded pair, K = 5, temperature 1: 3.1 accepted drafts per round; without
        this 0.3.
        """
        states = {b: self._matcher(slot) for b, slot in enumerate(slots)}
        matchers = {b: matcher for b, matcher in states.items() if matcher is not None}
        if not matchers:
            return logits_BV
        guided, size, columns = [*matchers], logits_BV.shape[1], [d.tolist() for d in drafts]
        so_far = [[column[b] for column in columns] for b in guided]
        mask_GW = fill_ahead([*matchers.values()], so_far, -(-size // 32))
        bit_GV = np.unpackbits(mask_GW.view(np.uint8), axis=1, bitorder="little")[:, :size]
        # A copy, because logits made in inference mode cannot be written to.
        logits_GV = logits_BV[guided].masked_fill(torch.from_numpy(bit_GV == 0), -torch.inf)
        return logits_BV.index_copy(0, torch.tensor(guided), logits_GV)

    @abstractmethod
    def _pass(self, batch: ForwardBatch, features: Features | None = None) -> ForwardOutput:
        """Run a batch; an EAGLE-3 head also reads `features`."""

    def _drafting(
        self, requests: DraftRequests, cache: DraftCache | None, hidden_SC: Tensor | None = None
    ) -> DraftRound:
        """The arguments of a native round, which makes all passes and draws in one call."""
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
        """Draw drafts [B, K], each from a pass over the one before it; -1 after a request's last.

        Args:
            first: the output that the first draft is drawn from.
            masked: whether all requests have grammars.
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
        """A block whose drafts all have a real q if there is a cache. At T=0 and under COUPLED that
        q is not read."""
        # The comparison `num_B > 0` takes 25 us on the host.
        alike = cache is None or (self.slots.on_host and all(num_B.tolist()))
        flags = (len(num_B), self.slots.device)
        real_q_B = q_flags(*flags, real=cache is not None) if alike else num_B > 0
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
        complete: by block, whether its K/V are complete (see the module's docstring).
    """

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """See `Autoregressive`; also track how far the cache reaches, by slot and by block."""
        super().allocate(slots, num_blocks)
        if self.network.ids is not None:  # a native round supports only one vocabulary
            self._rounds = None
        state = slots.state
        computed_S = torch.zeros_like(state.computed_S)
        self._num_computed_S: Array = computed_S.numpy()
        limit_S = torch.full_like(state.limit_S, _NO_LIMIT)
        own = state._replace(computed_S=computed_S, limit_S=limit_S)
        self._steps = self.backend.steps(own)  # the same tokens, other K/V
        self.complete = bytearray(num_blocks)

    def propose(self, requests: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`. Drafts end at the draft model's longest context."""
        slots, length_S = requests.slot_B.tolist(), self.slots.length_S
        end = self.model.max_model_len + 1  # the last draft is drawn, not computed
        pairs = zip(slots, requests.num_B.tolist(), strict=True)
        counts = [max(0, min(num, end - int(length_S[slot]))) for slot, num in pairs]
        wanted = [slot for slot, count in zip(slots, counts, strict=True) if count]
        if not wanted:
            return no_drafts(len(slots), self.model.device)
        for slot in wanted:
            self._skip_complete(slot)
        self._catch_up(wanted)
        # Coupled requests draw at random, too, but their q is not kept.
        samples = self.slots.draws_at_random(wanted)
        cache, num_B = self.cache if samples else None, torch.from_numpy(np.array(counts))
        requests = requests._replace(num_B=num_B, most=max(counts), samples=samples)
        drafting = set(wanted)
        kinds = [self.has_grammar(slot) if slot in drafting else None for slot in slots]
        token_BK = _draft_by_kind(requests, kinds, partial(self._round, cache))
        for slot in wanted:
            self._advance(slot, length_S[slot])
        real = [cache is not None and slot in drafting and self._keeps_q(slot) for slot in slots]
        real_q_B = torch.from_numpy(np.array(real))
        return DraftBlock(token_BK, num_B, cache if any(real) else None, real_q_B)

    def _round(self, cache: DraftCache | None, requests: DraftRequests, masked: bool) -> Tensor:
        slot_B, length_B = requests.slot_B, requests.position_B
        missing_B = length_B - torch.from_numpy(self._num_computed_S[slot_B.numpy()])
        first = self._pack(slot_B, missing_B, requests.most - 1)
        if self._rounds is not None and not masked:
            return self._rounds.draft(first, self.kv, self._drafting(requests, cache))
        places = self._steps.begin_round(requests, 1, self.model.max_model_len, self.block_size)
        return self._passes(requests, places, self._pass(first), cache, masked=masked)

    def _keeps_q(self, slot: int) -> bool:
        """Whether verification reads the q of the request's drafts."""
        request = self.slots.admitted[slot]
        return request.params.temperature > 0 and request.rule is not Rule.COUPLED

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Count the K/V of accepted drafts as computed; the last draft proposed never was."""
        for slot, outcome in result.decisions.items():
            if outcome.num_drafts:
                kept = min(outcome.num_accepted, outcome.num_drafts - 1)
                self._advance(slot, self._num_computed_S[slot] + kept)
        if not all(requests.step.decides_B):
            self._follow_prompts(requests.step)

    def _follow_prompts(self, step: StepInput) -> None:
        """Compute the chunks of unfinished prompts that the target has computed.

        Otherwise the first round after a long prompt would compute all of it, in one step that
        other requests wait for.
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
        """See `Autoregressive`; also remove these blocks' marks."""
        super().clear(block_ids)
        for block in block_ids:
            self.complete[block] = False

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        super().release(slot)
        self._num_computed_S[slot] = 0

    def take_back(self, slot: int, length: int) -> None:
        """Forget a slot's tokens after the first `length`, which have changed. Only for a slot that
        shares no block."""
        self._num_computed_S[slot] = min(self._num_computed_S[slot], length)

    def held_slots(self) -> Iterable[int]:
        """Slots with tokens that it has computed or read."""
        return [*np.flatnonzero(self._num_computed_S).tolist(), *super().held_slots()]

    def _skip_complete(self, slot: int) -> None:
        """Let a request that is new to its slot start after its leading complete blocks."""
        if self._num_computed_S[slot]:
            return
        size, last = self.block_size, self.slots.length_S[slot] - 1
        for block in self.slots.block_SL[slot, : last // size].tolist():
            if not self.complete[block]:
                break
            self._num_computed_S[slot] += size

    def _advance(self, slot: int, num_computed: int) -> None:
        """Set a request's number of computed leading tokens, and mark the blocks they fill."""
        size, first = self.block_size, self._num_computed_S[slot]
        self._num_computed_S[slot] = num_computed
        for block in self.slots.block_SL[slot, first // size : num_computed // size]:
            self.complete[block] = True

    def _pack(self, slot_B: Tensor, count_B: Tensor, ahead: int = 0) -> ForwardBatch:
        """A batch of `count_B` missing tokens of each request, with logits of each one's last."""
        tokens, total = StepTokens(slot_B, count_B, None, torch.zeros_like(count_B)), count_B.sum()
        sizes = PackSizes(int(total), len(slot_B), int(total), ahead)
        return self._steps.pack(tokens, sizes, self.block_size)

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Compute missing tokens until the rest fits one pass of the engine's token budget."""
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
        """Compute that many missing tokens of each slot."""
        if not counts:
            return
        numbers = np.array([[*counts], [*counts.values()]], dtype=np.int64)
        self._fill(self._pack(*torch.from_numpy(numbers)))
        for slot, count in counts.items():
            self._advance(slot, self._num_computed_S[slot] + count)


class LockstepDraftModel(_ModelDrafter):
    """A draft model on an asynchronous device, in lock-step with the target."""

    num_behind = 2

    def propose(self, requests: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`; every request takes part in every pass, at least as padding."""
        max_len, cache = self.model.max_model_len, self.cache if requests.samples else None
        places = self.slots.steps.begin_round(requests, _FIRST, max_len, self.block_size)
        token_BK = self._passes(requests, places, self._pass(places.first), cache)
        return self._block(token_BK, places.num_B, cache)

    def observes(self, requests: StepRequests) -> bool:
        """False if the step's own round of drafting has computed all that the target has."""
        return requests.others or not (requests.most_drafts and _decodes(requests))

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Compute the tokens that the target computed, other drafters' drafts included.

        In a step without drafts also compute, for each decoding request, the token before its last
        one: it is missing if it was the last draft of a round in which all were accepted.
        """
        if not requests.most_drafts:
            if _decodes(requests):
                batch = self._last_two(requests)
            elif 1 in requests.step.num_tokens_B:
                batch = self._with_prompts(requests)
        last = self.model.max_model_len - 1
        self._fill(batch._replace(position_T=batch.position_T.clamp(max=last)))

    def _last_two(self, requests: StepRequests) -> ForwardBatch:
        """For a step of only decoding: the last two tokens that the target has computed."""
        max_len, length_S = self.model.max_model_len, self.slots.state.length_S
        end_B = (length_S[requests.slot_D] - 1).clamp(min=1)  # the last has no block yet
        known = DraftRequests(requests.slot_D, torch.zeros_like(end_B), end_B, 1, requests.params)
        return self.slots.steps.begin_round(known, _FIRST, max_len, self.block_size).first

    def _with_prompts(self, requests: StepRequests) -> ForwardBatch:
        """For a step that also computes prompts: the tokens that the target computed, and for each
        decoding request one token before them. Before a chunk of a prompt no token is missing.

        Such steps are not captured and have no padding. The slots already hold the outcome, so
        `pack` gets them as they were before. A request that has just reached its limit takes part,
        since it may be a prompt with one token to generate. One that had reached it earlier
        computes its last tokens again.
        """
        state, num_tokens_B = self.slots.state, requests.num_tokens_B
        end_B = state.computed_S[requests.slot_B]
        start_B = (end_B - num_tokens_B - (num_tokens_B == 1).long()).clamp(min=0)
        before = state._replace(
            computed_S=state.computed_S.index_copy(0, requests.slot_B, start_B),
            limit_S=state.length_S + 1,
        )
        count_B, counts = end_B - start_B, requests.step.num_tokens_B
        tokens = StepTokens(requests.slot_B, count_B, None, torch.zeros_like(count_B))
        sizes = PackSizes(sum(counts) + counts.count(1), len(counts), max(*counts, _FIRST))
        return self.backend.steps(before).pack(tokens, sizes, self.block_size)


class Eagle3(Autoregressive):
    """An EAGLE-3 head. It keeps for each slot its hidden state of the last valid row: the first
    draft is drawn from that, and each further one after a pass of one row per request.

    Rows at and after a request's last known token belong to rejected drafts; their K/V are
    overwritten before another row reads them. Drafts are target ids, even if the head knows only
    some of these: so q is real, and `coupled` drafts share the target's noise.
    """

    reads_next_token = True
    _pass_offset = 1

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """The hidden states that the head reads, by its `config.json` or by the target's depth; and
        the target's output layer, if the head has none."""
        is_dummy, folder = config.load_format == "dummy", _head_folder(config)
        head = read_eagle3_config(folder)
        target = folder_of(config, config.model, config.revision, weights=False)
        with quiet_transformers():
            parsed = parse_config(target, read_config(target)["model_type"])
        depth = parsed.get_text_config().num_hidden_layers
        layers = head.aux_layers or default_aux_layers(depth)
        if not all(0 <= layer < depth for layer in layers):
            # It was trained on the last layer's output; the last state here is already normed.
            bound = f"a head that reads hidden states in 0..{depth - 1} of its target"
            remedy = f"It reads {list(layers)}; the target has {depth} layers."
            name = config.speculative_config and config.speculative_config.model
            raise ConfigError("speculative_config.model", name, bound, remedy)
        return TargetView(layers, head=not is_dummy and lacks_head(folder, head))

    def __init__(self, setup: DrafterSetup) -> None:
        self.head = _load_head(setup)
        stack = self.head.stack
        super().__init__(setup, stack, self.head)
        # A backend's own layout also has a buffer for logits.
        num_logits = 0 if self.head.multiplies_masked_keys else setup.vocab_size
        self.bytes_per_slot += (stack.hidden_size + num_logits) * self.head.dtype.itemsize

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """See `Autoregressive`; also allocate a hidden state for every slot."""
        super().allocate(slots, num_blocks)
        stack, dtype = self.head.stack, self.head.dtype
        shape = (len(slots.state.length_S), stack.hidden_size)
        self._hidden_SC = torch.zeros(shape, dtype=dtype, device=stack.device)

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Run the head over the target's rows, each with the token after it."""
        slots, slot_B = self.slots, requests.slot_B
        if self._rounds is not None:  # it leaves out rejected rows
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
        token_BK = _draft_by_kind(requests, kinds, partial(self._round, cache))
        return self._block(token_BK, requests.num_B, cache)

    def _round(self, cache: DraftCache | None, requests: DraftRequests, masked: bool) -> Tensor:
        slot_B, block_SL = requests.slot_B, self.slots.state.block_SL
        if self._rounds is not None and not masked:
            # The table of all slots: gathering its rows would take 45 us.
            known = AttentionBatch(slot_B, requests.position_B, block_SL, self.block_size)
            batch = ForwardBatch(slot_B, slot_B, slot_B, known)  # only `known` is read
            drafting = self._drafting(requests, cache, self._hidden_SC)
            return self._rounds.draft(batch, self.kv, drafting)
        longest = block_SL.shape[1] * self.block_size
        places = self.slots.steps.begin_round(requests, 1, longest, self.block_size)
        hidden_BC = self._hidden_SC[slot_B]
        first = ForwardOutput(self.head.logits(hidden_BC), (), hidden_BC)
        return self._passes(requests, places, first, cache, masked=masked)

    def _pass(self, batch: ForwardBatch, features: Features | None = None) -> ForwardOutput:
        return self.head.run(batch, self.kv, features=features)


def _draft_by_kind(
    requests: DraftRequests,
    kinds: Sequence[bool | None],
    draft: Callable[[DraftRequests, bool], Tensor],
) -> Tensor:
    """Drafts [B, K], -1 after a request's last. Requests with and without a grammar are drafted for
    separately, so that no request's text depends on whether others have one.

    Args:
        kinds: for each request whether it has a grammar, None if it has no drafts; or one value
            for all.
        draft: drafts for requests of one kind.
    """
    if len({*kinds}) == 1:
        return draft(requests, bool(kinds[0]))
    token_BK = torch.full((len(kinds), requests.most), -1)
    for kind in {*kinds} - {None}:
        index_A = torch.tensor([b for b, one in enumerate(kinds) if one == kind])
        some = select_requests(requests, index_A)
        if some.most:
            drawn_AK = draft(some, bool(kind))
            token_BK[index_A, : drawn_AK.shape[1]] = drawn_AK
    return token_BK


def _load_head(setup: DrafterSetup) -> LoadedStack:
    """Load the head; `ConfigError` if it was trained for a target of other sizes."""
    is_dummy, embedding = setup.config.load_format == "dummy", setup.embedding
    if embedding is None:
        raise IntegrityError("`eagle3` was given no embedding of its target")
    folder = _head_folder(setup.config)
    config = read_eagle3_config(folder)
    width = embedding.shape[1]
    for what, own, targets in (
        ("logits", config.vocab_size, setup.vocab_size),
        ("numbers in a hidden state of its target", config.target_hidden_size, width),
    ):
        if own != targets:
            bound = "a head that was trained for this target"
            remedy = f"It takes {own} {what}; the target has {targets}."
            raise ConfigError("speculative_config.model", setup.speculation.model, bound, remedy)
    return load_head(
        folder, config, embedding=embedding, backend=setup.backend, head=setup.head,
        # Blocks may reach past the end of the longest request.
        positions=setup.max_model_len + setup.block_size, most_rows=setup.config.max_num_seqs,
        dummy_seed=setup.config.seed if is_dummy else None,
    )  # fmt: skip


def _head_folder(config: EngineConfig) -> Path:
    """The head's folder; `ConfigError` if the options name none."""
    speculation = config.speculative_config
    if speculation is None:
        raise IntegrityError("`eagle3` was asked for a head without a configuration")
    name = speculation.model or BUILT_IN_HEADS.get(config.model)
    if name is None:
        remedy = "Name a folder or hub id of a head that was trained for this target."
        raise ConfigError("speculative_config.model", None, "an EAGLE-3 head", remedy)
    return folder_of(config, name, speculation.revision)


def _decodes(requests: StepRequests) -> bool:
    """Whether all requests of a step decode."""
    return requests.of_B is None and max(requests.step.num_tokens_B, default=1) == 1
