"""What drafters that run a model share: memory for its K/V, and for the q of its drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import Drafter, DrafterSetup
from foretoken.errors import RequestError
from foretoken.models import CausalLM
from foretoken.models.eagle3 import Eagle3Head
from foretoken.ops import DraftCache
from foretoken.sampling.grammar import Matcher, fill_ahead
from foretoken.slots.table import Array, SlotTable


class Autoregressive(Drafter):
    """What drafters that run a model keep: its K/V by the target's block ids, and q by slot.

    `probabilistic` (q kept for verification) or `greedy` (one-hot).

    Attributes:
        cache_shape: K, V and dtype of the q that it keeps for a slot; K = 0: none.
        follows_grammars: whether its tokens are the target's, so that a grammar's masks fit them.
        shared_cache: such a cache, kept together with other drafters; None: it makes its own.
    """

    options = frozenset({"model", "revision", "draft_sample_method"})
    follows_grammars = True
    shared_cache: DraftCache | None = None

    def __init__(self, setup: DrafterSetup, model: CausalLM | Eagle3Head, vocab_size: int) -> None:
        """model: keeps K/V; vocab_size: tokens that q is over."""
        self.config, self.backend, self.block_size = setup.config, setup.backend, setup.block_size
        self._network = model
        self.probabilistic = setup.speculation.draft_sample_method != "greedy"
        num_drafts = setup.speculation.num_drafts if self.probabilistic else 0
        self.cache_shape = (num_drafts, vocab_size, model.dtype)
        one = DraftCache.empty(1, *self.cache_shape, torch.device("meta"))
        self.cache_bytes = one.logits_SKV.nbytes + one.threshold_SK.nbytes + one.lse_SK.nbytes
        self.bytes_per_slot = self.cache_bytes
        shape = (model.layer_shapes, setup.block_size, model.dtype)
        self.kv_bytes_per_block = KVPool.bytes_per_block(*shape)

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """K/V for as many blocks as the target has, and q for every slot, the spare too."""
        model, size = self._network, self.block_size
        self.slots, self.cache = slots, self.shared_cache if self.probabilistic else None
        if self.probabilistic and self.cache is None:
            count = len(slots.state.length_S)
            self.cache = DraftCache.empty(count, *self.cache_shape, model.device)
        shape = (model.layer_shapes, num_blocks, size)
        self.kv = KVPool(*shape, dtype=model.dtype, device=model.device)
        self._matchers: dict[int, tuple[Matcher | None, int]] = {}  # and tokens that were read

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

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._matchers.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        """Slots with a grammar that were drafted for."""
        return self._matchers

    def mask(self, logits_BV: Tensor, slots: Sequence[int], token_BK: Array) -> Tensor:
        """Leave out of q what no grammar allows after a request's drafts so far, where p is 0.

        Of JSON by the embedded pair, K = 5, temperature 1: 3.1 drafts accepted in a round; without
        this 0.3.
        """
        asked = {b: self._matcher(slot) for b, slot in enumerate(slots) if self.has_grammar(slot)}
        matchers = {b: matcher for b, matcher in asked.items() if matcher is not None}
        if matchers:  # a copy: logits that were made in inference mode cannot be written to
            guided, size = [*matchers], logits_BV.shape[1]
            so_far = token_BK[guided].tolist()
            mask_GW = fill_ahead([*matchers.values()], so_far, -(-size // 32))
            bit_GV = np.unpackbits(mask_GW.view(np.uint8), axis=1, bitorder="little")[:, :size]
            banned_GV = torch.from_numpy(bit_GV == 0)
            logits_GV = logits_BV[guided].masked_fill(banned_GV, -torch.inf)
            return logits_BV.index_copy(0, torch.tensor(guided), logits_GV)
        return logits_BV
