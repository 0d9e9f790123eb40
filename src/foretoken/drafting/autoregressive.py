"""What drafters that run a model share: memory for its K/V, and for the q of its drafts."""

from __future__ import annotations

from typing import Any

import torch

from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import Drafter, DrafterSetup
from foretoken.models import CausalLM
from foretoken.models.eagle3 import Eagle3Head
from foretoken.ops import DraftCache
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.table import SlotTable


class Autoregressive(Drafter):
    """What drafters that run a model keep: its K/V by the target's block ids, and q by slot.

    `probabilistic` (q kept for verification) or `greedy` (one-hot).

    Attributes:
        cache_shape: K, V and dtype of the q that it keeps for a slot; K = 0: none.
        shared_cache: such a cache, kept together with other drafters; None: it makes its own.
    """

    options = frozenset({"model", "revision", "draft_sample_method"})
    slots: Any
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

    def allocate(self, slots: SlotTable | DeviceSlotTable, num_blocks: int) -> None:
        """K/V for as many blocks as the target has, and q for every slot, the spare too."""
        model, size = self._network, self.block_size
        self.slots, self.cache = slots, self.shared_cache if self.probabilistic else None
        if self.probabilistic and self.cache is None:
            count = len(slots.state.length_S)
            self.cache = DraftCache.empty(count, *self.cache_shape, model.device)
        shape = (model.layer_shapes, num_blocks, size)
        self.kv = KVPool(*shape, dtype=model.dtype, device=model.device)
