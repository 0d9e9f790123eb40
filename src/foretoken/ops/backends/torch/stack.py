"""A stack in stock operators: portable, readable, the reference for other backends.

Shape suffixes: as in `ops/stack.py`; H heads, I columns of a gated layer, W input size of a mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.ops.checks import check_pass
from foretoken.ops.formats import decode_blocks, decode_groups, round_rows
from foretoken.ops.passes import pass_begins, write_index, write_kv

from foretoken.ops.stack import (  # isort: skip
    KV, Attention, Blocks, Dense, FeatureRule, Features, ForwardOutput, Grouped, Joined, Layer,
    Linear, Rope, Stack, UnfitError, Weight, check_known, format_of, linears, map_linears, parts_of,
    plain,
)  # fmt: skip
from foretoken.ops.steps import ForwardBatch
from foretoken.ops.types import AttentionBatch, AttentionOptions

Attend = Callable[[Tensor, Tensor, Tensor, AttentionBatch, AttentionOptions], Tensor]

# Number of rows that oneDNN's layout is tuned for. With 1, single rows would use another kernel,
# which is slower and rounds differently.
_ROWS_HINT = 64
# Models with fewer bytes of weights are not packed: their weights stay in the processor's cache,
# from which MKL multiplies single rows as fast as oneDNN, and a call of MKL takes 10 us less.
MIN_BYTES = 16 << 20


class StockStack:
    """The `LoadedStack` of stock operators, with the attention of any backend."""

    multiplies_masked_keys: ClassVar[bool] = True

    def __init__(self, stack: Stack, attention: Attend) -> None:
        self.stack, self._attention = pack(stack), attention

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    @torch.inference_mode()
    def run(
        self, batch: ForwardBatch, kv: KV, aux_layers: Sequence[int] = (),
        features: Features | None = None, *, logits: bool = True,
    ) -> ForwardOutput:  # fmt: skip
        """See `LoadedStack.run`. Every layer computes all rows: fewer would round differently."""
        pass_begins()
        stack, row_N, last = self.stack, batch.logit_row_N, len(self.stack.layers)
        check_pass(stack, batch, kv, features)
        index_T = write_index(batch.attention, len(batch.token_T), len(kv.keys[0]))
        x_TC, read_TW = begin(stack, batch.token_T, features)
        angles, aux = dict[int, tuple[Tensor, Tensor]](), dict[int, Tensor]()
        for i, layer in enumerate(stack.layers):
            aux[i], rope = x_TC, layer.mixer.rope
            if i:
                read_TW = norm(x_TC, layer.mixer_norm_C, stack.eps)
            if id(rope) not in angles:
                angles[id(rope)] = cos_sin(rope, batch.position_T, stack.dtype)
            query, key, value = project(stack, layer.mixer, read_TW, angles[id(rope)])
            caches, options = (kv.keys[i], kv.values[i]), layer.mixer.options
            write_kv(caches, index_T, key, value)
            mixed_TW = self._attention(query, *caches, batch.attention, options).flatten(1)
            x_TC = finish(stack, layer, x_TC, mixed_TW)
        if last in aux_layers:
            aux[last] = norm(x_TC, stack.norm_C, stack.eps)
        if len(row_N) != len(batch.token_T):
            x_TC = x_TC[row_N]
        is_normed = stack.features is not None and stack.features.norm_output
        hidden_NC = norm(x_TC, stack.norm_C, stack.eps) if is_normed else x_TC
        logits_NV = output(stack, hidden_NC if logits else hidden_NC[:0])
        states = tuple(aux[i] for i in aux_layers)
        return ForwardOutput(logits_NV, states, None if stack.features is None else hidden_NC)

    @torch.inference_mode()
    def logits(self, hidden_NC: Tensor) -> Tensor:
        """See `LoadedStack.logits`."""
        return output(self.stack, hidden_NC)


def begin(stack: Stack, token_T: Tensor, features: Features | None) -> tuple[Tensor, Tensor]:
    """The residual stream [T, C], and the input of the first mixer [T, W]."""
    token_TC = vectors(stack.embedding, token_T).to(stack.dtype)
    rule, eps = stack.features, stack.eps
    read_TC = norm(token_TC, stack.layers[0].mixer_norm_C, eps)
    if rule is None:
        return token_TC, read_TC
    feature_TC = features if isinstance(features, Tensor) else feature(rule, features or (), eps)
    normed_TC = norm(feature_TC, rule.feature_norm_C, eps)
    stream_TC = normed_TC if rule.norm_before_residual else feature_TC
    return stream_TC, torch.cat([read_TC, normed_TC], dim=-1)


def feature(rule: FeatureRule, states: Sequence[Tensor], eps: float) -> Tensor:
    """The features [T, C] of a drafting stack from the target's hidden states, in layer order."""
    states_TA = torch.cat(list(states), dim=-1).to(rule.feature_norm_C.dtype)
    if (gain_PA := rule.fc_norm_PA) is not None:
        states_TPA = states_TA.view(-1, *gain_PA.shape)
        states_TA = (F.rms_norm(states_TPA, gain_PA.shape[1:], None, eps) * gain_PA).flatten(1)
    return multiply(states_TA, rule.fc)


