"""From a Transformers module to the weights of the fused decoder.

Belongs here: which modules the decoder can stand in for, and what it takes from them. Does not:
computing (`decoder.py`, `products.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn

from foretoken.ops.backends.triton.attention import HeadInputs
from foretoken.ops.backends.triton.decoder.products import Linear
from foretoken.ops.decoder import AttentionCall, UnfitError, check_common_block
from foretoken.ops.types import AttentionOptions

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_HEAD = 256


class Layer(NamedTuple):
    """One block: attention, then a gated layer, each behind an RMSNorm and added to the stream.

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
