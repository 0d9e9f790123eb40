"""A whole forward pass of a Llama-like model in few kernels.

A layer is five launches: q, k and v; attention with everything before it; the output layer, which
adds to the residual stream and prepares the next norm; gate and up with SiLU; the layer that adds
them. Few rows are bound by the memory's speed, and each kernel starts while the one before it ends.
From 65 rows on cuBLAS multiplies, with small kernels between its products.

Belongs here: which modules it can stand in for, what it takes from them, and the pass. Whether it
is right is decided by the self-check in `models/guards.py`, as for every model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.ops.backends.triton.attention import (
    MOST_NEW,
    HeadInputs,
    attend_new,
    attention,
    write_new,
)
from foretoken.ops.backends.triton.attention.attend import prepare
from foretoken.ops.backends.triton.compiled import zero_if_noted
from foretoken.ops.backends.triton.decoder.products import Linear, Products, ResidualStream, embed
from foretoken.ops.backends.triton.decoder.tiles import MOST_ROWS
from foretoken.ops.backends.triton.launch import overlaps
from foretoken.ops.checks import check_attention_batch

from foretoken.ops.decoder import (  # isort: skip
    AttentionCall, ForwardOutput, LayerKV, ModelKV, UnfitError, check_common_block,
)  # fmt: skip
from foretoken.ops.types import AttentionOptions, PagedKV

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_HEAD = 256


class Layer(NamedTuple):
    """One block: attention, then a gated layer, each after an RMSNorm and added to the stream.

    attention_gain_H, mlp_gain_H: weights of the norms before attention and before the gated layer
    heads:   what is done to q and k
    options: how it attends
    """

    attention_gain_H: Tensor
    qkv: Linear
    heads: HeadInputs
    options: AttentionOptions
    o: Linear
    mlp_gain_H: Tensor
    gate_up: Linear
    down: Linear


def check_fit(module: Any, calls: Sequence[AttentionCall]) -> None:
    """Raise `UnfitError` unless the decoder implements all that the module has."""
    check_common_block(module)
    weight, (_, key_size, value_size) = module.lm_head.weight, calls[0].shape
    check_weight(weight, key_size)
    sizes = {call.shape for call in calls}
    if len(sizes) > 1 or key_size != value_size:
        raise UnfitError(f"heads of sizes {sorted(sizes)}: not one size")
    for name, parameter in module.named_parameters():
        same = parameter.dtype is weight.dtype and parameter.device == weight.device
        if not (same and parameter.is_contiguous()):
            raise UnfitError(f"`{name}` is not contiguous {weight.dtype} on {weight.device}")


def check_weight(weight: Tensor, head_size: int) -> None:
    """Raise `UnfitError` unless kernels can run on weights like this, with heads of this size."""
    if weight.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise UnfitError(f"weights are on {weight.device}, not on a GPU")
    if weight.dtype not in _DTYPES:
        raise UnfitError(f"weights are {weight.dtype}, not bfloat16, float16 or float32")
    if head_size > _LARGEST_HEAD:
        raise UnfitError(f"heads of sizes up to {head_size}: more than {_LARGEST_HEAD}")


def linear_of(layer: nn.Linear) -> Linear:
    """A layer as it is."""
    return Linear(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())


def merge(layers: Sequence[nn.Linear]) -> Linear:
    """Layers that read the same rows as one. Their weights become views of the one matrix, so that
    the model is never held twice."""
    weight_NK = torch.cat([layer.weight.detach() for layer in layers])
    views = weight_NK.split([layer.out_features for layer in layers])
    for layer, view in zip(layers, views, strict=True):
        layer.weight = nn.Parameter(view, requires_grad=False)
    if all(layer.bias is None for layer in layers):
        return Linear(weight_NK)
    biases = [
        view.new_zeros(len(view)) if layer.bias is None else layer.bias.detach()
        for layer, view in zip(layers, views, strict=True)
    ]
    return Linear(weight_NK, torch.cat(biases))


def take_layer(block: nn.Module, call: AttentionCall, angles: tuple[Tensor, Tensor]) -> Layer:
    """A block's weights; its q, k and v, and its gate and up, are merged.

    Args:
        angles: cosines and sines, see `rotary_angles`.
    """
    parts: Any = block
    attention, mlp = parts.self_attn, parts.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    heads = HeadInputs(*angles)
    if q_norm is not None:
        heads = HeadInputs(
            *angles, q_norm.weight.detach(), k_norm.weight.detach(), q_norm.variance_epsilon
        )
    return Layer(
        parts.input_layernorm.weight.detach(),
        merge((attention.q_proj, attention.k_proj, attention.v_proj)),
        heads,
        AttentionOptions(attention.scaling, call.sliding_window),
        linear_of(attention.o_proj),
        parts.post_attention_layernorm.weight.detach(),
        merge((mlp.gate_proj, mlp.up_proj)),
        linear_of(mlp.down_proj),
    )


def rotary_angles(frequency_R: Tensor, scale: float, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, multiplied by the scale: float32 [P, R / 2]."""
    position_P = torch.arange(positions, device=frequency_R.device, dtype=torch.float32)
    angle_PR = torch.outer(position_P, frequency_R.float())
    return angle_PR.cos().mul_(scale), angle_PR.sin().mul_(scale)


