"""A loaded model: packed tokens in, raw logits out.

Belongs here: calling a Transformers module with our batch. Does not: reading checkpoints
(`checkpoint.py`, `loader.py`), deciding whether a model is supported (`guards.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool, LayerShape
from foretoken.errors import IntegrityError, UnsupportedModelError
from foretoken.models.attention import AttentionPass, attention_context
from foretoken.ops import Backend, Decoder, ForwardOutput
from foretoken.ops.passes import pass_begins
from foretoken.ops.steps import ForwardBatch


class TargetView(NamedTuple):
    """What a drafter wants to see of its target, beyond tokens.

    aux_layers: hidden states that every pass shall give, numbered as in `ForwardOutput.aux`
    head:       whether `CausalLM.head` is wanted: a target that keeps its weights in a layout of
                its own then holds the head twice
    """

    aux_layers: tuple[int, ...] = ()
    head: bool = False


class CausalLM:
    """A Transformers causal language model behind paged attention.

    config:        the Hugging Face configuration
    vocab_size:    columns of the logits (padding of the vocabulary included)
    max_model_len: most positions a request may use
    layer_shapes:  (H_kv, D, D_v) per layer: what a `KVPool` for this model needs
    view:          what a drafter will ask for, `aux_layers` of every `forward`
    fused:         runs in the module's stead, if given
    """

    def __init__(
        self,
        module: Any,
        *,
        backend: Backend,
        layer_shapes: list[LayerShape],
        max_model_len: int,
        view: TargetView,
        fused: Decoder | None,
    ) -> None:
        self.module = module
        self.fused = fused
        self.backend = backend
        self.config: Any = module.config
        self.vocab_size: int = self.config.get_text_config().vocab_size
        self.max_model_len = max_model_len
        self.layer_shapes = layer_shapes
        self.aux_layers = view.aux_layers
        self.dtype: torch.dtype = self.embedding.dtype
        self.device: torch.device = self.embedding.device
        self._head: Tensor | None = module.get_output_embeddings().weight if view.head else None

    @property
    def embedding(self) -> Tensor:
        """[V, hidden], the model's own tensor: the vectors of tokens."""
        weight: Tensor = self.module.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """[V, hidden], the model's own tensor: the output layer's weight, without its bias.

        Raises:
            IntegrityError: the model was loaded without `TargetView.head`.
        """
        if self._head is None:
            raise IntegrityError("The head was not kept: load the model with `TargetView.head`.")
        return self._head

    @property
    def multiplies_masked_keys(self) -> bool:
        """Whether a NaN in an unused part of a block would spread: such blocks must be cleared."""
        return self.fused is None

    def forward(self, batch: ForwardBatch, kv: KVPool) -> ForwardOutput:
        """Run the packed tokens and write their K/V into `kv`.

        Returns:
            Raw logits [N, V] in the model's dtype, one row per `batch.logit_row_N` in its order; N
            may be 0. And the hidden states of `aux_layers`, of all tokens.
        """
        rows = batch.logit_row_N
        if self.fused is not None:
            return self.fused.forward(batch.token_T, rows, kv.of(batch.attention), self.aux_layers)
        pass_begins()
        run = AttentionPass(batch, kv, self.backend)
        with torch.inference_mode(), attention_context(run):
            output = self.module(
                input_ids=batch.token_T.unsqueeze(0),
                position_ids=batch.position_T.unsqueeze(0),
                use_cache=False,
                # 0 keeps all rows and saves the gather (decode and verify steps).
                logits_to_keep=0 if len(rows) == len(batch.token_T) else rows,
                **({"output_hidden_states": True} if self.aux_layers else {}),
            )
        return ForwardOutput(output.logits.squeeze(0), self._aux(output, len(batch.token_T)))

    def _aux(self, output: Any, tokens: int) -> tuple[Tensor, ...]:
        """The hidden states asked for, each [tokens, hidden]; the self-check meets what is not."""
        if not self.aux_layers:
            return ()
        states = getattr(output, "hidden_states", None) or ()
        if len(states) != len(self.layer_shapes) + 1:
            raise UnsupportedModelError(
                f"`{self.config.model_type}` gives {len(states)} hidden states for "
                f"{len(self.layer_shapes)} layers: a drafter that reads them cannot draft for it."
            )
        width = self.embedding.shape[1]
        for i in self.aux_layers:
            if states[i].shape != (1, tokens, width):
                raise UnsupportedModelError(
                    f"`{self.config.model_type}` gives hidden states of shape "
                    f"{[*states[i].shape]} for {tokens} tokens. A drafter that reads one vector "
                    f"of {width} numbers, as in its embedding, for each token cannot draft for it: "
                    "take another `method`."
                )
        return tuple(states[i].squeeze(0) for i in self.aux_layers)
