"""A stand-in for `CausalLM`: its logits come from a table of the last two tokens.

It remembers tokens where a real model keeps K/V, at the flat cache indices of the batch, and reads
its context back through the block tables: a drafter that feeds it wrongly gets wrong logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from foretoken.cache.kv_pool import KVPool, LayerShape
from foretoken.lab.laws.chain import Chain
from foretoken.ops import ForwardOutput
from foretoken.ops.passes import write_index
from foretoken.ops.steps import ForwardBatch


class TableModel:
    """Logits of `chain`, over vocabulary + 1 ids: the last is a beginning-of-text token."""

    multiplies_masked_keys = True

    def __init__(self, chain: Chain, num_positions: int, max_model_len: int = 4096) -> None:
        self.network, self.chain = self, chain
        self.vocab_size = chain.vocabulary
        self.bos = chain.vocabulary
        self.max_model_len = max_model_len
        self.layer_shapes: list[LayerShape] = []
        self.dtype = chain.logits_CV.dtype
        self.device = torch.device("cpu")
        self.memory = torch.full((num_positions,), -1)
        self.num_tokens_computed = 0

    def forward(self, batch: ForwardBatch, kv: KVPool) -> ForwardOutput:
        attention = batch.attention
        sizes = (len(batch.token_T), len(self.memory))
        self.memory[write_index(attention, *sizes)] = batch.token_T
        self.num_tokens_computed += len(batch.token_T)
        first_T = batch.position_T == 0
        held_T = self.memory[
            write_index(replace(attention, length_B=attention.length_B - 1), *sizes)
        ]
        assert not bool((held_T[~first_T] < 0).any()), "read a position never computed"
        previous_T = torch.where(first_T, self.bos, held_T)
        context_T = previous_T * (self.vocab_size + 1) + batch.token_T
        return ForwardOutput(self.chain.logits_CV[context_T[batch.logit_row_N]])