class FusedDecoder:
    """The `Decoder` of this backend. It shares the module's weights: after it was built, q, k and v
    of the module are views of one matrix, and so are gate and up.

    Everything it does may be captured in a CUDA graph.

    Args:
        positions: as in `Backend.decoder`: kernels read angles of all of them.
        deterministic: in passes of up to 16 tokens, a token's logits are the same to the bit
            whatever runs next to it: greedy text is then equal with and without speculation.

    Raises:
        UnfitError: the module has something that it does not implement.
    """

    def __init__(
        self,
        module: Any,
        calls: Sequence[AttentionCall],
        positions: int = 0,
        *,
        deterministic: bool = False,
    ) -> None:
        check_fit(module, calls)
        model = module.model
        self._table_VH: Tensor = model.embed_tokens.weight.detach()
        rotary = model.rotary_emb
        positions = max(positions, module.config.max_position_embeddings)
        angles = rotary_angles(rotary.inv_freq, rotary.attention_scaling, positions)
        self._layers = [
            take_layer(block, call, angles) for block, call in zip(model.layers, calls, strict=True)
        ]
        self._gain_H: Tensor = model.norm.weight.detach()
        self._head = linear_of(module.lm_head)
        self._query_heads: int = module.config.num_attention_heads
        self._products = Products(
            self._table_VH.device, self._table_VH.dtype, model.norm.variance_epsilon, deterministic
        )

    def drop_module_weights(self) -> None:
        """See `Decoder.drop_module_weights`: none is held twice."""

    @zero_if_noted
    @torch.no_grad()
    def forward(
        self, token_T: Tensor, logit_row_N: Tensor, kv: ModelKV, aux_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """See `Decoder.forward`: in the dtype of the weights."""
        batch, keys, values = kv
        check_attention_batch(batch, len(token_T), keys[0])
        if not len(keys) == len(values) == len(self._layers):
            raise ConfigError("keys", len(keys), f"tensors of {len(self._layers)} layers")
        for options in {layer.options for layer in self._layers}:
            prepare(batch, len(token_T), self._query_heads, keys[0], values[0], options)
        gains = [layer.attention_gain_H for layer in self._layers] + [self._gain_H]
        stream = ResidualStream(self._products, embed(token_T, self._table_VH), gains[0])
        aux = {0: stream.state_TH}
        # After the last layer's K/V only rows whose logits are wanted go on. Of a prompt that is
        # one: without the rest, 8 192 tokens of an 8B shape are 2.8 % fewer products.
        last = len(self._layers)
        narrow = len(logit_row_N) < len(token_T) and last not in aux_layers
        for i, (layer, key, value) in enumerate(zip(self._layers, keys, values, strict=True), 1):
            attended_TC = attend(stream.project(layer.qkv), layer, PagedKV(batch, key, value))
            if narrow and i == last:
                attended_TC = attended_TC[logit_row_N]
                stream.narrow(logit_row_N)
            if not len(attended_TC):
                break
            stream.add(layer.o, attended_TC, layer.mlp_gain_H)
            stream.add(layer.down, stream.gate(layer.gate_up), gains[i], keep=i in aux_layers)
            aux[i] = stream.state_TH
        if last in aux_layers:
            aux[last] = stream.normed()
        every = narrow or len(logit_row_N) == len(token_T)
        logits_NV = stream.head(self._head, None if every else logit_row_N)
        return ForwardOutput(logits_NV, tuple(aux[i] for i in aux_layers))


def attend(qkv_TW: Tensor, layer: Layer, kv: LayerKV) -> Tensor:
    """Write the new tokens' K and V and attend to all: [T, H * D]."""
    batch, keys, values = kv
    if 1 <= batch.most_queries <= MOST_NEW:
        size = keys.shape[3]
        out_TC = qkv_TW.new_empty(len(qkv_TW), qkv_TW.shape[1] - 2 * keys.shape[2] * size)
        overlap = len(qkv_TW) <= MOST_ROWS and overlaps(qkv_TW.device)
        attend_new(qkv_TW, layer.heads, keys, values, batch, layer.options, out_TC, overlap)
        return out_TC
    query_THD = write_new(qkv_TW, layer.heads, keys, values, batch)
    return attention(query_THD, keys, values, batch, layer.options).flatten(1)
