"""Drafters that run a stack: a small language model, or an EAGLE-3 head on the target's own states.

Their K/V lie by the target's block ids, so that accepting, rejecting and freeing need little here;
q of their drafts lies by slot. A round of drafting is one native call where there is one, else a
pass for each draft. In these passes all requests take part: what one that wants no more drafts
leaves in its blocks is what a rejected draft leaves, and is computed again before it counts. Where
its blocks end, the round's table leads to the spare's.

Blocks are shared between requests that begin with the same tokens. The drafter's half of one may be
missing: whoever filled the target's half may never have been drafted for.

- `DraftModel` (on a host) counts by slot how many leading tokens its cache holds, and catches up on
  what it missed in steps in which it was not asked. A block is marked `complete` once all of its
  positions were computed here from known tokens; a request that is new to its slot starts after its
  leading complete blocks. That is right: a block is in two tables only if all tokens up to its end
  are equal, so who computed it does not matter; drafts stand after all known tokens, hence in no
  complete block; and one that is handed out anew passes through `clear`, which removes the mark.
  Requests that share a block which is not complete each compute it; they write the same values.
- `LockstepDraftModel` (on a device, whose host does not know how far the cache reaches) computes in
  every step what the target computes. After it only the last of these tokens may be missing: the
  last draft of a round that was accepted whole was drawn, not computed. The next step computes it.
  A block is found by others once the target has computed two tokens past its end (`num_behind`):
  a request that reaches its limit in a step of decoding alone takes no part in the draft pass of
  that step, so the token of that step is missing, and the last draft of the round before may be.
- `Eagle3` runs over the very rows that the target has computed, each with the token after it, also
  in steps without drafts: there is never anything to catch up on.

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
from foretoken.drafting.base import Drafter, DrafterSetup, no_drafts, q_flags
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
_ALL = 2**62  # a limit that no request reaches
_FIRST = 2  # known tokens that a round in lock-step computes


class Autoregressive(Drafter):
    """What drafters that run a stack keep and share. A subclass has a round, and a pass of it.

    `probabilistic` (q kept for verification) or `greedy` (one-hot).

    Attributes:
        cache_shape: K, V and dtype of the q that it keeps for a slot; K = 0: none.
        follows_grammars: whether its tokens are the target's, so that a grammar's masks fit them.
        shared_cache: such a cache, kept together with other drafters; None: it makes its own.
    """

    options = frozenset({"model", "revision", "draft_sample_method"})
    follows_grammars = True
    shared_cache: DraftCache | None = None
    _behind: ClassVar[int] = 0  # the pass for a draft runs so many positions before its token's

    def __init__(
        self, setup: DrafterSetup, sizes: CausalLM | Stack, stack: LoadedStack | ModuleNetwork
    ) -> None:
        """sizes: of the K/V that `stack` keeps."""
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
        """K/V for as many blocks as the target has, and q for every slot, the spare too."""
        sizes, stack = self._sizes, self._stack
        self.slots, self.cache = slots, self.shared_cache if self.probabilistic else None
        if self.probabilistic and self.cache is None:
            count = len(slots.state.length_S)
            self.cache = DraftCache.empty(count, *self.cache_shape, sizes.device)
        shape = (sizes.layer_shapes, num_blocks, self.block_size)
        self.kv = KVPool(*shape, dtype=stack.dtype, device=sizes.device)
        self._rounds = stack if slots.on_host and isinstance(stack, RoundStack) else None
        self._matchers: dict[int, tuple[Matcher | None, int]] = {}  # and tokens that were read

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero K/V of blocks that change hands, if masked keys are multiplied with, too."""
        if self._stack.multiplies_masked_keys:
            self.kv.clear(block_ids)

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._matchers.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        """Slots with a grammar that were drafted for."""
        return self._matchers

    def has_grammar(self, slot: int) -> bool:
        """Whether the drafts of a request on a host keep to a grammar."""
        may_follow = self.slots.on_host and self.follows_grammars
        return may_follow and self.slots.admitted[slot].has_grammar

    def _matcher(self, slot: int) -> Matcher | None:
        """Where a request's output has come in its grammar; None: that became too complex to say.

        The drafts are any then; what is accepted still keeps to the grammar.
        """
        admission = self.slots.admitted[slot]
        if slot not in self._matchers and admission.params.grammar is not None:
            self._matchers[slot] = admission.params.grammar.matcher(), admission.num_prompt
        matcher, num_read = self._matchers[slot]
        new = self.slots.text(slot, num_read).tolist()
        if matcher is not None and new:  # else it may be ahead, after drafts of this round
            try:
                matcher.append(new)
            except RequestError:
                matcher = None
            self._matchers[slot] = matcher, num_read + len(new)
        return matcher

    def _mask(self, logits_BV: Tensor, slots: Sequence[int], drafts: Sequence[Tensor]) -> Tensor:
        """Leave out of q what no grammar allows after a request's drafts so far, where p is 0.

        Of JSON by the embedded pair, K = 5, temperature 1: 3.1 drafts accepted in a round; without
        this 0.3.
        """
        asked = {b: self._matcher(slot) for b, slot in enumerate(slots)}
        matchers = {b: matcher for b, matcher in asked.items() if matcher is not None}
        if not matchers:
            return logits_BV
        guided, size, columns = [*matchers], logits_BV.shape[1], [d.tolist() for d in drafts]
        so_far = [[column[b] for column in columns] for b in guided]
        mask_GW = fill_ahead([*matchers.values()], so_far, -(-size // 32))
        bit_GV = np.unpackbits(mask_GW.view(np.uint8), axis=1, bitorder="little")[:, :size]
        # A copy: logits that were made in inference mode cannot be written to.
        logits_GV = logits_BV[guided].masked_fill(torch.from_numpy(bit_GV == 0), -torch.inf)
        return logits_BV.index_copy(0, torch.tensor(guided), logits_GV)

    @abstractmethod
    def _pass(self, batch: ForwardBatch, features: Features | None = None) -> ForwardOutput:
        """Run a batch; a head begins with `features`."""

    def _drafting(
        self, asked: DraftRequests, cache: DraftCache | None, hidden_SC: Tensor | None = None
    ) -> DraftRound:
        """What a native round is told: it makes all passes and draws in one call."""
        fp64 = self.config.use_fp64_gumbel
        return DraftRound(asked.params, asked.slot_B, asked.num_B, cache, fp64, hidden_SC)

    def _passes(
        self,
        asked: DraftRequests,
        plan: Round,
        first: ForwardOutput,
        cache: DraftCache | None,
        *,
        masked: bool = False,
    ) -> Tensor:
        """Draft by draft, each from a pass over the one before it, for all requests until none
        wants more.

        Args:
            first: what the first draft is drawn from.
        """
        output, drafts, fp64 = first, list[Tensor](), self.config.use_fp64_gumbel
        slots = asked.slot_B.tolist() if masked else []
        for i in range(asked.most):
            if i:
                output = self._pass(plan.batch(i - self._behind, drafts[-1]), output.hidden_NC)
            logits_BV = output.logits_NV
            if masked:
                logits_BV = self._mask(logits_BV, slots, drafts)
            if cache is None and (asked.samples or self.slots.on_host):
                drafts.append(logits_BV.argmax(dim=-1))
                continue
            noise = Noise(plan.length_KB[i], plan.index_KB[i], DRAFT, fp64)
            logits = Rows(logits_BV, asked.params, asked.slot_B)
            drafts.append(self.backend.draft(logits, noise, cache))
        return self.slots.steps.join_drafts(drafts, plan.num_B)

    def _block(self, token_BK: Tensor, num_B: Tensor, cache: DraftCache | None) -> DraftBlock:
        """Drafts, all of them from a q if there is a cache: at T=0 and under COUPLED nothing of it
        is read."""
        # To compare on the host takes 25 us.
        alike = cache is None or (self.slots.on_host and all(num_B.tolist()))
        flags = (len(num_B), self.slots.device)
        real_q_B = q_flags(*flags, real=cache is not None) if alike else num_B > 0
        return DraftBlock(token_BK, num_B, cache, real_q_B)


class _ModelDrafter(Autoregressive):
    """A draft model, wherever it runs."""

    def __init__(self, setup: DrafterSetup, network: DraftNetwork | None = None) -> None:
        self.network = network or load_draft(setup)
        self.model = self.network.model
        super().__init__(setup, self.model, self.model.network)

    def _pass(self, batch: ForwardBatch, features: Features | None = None) -> ForwardOutput:
        return self.network.forward(batch, self.kv)

    def _fill(self, batch: ForwardBatch) -> None:
        """Run a batch for its K/V alone."""
        self._pass(batch._replace(logit_row_N=batch.logit_row_N[:0]))


class DraftModel(_ModelDrafter):
    """A draft model on a host.

    Attributes:
        complete: by block, its mark.
    """

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """See `Autoregressive`; and how far the cache reaches, by slot and by block."""
        super().allocate(slots, num_blocks)
        if self.network.ids is not None:  # a native round knows one vocabulary
            self._rounds = None
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
        wanted = [slot for slot, count in zip(slots, counts, strict=True) if count]
        if not wanted:
            return no_drafts(len(slots), self.model.device)
        for slot in wanted:
            self._skip_complete(slot)
        self._catch_up(wanted)
        # Coupled requests draw, if without keeping q.
        samples = self.slots.draws_at_random(wanted)
        cache, num_B = self.cache if samples else None, torch.from_numpy(np.array(counts))
        asked = asked._replace(num_B=num_B, most=max(counts), samples=samples)
        drafting = set(wanted)
        kinds = [self.has_grammar(slot) if slot in drafting else None for slot in slots]
        token_BK = _apart(asked, kinds, partial(self._round, cache))
        for slot in wanted:
            self._advance(slot, length_S[slot])
        real = [cache is not None and slot in drafting and self._keeps_q(slot) for slot in slots]
        real_q_B = torch.from_numpy(np.array(real))
        return DraftBlock(token_BK, num_B, cache if any(real) else None, real_q_B)

    def _round(self, cache: DraftCache | None, asked: DraftRequests, masked: bool) -> Tensor:
        slot_B, length_B = asked.slot_B, asked.position_B
        missing_B = length_B - torch.from_numpy(self._num_computed_S[slot_B.numpy()])
        first = self._pack(slot_B, missing_B, asked.most - 1)
        if self._rounds is not None and not masked:
            return self._rounds.draft(first, self.kv, self._drafting(asked, cache))
        plan = self._steps.begin_round(asked, 1, self.model.max_model_len, self.block_size)
        return self._passes(asked, plan, self._pass(first), cache, masked=masked)

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
        """See `Autoregressive`; and remove these blocks' marks."""
        super().clear(block_ids)
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

    def _pack(self, slot_B: Tensor, count_B: Tensor, ahead: int = 0) -> ForwardBatch:
        """So many missing tokens of each request, with the logits of the last one."""
        tokens, total = StepTokens(slot_B, count_B, None, torch.zeros_like(count_B)), count_B.sum()
        sizes = PackSizes(int(total), len(slot_B), int(total), ahead)
        return self._steps.pack(tokens, sizes, self.block_size)

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
        self._fill(self._pack(*torch.from_numpy(numbers)))
        for slot, count in counts.items():
            self._advance(slot, self._num_computed_S[slot] + count)


class LockstepDraftModel(_ModelDrafter):
    """A draft model on an asynchronous device: its cache follows the target's."""

    num_behind = 2

    def propose(self, asked: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`; every request takes part in every pass, if only as padding."""
        max_len, cache = self.model.max_model_len, self.cache if asked.samples else None
        plan = self.slots.steps.begin_round(asked, _FIRST, max_len, self.block_size)
        token_BK = self._passes(asked, plan, self._pass(plan.first), cache)
        return self._block(token_BK, plan.num_B, cache)

    def observes(self, requests: StepRequests) -> bool:
        """Not where a round of drafting has computed all that the target has."""
        return requests.others or not (requests.most_drafts and _decodes(requests))

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Compute what the target computed, drafts of other drafters too.

        In a step without drafts, also the token before the last one of each request that decodes:
        no pass has computed it if it was the last draft of a round that was accepted whole.
        """
        if not requests.most_drafts:
            if _decodes(requests):
                batch = self._last_two(requests)
            elif 1 in requests.step.num_tokens_B:
                batch = self._with_prompts(requests)
        last = self.model.max_model_len - 1
        self._fill(batch._replace(position_T=batch.position_T.clamp(max=last)))

    def _last_two(self, requests: StepRequests) -> ForwardBatch:
        """Of a step of decoding alone: the last two tokens that the target has computed."""
        max_len, length_S = self.model.max_model_len, self.slots.state.length_S
        end_B = (length_S[requests.slot_D] - 1).clamp(min=1)  # the last has no block yet
        known = DraftRequests(requests.slot_D, torch.zeros_like(end_B), end_B, 1, requests.params)
        return self.slots.steps.begin_round(known, _FIRST, max_len, self.block_size).first

    def _with_prompts(self, requests: StepRequests) -> ForwardBatch:
        """Of a step that also computes prompts: what the target computed, and one token before
        that of each request that decodes; of a chunk of a prompt nothing before it is missing.

        Such steps are not captured, and have no padding. The slots hold the outcome already, so
        `pack` is given them as they were. A request that has just reached its limit takes part: it
        may be a prompt of which one token was asked for. One that had reached it before computes
        its last tokens again.
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
    """An EAGLE-3 head. By slot is kept what it put out in the last row that counts: the first draft
    is drawn from that, and each further one after a pass of one row a request.

    Rows at and after a request's last known token are of rejected drafts; what they leave in the
    cache is written again before another row reads it. Drafts are drawn by the target's ids, also
    where the head knows only some of them: q is real, and `coupled` drafts share the target's
    noise.
    """

    reads_next_token = True
    _behind = 1

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """Hidden states that the head reads, by its `config.json` or by the target's depth; and
        the target's output layer, if it has none."""
        is_dummy, folder = config.load_format == "dummy", _head_folder(config)
        head = read_eagle3_config(folder)
        target = folder_of(config, config.model, config.revision, weights=False)
        with quiet_transformers():
            parsed = parse_config(target, read_config(target)["model_type"])
        depth = parsed.get_text_config().num_hidden_layers
        layers = head.aux_layers or default_aux_layers(depth)
        if not all(0 <= layer < depth for layer in layers):
            # Trained on what leaves the last layer; here the last state is normed already.
            bound = f"a head that reads hidden states in 0..{depth - 1} of its target"
            remedy = f"It reads {list(layers)}; the target has {depth} layers."
            name = config.speculative_config and config.speculative_config.model
            raise ConfigError("speculative_config.model", name, bound, remedy)
        return TargetView(layers, head=not is_dummy and lacks_head(folder, head))

    def __init__(self, setup: DrafterSetup) -> None:
        self.head = _load_head(setup)
        stack = self.head.stack
        super().__init__(setup, stack, self.head)
        # A backend's own has a room for logits, too.
        row_numbers = 0 if self.head.multiplies_masked_keys else setup.vocab_size
        self.bytes_per_slot += (stack.hidden_size + row_numbers) * self.head.dtype.itemsize

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """See `Autoregressive`; and a hidden state for every slot."""
        super().allocate(slots, num_blocks)
        stack, count = self.head.stack, len(slots.state.length_S)
        self._hidden_SC = torch.zeros(
            count, stack.hidden_size, dtype=self.head.dtype, device=stack.device
        )

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Run the head over the target's rows, each with the token after it."""
        slots, slot_B = self.slots, requests.slot_B
        if self._rounds is not None:  # and not over what was rejected
            length_B = [int(slots.length_S[slot]) for slot in requests.step.slot_B]
            outcome = Outcome(slots.state.token_SL, length_B, slot_B, self._hidden_SC)
            self._rounds.observe(batch, self.kv, result.aux, outcome)
            return
        token_T, row_B = slots.steps.shift(slot_B, batch.attention, len(batch.token_T))
        batch = batch._replace(token_T=token_T, logit_row_N=row_B)
        output: Any = self.head.run(batch, self.kv, features=result.aux, logits=False)
        self._hidden_SC.index_copy_(0, slot_B, output.hidden_NC)

    def propose(self, asked: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`."""
        if asked.most == 0:
            return no_drafts(len(asked.slot_B), self.slots.device)
        cache, kinds = self.cache if asked.samples else None, [False]
        if self.slots.on_host:
            kinds = [self.has_grammar(slot) for slot in asked.slot_B.tolist()]
        token_BK = _apart(asked, kinds, partial(self._round, cache))
        return self._block(token_BK, asked.num_B, cache)

    def _round(self, cache: DraftCache | None, asked: DraftRequests, masked: bool) -> Tensor:
        slot_B, block_SL = asked.slot_B, self.slots.state.block_SL
        if self._rounds is not None and not masked:
            # Of all slots: to gather rows of the table would take 45 us.
            known = AttentionBatch(slot_B, asked.position_B, block_SL, self.block_size)
            batch = ForwardBatch(slot_B, slot_B, slot_B, known)  # of which `known` alone is read
            drafting = self._drafting(asked, cache, self._hidden_SC)
            return self._rounds.draft(batch, self.kv, drafting)
        longest = block_SL.shape[1] * self.block_size
        plan = self.slots.steps.begin_round(asked, 1, longest, self.block_size)
        hidden_BC = self._hidden_SC[slot_B]
        first = ForwardOutput(self.head.logits(hidden_BC), (), hidden_BC)
        return self._passes(asked, plan, first, cache, masked=masked)

    def _pass(self, batch: ForwardBatch, features: Features | None = None) -> ForwardOutput:
        return self.head.run(batch, self.kv, features=features)


def _apart(
    asked: DraftRequests,
    kinds: Sequence[bool | None],
    draft: Callable[[DraftRequests, bool], Tensor],
) -> Tensor:
    """Drafts [B, K], -1 after a request's last. Those of a kind are drafted for apart: no request's
    text may depend on what others ask for.

    Args:
        kinds: of each request, whether it has a grammar; None: it has no drafts. One alone is that
            of all.
        draft: for requests of one kind.
    """
    if len({*kinds}) == 1:
        return draft(asked, bool(kinds[0]))
    token_BK = torch.full((len(kinds), asked.most), -1)
    for kind in {*kinds} - {None}:
        index_A = torch.tensor([b for b, one in enumerate(kinds) if one == kind])
        slot_A, num_A, position_A = (column[index_A] for column in asked[:3])
        if most := int(num_A.max()):
            some = asked._replace(slot_B=slot_A, num_B=num_A, position_B=position_A, most=most)
            drawn_AK = draft(some, bool(kind))
            token_BK[index_A, : drawn_AK.shape[1]] = drawn_AK
    return token_BK


def _load_head(setup: DrafterSetup) -> LoadedStack:
    """Load the head; `ConfigError` unless it was made for a target of this shape."""
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
        # Blocks may reach further than the longest request.
        positions=setup.max_model_len + setup.block_size, most_rows=setup.config.max_num_seqs,
        dummy_seed=setup.config.seed if is_dummy else None,
    )  # fmt: skip


def _head_folder(config: EngineConfig) -> Path:
    """Where the head is; `ConfigError` if it is not said."""
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
