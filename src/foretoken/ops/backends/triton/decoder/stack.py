"""A whole pass of a stack in few kernels.

A layer is five launches: q, k and v; attention with everything before it; the output layer, which
adds to the residual stream and prepares the next norm; gate and up with SiLU; the layer that adds
them. Few rows are bound by the memory's speed, and each kernel starts while the one before it ends.
From 65 rows on cuBLAS multiplies, with small kernels between its products. Rows of an EAGLE-3 head
begin with both norms and the embedding in one more, and end with logits by the target's ids.

Belongs here: which stacks it can run, and the pass. Whether it is right is decided by the
self-check in `models/guards.py`, of a head in `models/eagle3.py`.

Shape suffixes: as in `ops/stack.py`; W numbers of q, k and v, Q ids that a head drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import triton
from torch import Tensor

from foretoken.errors import ConfigError, IntegrityError
from foretoken.ops.backends.triton.attention import (
    MOST_NEW,
    HeadInputs,
    attend_new,
    attention,
    write_new,
)
from foretoken.ops.backends.triton.attention.attend import prepare
from foretoken.ops.backends.triton.compiled import launch, zero_if_noted
from foretoken.ops.backends.triton.decoder.products import Products, ResidualStream, embed
from foretoken.ops.backends.triton.decoder.rowwise import join_kernel, spread_kernel
from foretoken.ops.backends.triton.decoder.tiles import MOST_ROWS
from foretoken.ops.backends.triton.launch import overlaps
from foretoken.ops.checks import check_attention_batch
from foretoken.ops.stack import (
    KV,
    Attention,
    FeatureRule,
    Features,
    ForwardOutput,
    Linear,
    Rope,
    Stack,
    UnfitError,
)
from foretoken.ops.steps import ForwardBatch
from foretoken.ops.types import AttentionBatch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_HEAD = 256
_SPREAD_BLOCK = 1024


class FusedStack:
    """The `LoadedStack` of this backend, on the stack's own weights.

    Everything it does may be captured in a CUDA graph. Logits by a target's ids lie in one buffer
    whose other columns stay -inf: a quarter of a row is written for a head of 32 000 ids.

    Args:
        positions: kernels read angles of all of them.
        most_rows: of that buffer.
        deterministic: in passes of up to 16 tokens, a token's logits are the same to the bit
            whatever runs next to it: greedy text is then equal with and without speculation.

    Raises:
        UnfitError: the stack has something that the kernels do not implement.
    """

    multiplies_masked_keys: ClassVar[bool] = False

    def __init__(
        self, stack: Stack, positions: int, most_rows: int, *, deterministic: bool
    ) -> None:
        check_fit(stack)
        self.stack = stack
        self._products = Products(stack.device, stack.dtype, stack.eps, deterministic)
        self._heads = _head_inputs([layer.mixer for layer in stack.layers], positions, stack.eps)
        self._target_ids = None
        if stack.target_ids is not None:
            self._target_ids = stack.target_ids.to(torch.int32)
            self._wide_NV = self._all_dropped(most_rows)

    @torch.no_grad()
    def run(
        self,
        batch: ForwardBatch,
        kv: KV,
        aux_layers: Sequence[int] = (),
        features: Features | None = None,
        *,
        logits: bool = True,
    ) -> ForwardOutput:
        """See `LoadedStack.run`: in the dtype of the weights."""
        found = self._run(batch, kv, aux_layers, features, logits)
        if self._target_ids is None or not logits:
            return found
        return found._replace(logits_NV=self._by_target_ids(found.logits_NV))

    @torch.no_grad()
    def logits(self, hidden_NC: Tensor) -> Tensor:
        """See `LoadedStack.logits`."""
        return self._by_target_ids(self._own_logits(hidden_NC))

    # What is apart from the buffer of logits, which must not become 0.

    @zero_if_noted
    def _own_logits(self, hidden_NC: Tensor) -> Tensor:
        stream = ResidualStream(self._products, hidden_NC, self.stack.norm_C)
        return stream.project(self.stack.head)

    @zero_if_noted
    def _run(
        self,
        batch: ForwardBatch,
        kv: KV,
        aux_layers: Sequence[int],
        features: Features | None,
        logits: bool,
    ) -> ForwardOutput:
        stack, row_N, tokens = self.stack, batch.logit_row_N, len(batch.token_T)
        self._prepare(batch.attention, tokens, kv)
        stream, qkv_TW = self._begin(batch.token_T, features)
        aux, last = {0: stream.state_TH}, len(stack.layers)
        gains = [*(layer.mixer_norm_C for layer in stack.layers), stack.norm_C]
        # After the last layer's K/V only rows whose logits are wanted go on. Of a prompt that is
        # one: without the rest, 8 192 tokens of an 8B shape are 2.8 % fewer products.
        narrow = len(row_N) < tokens and last not in aux_layers
        for i, layer in enumerate(stack.layers, 1):
            if i > 1:
                qkv_TW = stream.project(layer.mixer.qkv)
            attended_TW = self._attend(qkv_TW, i - 1, batch.attention, kv)
            if narrow and i == last:
                attended_TW = attended_TW[row_N]
                stream.narrow(row_N)
            if not len(attended_TW):
                break
            stream.add(layer.mixer.o, attended_TW, layer.feed_norm_C)
            gated_TI = stream.gate(layer.feed.gate_up)
            keep = i in aux_layers or (i == last and stack.features is not None)
            stream.add(layer.feed.down, gated_TI, gains[i], keep=keep)
            aux[i] = stream.state_TH
        hidden_NC = None if stack.features is None else stream.state_TH
        if last in aux_layers:
            aux[last] = stream.normed()
        every = narrow or len(row_N) == tokens
        rows_N = row_N[:0] if not logits else None if every else row_N
        logits_NV = stream.head(stack.head, rows_N)
        return ForwardOutput(logits_NV, tuple(aux[i] for i in aux_layers), hidden_NC)

    def _prepare(self, batch: AttentionBatch, tokens: int, kv: KV) -> None:
        """What attention derives from the batch, once for all layers."""
        layers, keys, values = self.stack.layers, kv.keys, kv.values
        check_attention_batch(batch, tokens, keys[0])
        if not len(keys) == len(values) == len(layers):
            raise ConfigError("keys", len(keys), f"tensors of {len(layers)} layers")
        for options in {layer.mixer.options for layer in layers}:
            prepare(batch, tokens, layers[0].mixer.heads, keys[0], values[0], options)

    def _begin(self, token_T: Tensor, features: Features | None) -> tuple[ResidualStream, Tensor]:
        """The residual stream, and the first layer's q, k and v."""
        stack, first = self.stack, self.stack.layers[0]
        if stack.features is None:
            state_TC = embed(token_T, stack.embedding_VC)
            stream = ResidualStream(self._products, state_TC, first.mixer_norm_C)
            return stream, stream.project(first.mixer.qkv)
        if features is None:
            raise IntegrityError("a stack with a feature rule was run without features")
        if not isinstance(features, Tensor):
            states_TA = torch.cat(list(features), dim=-1)
            features = self._products.multiply(stack.features.fc, states_TA)
        both_T2C, state_TC = self._join(token_T, features, stack.features)
        qkv_TW = self._products.multiply(first.mixer.qkv, both_T2C)
        return ResidualStream(self._products, state_TC, first.feed_norm_C), qkv_TW

    def _join(
        self, token_T: Tensor, feature_TC: Tensor, rule: FeatureRule
    ) -> tuple[Tensor, Tensor]:
        """What q, k and v of a head read, and where the residual stream begins."""
        stack, products = self.stack, self._products
        (rows, size), vocabulary = feature_TC.shape, len(stack.embedding_VC)
        both_T2C = feature_TC.new_empty(rows, 2 * size)
        normed_TC = torch.empty_like(feature_TC) if rule.norm_before_residual else None
        launch(
            join_kernel, (rows, 2), token_T, stack.embedding_VC, stack.layers[0].mixer_norm_C,
            feature_TC, rule.feature_norm_C, both_T2C, normed_TC, vocabulary, size,
            triton.next_power_of_2(size), stack.eps, products.overlap, num_warps=8,
            **products.dependent,
        )  # fmt: skip
        return both_T2C, feature_TC if normed_TC is None else normed_TC

    def _attend(self, qkv_TW: Tensor, index: int, batch: AttentionBatch, kv: KV) -> Tensor:
        """Write the new tokens' K and V of a layer and attend to all: [T, H * D]."""
        mixer, heads = self.stack.layers[index].mixer, self._heads[index]
        keys, values, options = kv.keys[index], kv.values[index], mixer.options
        if 1 <= batch.most_queries <= MOST_NEW:
            out_TW = qkv_TW.new_empty(len(qkv_TW), mixer.qkv.split[0])
            overlap = len(qkv_TW) <= MOST_ROWS and overlaps(qkv_TW.device)
            attend_new(qkv_TW, heads, keys, values, batch, options, out_TW, overlap)
            return out_TW
        query_THD = write_new(qkv_TW, heads, keys, values, batch)
        return attention(query_THD, keys, values, batch, options).flatten(1)

    def _by_target_ids(self, logits_NQ: Tensor) -> Tensor:
        if self._target_ids is None:
            return logits_NQ
        rows, drafted = logits_NQ.shape
        fits = rows <= len(self._wide_NV)
        wide_NV = self._wide_NV[:rows] if fits else self._all_dropped(rows)
        launch(
            spread_kernel, (rows, triton.cdiv(drafted, _SPREAD_BLOCK)), logits_NQ,
            self._target_ids, wide_NV, drafted, wide_NV.shape[1], _SPREAD_BLOCK,
            self._products.overlap, num_warps=4, **self._products.dependent,
        )  # fmt: skip
        return wide_NV

    def _all_dropped(self, rows: int) -> Tensor:
        return self.stack.embedding_VC.new_full((rows, self.stack.vocab_size), -torch.inf)


