"""A loaded model, run as a backend's stack or as Transformers' own module with our attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from foretoken.cache.kv_pool import LayerShape
from foretoken.errors import IntegrityError, UnsupportedModelError
from foretoken.models.attention import AttentionPass, attention_context
from foretoken.ops import Backend
from foretoken.ops.passes import pass_begins

from foretoken.ops.stack import (  # isort: skip
    KV, Dense, ForwardOutput, LoadedStack, Stack, Weight, device_of,
)  # fmt: skip
from foretoken.ops.steps import ForwardBatch


class TargetView(NamedTuple):
    """What a drafter reads of its target in addition to tokens.

    aux_layers: hidden states that every pass must return, numbered as in `ForwardOutput.aux`
    head:       whether `CausalLM.head` is needed; a target that changes the layout of its weights
                then holds the head twice
    module:     whether `CausalLM.module` is needed, to run it outside of the engine's steps
    """

    aux_layers: tuple[int, ...] = ()
    head: bool = False
    module: bool = False


class ModuleNetwork:
    """Transformers' own module with paged attention, for families that no backend runs itself."""

    multiplies_masked_keys: ClassVar[bool] = True

    def __init__(self, module: Any, backend: Backend) -> None:
        self.module, self._backend = module, backend

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.module.get_input_embeddings().weight.dtype
        return dtype

    def run(self, batch: ForwardBatch, kv: KV, aux_layers: Sequence[int] = ()) -> ForwardOutput:
        """See `LoadedStack.run`."""
        pass_begins()
        row_N, num_tokens = batch.logit_row_N, len(batch.token_T)
        with torch.inference_mode(), attention_context(AttentionPass(batch, kv, self._backend)):
            output = self.module(
                input_ids=batch.token_T.unsqueeze(0),
                position_ids=batch.position_T.unsqueeze(0),
                use_cache=False,
                # 0 keeps all rows without a gather (decode and verify steps).
                logits_to_keep=0 if len(row_N) == num_tokens else row_N,
                **({"output_hidden_states": True} if aux_layers else {}),
            )
        aux = self._hidden_states(output, num_tokens, aux_layers) if aux_layers else ()
        return ForwardOutput(output.logits.squeeze(0), aux)

    def _hidden_states(
        self, output: Any, num_tokens: int, aux_layers: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """The hidden states of these layers, each [num_tokens, hidden].

        Raises `UnsupportedModelError` if the number or a shape of the module's hidden states is
        wrong. The self-check while loading calls this method, so the error precedes all requests.
        """
        config, states = self.module.config, getattr(output, "hidden_states", None) or ()
        layers = config.get_text_config().num_hidden_layers
        if len(states) != layers + 1:
            raise UnsupportedModelError(
                f"`{config.model_type}` gives {len(states)} hidden states for {layers} layers. No "
                "drafter that reads hidden states can draft for this model: take another `method`."
            )
        width = self.module.get_input_embeddings().weight.shape[1]
        for i in aux_layers:
            if states[i].shape != (1, num_tokens, width):
                raise UnsupportedModelError(
                    f"`{config.model_type}` gives hidden states of shape "
                    f"{[*states[i].shape]} for {num_tokens} tokens. A drafter that reads hidden "
                    f"states needs one vector of {width} numbers, the size of the model's "
                    "embedding, for each token: take another `method`."
                )
        return tuple(states[i].squeeze(0) for i in aux_layers)


class CausalLM:
    """A causal language model.

    config, generation_config: Transformers' objects; `generation_config` may be None
    network:       runs the model
    vocab_size:    columns of the logits, padding of the vocabulary included
    max_model_len: the largest number of positions of a request
    layer_shapes:  (H_kv, D, D_v) per layer, for a `KVPool`
    aux_layers:    hidden states that every pass returns
    embedding:     [V, hidden], the vectors of the tokens
    dtype:         of keys, values, hidden states and logits
    module:        Transformers' module, if it runs the model or `TargetView.module` asks for it;
                   else None
    """

    def __init__(
        self,
        module: Any,
        network: LoadedStack | ModuleNetwork,
        *,
        backend: Backend,
        layer_shapes: list[LayerShape],
        max_model_len: int,
        view: TargetView,
        stack: Stack | None = None,
    ) -> None:
        """
        Args:
            module: the module that `network` runs, or a stack's twin (see `families.py`). If the
                module has no weights, `view.module` must be False.
            stack: the stack before `network` changed the layout of the weights; None: take the
                embedding and the head from `module`.
        """
        keeps_module = isinstance(network, ModuleNetwork) or view.module
        self.module: Any = module if keeps_module else None
        self.network, self.backend = network, backend
        self.config: Any = module.config
        self.generation_config: Any = getattr(module, "generation_config", None)
        self.vocab_size: int = self.config.get_text_config().vocab_size
        self.max_model_len, self.layer_shapes = max_model_len, layer_shapes
        self.aux_layers = view.aux_layers
        if stack is None:
            inputs, outputs = module.get_input_embeddings(), module.get_output_embeddings()
            self.embedding: Weight = Dense(inputs.weight)
            self._head: Weight | None = Dense(outputs.weight) if view.head else None
        else:
            self.embedding, self._head = stack.embedding, stack.head.weight if view.head else None
        self.dtype: torch.dtype = network.dtype
        self.device: torch.device = device_of(self.embedding)

    @property
    def head(self) -> Weight:
        """The weight of the output layer, [V, hidden], without its bias; `IntegrityError` if the
        model was loaded without `TargetView.head`."""
        if self._head is None:
            raise IntegrityError("The head was not kept: load the model with `TargetView.head`.")
        return self._head

    @property
    def multiplies_masked_keys(self) -> bool:
        """Whether a NaN in an unused part of a cache block would spread to results, so that blocks
        must be cleared before they are reused."""
        return self.network.multiplies_masked_keys

    @property
    def runs_in_kernels(self) -> bool:
        """Whether a backend's own kernels run the model, not stock operators or a module."""
        return not self.multiplies_masked_keys

    def forward(self, batch: ForwardBatch, kv: KV) -> ForwardOutput:
        """Run the packed tokens and write their K/V into `kv`.

        Returns raw logits [N, V] in the model's dtype, one row for each of `batch.logit_row_N` (N
        may be 0), and the hidden states `aux_layers` of all tokens.
        """
        return self.network.run(batch, kv, self.aux_layers)
