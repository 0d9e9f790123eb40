"""A loaded model: packed tokens in, raw logits out.

Belongs here: calling a Transformers module with our batch. Does not: reading checkpoints
(`checkpoint.py`, `loader.py`), deciding whether a model is supported (`guards.py`).

Shape suffixes: T packed tokens, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.cache.batch import ForwardBatch
from foretoken.cache.kv_pool import KVPool, LayerShape
from foretoken.models.attention import AttentionPass, attention_context
from foretoken.models.fused_decoder import FusedDecoder
from foretoken.ops import Backend

__all__ = ["CausalLM"]


class CausalLM:
    """A Transformers causal language model behind paged attention.

    config:        the Hugging Face configuration
    vocab_size:    columns of the logits (padding of the vocabulary included)
    max_model_len: most positions a request may use
    layer_shapes:  (H_kv, D, D_v) per layer: what a `KVPool` for this model needs
    num_parameters: tied ones once
    fused:         runs in the module's stead, if given
    """

    def __init__(
        self,
        module: Any,
        *,
        backend: Backend,
        layer_shapes: list[LayerShape],
        max_model_len: int,
        num_parameters: int,
        dtype: torch.dtype,
        device: torch.device,
        fused: FusedDecoder | None = None,
    ) -> None:
        self.module = module
        self.fused = fused
        self.backend = backend
        self.config: Any = module.config
        self.vocab_size: int = self.config.get_text_config().vocab_size
        self.max_model_len = max_model_len
        self.num_parameters = num_parameters
        self.layer_shapes = layer_shapes
        self.dtype = dtype
        self.device = device

    @property
    def multiplies_masked_keys(self) -> bool:
        """Whether a NaN in an unused part of a block would spread: such blocks must be cleared."""
        return self.fused is None

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """Run the packed tokens, write their K/V into `kv`, and return raw logits.

        Returns:
            [N, V] in the model's dtype, one row per `batch.logit_row_N` in its order; N may be 0.
        """
        if self.fused is not None:
            return self.fused.forward(batch, kv)
        run = AttentionPass(batch.attention, kv, self.backend)
        return self._run(batch, run)

    def _run(self, batch: ForwardBatch, run: AttentionPass) -> Tensor:
        rows = batch.logit_row_N
        with torch.inference_mode(), attention_context(run):
            output = self.module(
                input_ids=batch.token_T.unsqueeze(0),
                position_ids=batch.position_T.unsqueeze(0),
                use_cache=False,
                # 0 keeps all rows and saves the gather (decode and verify steps).
                logits_to_keep=0 if len(rows) == len(batch.token_T) else rows,
            )
        logits: Tensor = output.logits
        return logits.squeeze(0)