def _head_inputs(mixers: Sequence[Attention], positions: int, eps: float) -> list[HeadInputs]:
    """Per layer what is done to q and k; layers of one RoPE share its angles."""
    angles = {id(mixer.rope): _rotary_angles(mixer.rope, positions) for mixer in mixers}
    return [
        HeadInputs(*angles[id(mixer.rope)])
        if mixer.q_norm_D is None
        else HeadInputs(*angles[id(mixer.rope)], mixer.q_norm_D, mixer.k_norm_D, eps)
        for mixer in mixers
    ]


def _rotary_angles(rope: Rope, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, multiplied by the scale: float32 [P, R]."""
    position_P = torch.arange(positions, device=rope.frequency_R.device, dtype=torch.float32)
    angle_PR = torch.outer(position_P, rope.frequency_R.float())
    return angle_PR.cos().mul_(rope.scale), angle_PR.sin().mul_(rope.scale)


def check_fit(stack: Stack) -> None:
    """Raise `UnfitError` unless kernels implement all that the stack has."""
    weight, sizes = stack.embedding_VC, {*stack.layer_shapes}
    head_size = stack.layers[0].mixer.head_size
    if weight.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise UnfitError(f"weights are on {weight.device}, not on a GPU")
    if weight.dtype not in _DTYPES:
        raise UnfitError(f"weights are {weight.dtype}, not bfloat16, float16 or float32")
    if len(sizes) > 1:
        raise UnfitError(f"heads of sizes {sorted(sizes)}: not one size")
    if head_size > _LARGEST_HEAD:
        raise UnfitError(f"heads of sizes up to {head_size}: more than {_LARGEST_HEAD}")
    for name, tensor in _tensors(stack):
        same = tensor.dtype is weight.dtype and tensor.device == weight.device
        if not (same and tensor.is_contiguous()):
            raise UnfitError(f"`{name}` is not contiguous {weight.dtype} on {weight.device}")
    options = [layer.mixer.options for layer in stack.layers]
    if any(one.softcap is not None or one.sinks_H is not None for one in options):
        raise UnfitError("attention in a decoder has no soft caps or sinks")
    if stack.features is not None:
        _check_head(stack, stack.features)


def _check_head(stack: Stack, rule: FeatureRule) -> None:
    """Raise `UnfitError` for what the kernels of heads lack; named as in `config.json`."""
    mixer = stack.layers[0].mixer
    has = {
        "fc_norm": rule.fc_norm_PA is not None,
        "qk_norm": mixer.q_norm_D is not None,
        "qkv_bias": mixer.qkv.bias is not None,
        "o_bias": mixer.o.bias is not None,
        "norm_output": rule.norm_output,
        "sliding_window": mixer.options.sliding_window is not None,
        "partial_rotary_factor": 2 * len(mixer.rope.frequency_R) < mixer.head_size,
    }
    if names := [f"`{name}`" for name, is_set in has.items() if is_set]:
        raise UnfitError(f"the kernels of a head have no {', '.join(names)}")


def _tensors(stack: Stack) -> Iterator[tuple[str, Tensor]]:
    """What kernels read, by name."""
    linears: list[tuple[str, Linear]] = [("head", stack.head)]
    for i, (mixer_norm_C, mixer, feed_norm_C, feed) in enumerate(stack.layers):
        yield from ((f"layers.{i}.norm", norm) for norm in (mixer_norm_C, feed_norm_C))
        linears += [(f"layers.{i}.qkv", mixer.qkv), (f"layers.{i}.o", mixer.o)]
        linears += [(f"layers.{i}.gate_up", feed.gate_up), (f"layers.{i}.down", feed.down)]
    if stack.features is not None:
        linears.append(("fc", stack.features.fc))
    yield "norm", stack.norm_C
    yield "embedding", stack.embedding_VC
    for name, (weight, bias, _) in linears:
        yield name, weight.values
        if bias is not None:
            yield f"{name}.bias", bias
