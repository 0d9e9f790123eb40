"""A `CausalLM` stand-in whose logits come from a table of the last two tokens.

It remembers tokens where a real model keeps K/V, at the flat cache indices of the batch, and reads
its context back through the block tables: a drafter that feeds it wrongly gets wrong logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.cache.batch import ForwardBatch
from foretoken.cache.kv_pool import KVPool, LayerShape
from foretoken.lab.laws.chain import Chain


class TableModel:
    """Logits of `chain`, over vocabulary + 1 ids: the last is a beginning-of-text token."""

    fused = None
    multiplies_masked_keys = True

    def __init__(self, chain: Chain, num_positions: int, max_model_len: int = 4096) -> None:
        self.chain = chain
        self.vocab_size = chain.vocabulary
        self.bos = chain.vocabulary
        self.max_model_len = max_model_len
        self.layer_shapes: list[LayerShape] = []
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.memory = torch.full((num_positions,), -1)
        self.num_tokens_computed = 0

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        self.memory[batch.attention.slot_T] = batch.token_T
        self.num_tokens_computed += len(batch.token_T)
        previous_T = torch.full_like(batch.token_T, self.bos)
        for group in batch.attention.groups:
            before_bQ = group.position_bQ - 1
            block_bQ = group.block_bL.gather(1, before_bQ.clamp(min=0) // kv.block_size)
            held = self.memory[block_bQ * kv.block_size + before_bQ.clamp(min=0) % kv.block_size]
            assert not bool((held[before_bQ >= 0] < 0).any()), "read a position never computed"
            previous_T[group.token_index] = torch.where(before_bQ >= 0, held, self.bos).flatten()
        context_T = previous_T * (self.vocab_size + 1) + batch.token_T
        return self.chain.logits_CV[context_T[batch.logit_row_N]]