def project(
    stack: Stack, mixer: Attention, read_TW: Tensor, angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [T, H, D]. Queries and keys are normed and rotated (RoPE)."""
    heads, kv_heads = mixer.heads, mixer.kv_heads
    qkv_THD = multiply(read_TW, mixer.qkv).view(len(read_TW), -1, mixer.head_size)
    query, key, value = torch.split(qkv_THD, [heads, kv_heads, kv_heads], dim=1)
    if mixer.q_norm_D is not None:
        query = norm(query, mixer.q_norm_D, stack.eps)
    if mixer.k_norm_D is not None:
        key = norm(key, mixer.k_norm_D, stack.eps)
    return rotate(query, angles), rotate(key, angles), value


def finish(stack: Stack, layer: Layer, x_NC: Tensor, mixed_NW: Tensor) -> Tensor:
    """The residual stream after a layer, from the stream before and the result of attention."""
    x_NC = x_NC + multiply(mixed_NW, layer.mixer.o)
    feed, inner_NC = layer.feed, norm(x_NC, layer.feed_norm_C, stack.eps)
    gate_NI, up_NI = multiply(inner_NC, feed.gate_up).chunk(2, dim=-1)
    return x_NC + multiply(F.silu(gate_NI) * up_NI, feed.down)


def output(stack: Stack, x_NC: Tensor) -> Tensor:
    """Logits [N, V] of rows of the residual stream, which with `norm_output` are already normed."""
    is_normed = stack.features is not None and stack.features.norm_output
    logits = multiply(x_NC if is_normed else norm(x_NC, stack.norm_C, stack.eps), stack.head)
    if stack.target_ids is None:
        return logits
    logits_NV = logits.new_full((len(logits), stack.vocab_size), -torch.inf)
    return logits_NV.index_copy_(1, stack.target_ids, logits)


def cos_sin(rope: Rope, position_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, [T, 1, R]."""
    angle_T1R = position_T.float()[:, None, None] * rope.frequency_R
    return (angle_T1R.cos() * rope.scale).to(dtype), (angle_T1R.sin() * rope.scale).to(dtype)


def rotate(x_THD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE: rotate heads by the cosines and sines of their positions."""
    cos, sin = angles
    size = cos.shape[-1]
    a, b, rest = torch.split(x_THD, [size, size, x_THD.shape[-1] - 2 * size], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, rounded where Transformers rounds."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return gain * normed.to(x.dtype)


def vectors(embedding: Weight, token_T: Tensor) -> Tensor:
    """The embeddings of tokens, [T, C]; `UnfitError` for a `Joined` embedding."""
    if isinstance(embedding, Dense):
        return embedding.values[token_T]
    if isinstance(embedding, Grouped):
        return decode_groups(embedding.codes[token_T], embedding.scale_NG[token_T])
    if not isinstance(embedding, Blocks):
        raise UnfitError(f"an embedding is stored as {format_of(embedding)}")
    row_T = token_T if embedding.order_N is None else embedding.order_N[token_T]
    return decode_blocks(embedding.kind, embedding.rows[row_T])


def multiply(x: Tensor, linear: Linear) -> Tensor:
    """The product of x [..., in] with a layer: [..., out]. With weights in blocks or groups, every
    backend first rounds x to eight bits (`round_rows`)."""
    weight, bias = linear.weight, linear.bias
    if isinstance(weight, Joined):
        outputs = torch.cat([multiply(x, Linear(part)) for part in weight.parts], dim=-1)
        return outputs if bias is None else outputs + bias
    weight = decoded(weight)
    if weight.rounds:
        x = round_rows(x)
    if weight.values.is_mkldnn:
        ops: Any = torch.ops.mkldnn
        product: Tensor = ops._linear_pointwise(x, weight.values, bias, "none", [], "")
        return product
    return F.linear(x, weight.values, bias)


def decoded(weight: Dense | Blocks | Grouped) -> Dense:
    """A weight as plain numbers, decoded to float32 from blocks or groups."""
    if isinstance(weight, Dense):
        return weight
    if isinstance(weight, Grouped):
        return Dense(decode_groups(weight.codes, weight.scale_NG), rounds=True)
    rows = weight.rows if weight.order_N is None else weight.rows[weight.order_N]
    return Dense(decode_blocks(weight.kind, rows), rounds=True)


def pack(stack: Stack) -> Stack:
    """The stack with decoded weights; plain ones in oneDNN's layout if it `pays` (decision 004)."""
    check_known(stack)
    stored = [linear.weight for _, linear in linears(stack)]
    if not all(isinstance(w, Dense) and w.values.dtype is stack.dtype for w in stored):
        return map_linears(stack, partial(_decoded_layer, dtype=stack.dtype))
    weights = [plain(linear.weight) for _, linear in linears(stack)]
    return map_linears(stack, packed) if pays(weights) else stack


def _decoded_layer(linear: Linear, dtype: torch.dtype) -> Linear:
    dense_parts = map(decoded, parts_of(linear.weight))
    parts = tuple(part._replace(values=part.values.to(dtype)) for part in dense_parts)
    return linear._replace(weight=Joined(parts) if len(parts) > 1 else parts[0])


def pays(weights: Sequence[Tensor]) -> bool:
    """Whether this PyTorch can pack these weights, and multiplies faster with them packed."""
    if sum(w.nbytes for w in weights) < MIN_BYTES:
        return False
    ops = ("_linear_pointwise", "_reorder_linear_weight")
    has_ops: bool = torch._C._has_mkldnn and all(hasattr(torch.ops.mkldnn, op) for op in ops)
    weight = weights[0]
    return has_ops and weight.device.type == "cpu" and weight.dtype is torch.float32


def packed(linear: Linear) -> Linear:
    """A layer in oneDNN's layout."""
    ops: Any = torch.ops.mkldnn
    values: Tensor = ops._reorder_linear_weight(plain(linear.weight).detach(), _ROWS_HINT)
    return linear._replace(weight=Dense(values))
