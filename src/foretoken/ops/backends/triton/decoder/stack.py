"""A whole pass of a stack in few kernels.

A layer is five launches: q, k and v; attention with its norms, rotary embedding and K/V write; the
output layer, which adds to the residual stream and prepares the next norm; gate and up with SiLU;
the down layer, which also adds to the stream. Passes of few rows are bound by the memory's speed,
and each kernel starts while the previous one ends. With 65 rows or more cuBLAS multiplies, with
small kernels between its products. With a `FeatureRule`, one more kernel makes the input of the
first q, k and v, and one moves logits to the target's ids.

Shape suffixes: T packed tokens, N rows with logits, H = C hidden size, Q draft ids, V vocabulary, W
a row of q, k and v, R as in `ops/stack.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from foretoken.ops.backends.triton.attention import (  # isort: skip
    MOST_NEW, HeadInputs, attend_new, attention, prepare, write_new,
)  # fmt: skip
from foretoken.ops.backends.triton.attention.configs import LARGEST_HEAD
from foretoken.ops.backends.triton.compiled import launch, zero_if_recording
from foretoken.ops.backends.triton.decoder.products import Products, ResidualStream, embed
from foretoken.ops.backends.triton.decoder.rowwise import join_kernel, spread_kernel
from foretoken.ops.backends.triton.decoder.tiles import MOST_ROWS
from foretoken.ops.backends.triton.launch import overlaps
from foretoken.ops.checks import check_pass

from foretoken.ops.stack import (  # isort: skip
    KV, Attention, Features, ForwardOutput, Rope, Stack, UnfitError, check_dense, plain,
)  # fmt: skip
from foretoken.ops.steps import ForwardBatch
from foretoken.ops.types import AttentionBatch, AttentionOptions

_SPREAD_BLOCK = 1024


class FusedStack:
    """The `LoadedStack` of this backend, on the stack's own weights.

    Every pass can be captured in a CUDA graph. Logits by `target_ids` are written into one buffer,
    where all other columns stay -inf: with 32 000 draft ids only a quarter of a row is written.

    positions: as in `Backend.load_stack`; angles of all positions are computed once.
    most_rows: rows of that buffer.
    deterministic: in passes of up to 16 tokens, a token's logits are the same to the bit whatever
        other tokens the pass has: greedy text is then equal with and without speculation.

    Raises `UnfitError` if the stack has a feature that the kernels do not implement.
    """

    multiplies_masked_keys: ClassVar[bool] = False

    def __init__(
        self, stack: Stack, positions: int, most_rows: int, *, deterministic: bool = False
    ) -> None:
        _check_fit(stack)
        self.stack, self.dtype = stack, stack.dtype
        mixers = [layer.mixer for layer in stack.layers]
        angles = {m.rope: rotary_angles(m.rope, positions) for m in mixers}
        self._heads = [
            HeadInputs(*angles[m.rope], m.q_norm_D, m.k_norm_D, stack.eps) for m in mixers
        ]
        self._products = Products(stack.device, stack.dtype, stack.eps, deterministic)
        self._target_ids = None
        if stack.target_ids is not None:
            self._target_ids = stack.target_ids.to(torch.int32)
            self._wide_NV = self._minus_inf(most_rows)

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
        output = self._run(batch, kv, aux_layers, features, logits)
        return output._replace(logits_NV=self._by_target_ids(output.logits_NV))

    @torch.no_grad()
    def logits(self, hidden_NC: Tensor) -> Tensor:
        return self._by_target_ids(self._logits(hidden_NC))

    # `zero_if_recording` decorates only inner functions: it must not zero the buffer of logits.

    @zero_if_recording
    def _logits(self, hidden_NC: Tensor) -> Tensor:
        stream = ResidualStream(self._products, hidden_NC, self.stack.norm_C)
        return stream.head(self.stack.head, None)

    @zero_if_recording
    def _run(
        self,
        batch: ForwardBatch,
        kv: KV,
        aux_layers: Sequence[int],
        features: Features | None,
        logits: bool,
    ) -> ForwardOutput:
        """`run`, but a column of the logits is an id of the head, not of the target."""
        stack, rule, (token_T, _, row_N, paged, _) = self.stack, self.stack.features, batch
        layers, last = stack.layers, len(stack.layers)
        if rule is None and not logits:
            row_N = row_N[:0]
        check_pass(stack, batch, kv, features)
        stream, input_T2C = self._begin(token_T, paged, kv, features)
        aux = {0: stream.state_TH}
        gains = [layer.mixer_norm_C for layer in layers] + [stack.norm_C]
        # After the last layer's K/V only rows with logits continue: one row for a prompt. For 8 192
        # tokens of an 8B shape that saves 2.8 % of the products.
        narrow = len(row_N) < len(token_T) and last not in aux_layers
        for i, (layer, heads) in enumerate(zip(layers, self._heads, strict=True), 1):
            qkv, pools = layer.mixer.qkv, (kv.keys[i - 1], kv.values[i - 1])
            if input_T2C is not None and i == 1:
                qkv_TW = self._products.multiply(input_T2C, qkv)
            else:
                qkv_TW = stream.project(qkv)
            attended_TC = attend(qkv_TW, heads, layer.mixer.options, paged, *pools)
            if narrow and i == last:
                attended_TC = attended_TC[row_N]
                stream.narrow(row_N)
            if not len(attended_TC):
                break
            keep = i in aux_layers or (i == last and rule is not None)
            stream.add(layer.mixer.o, attended_TC, layer.feed_norm_C)
            stream.add(layer.feed.down, stream.gate(layer.feed.gate_up), gains[i], keep=keep)
            aux[i] = stream.state_TH
        if last in aux_layers:
            aux[last] = stream.normed()
        rows = None if narrow or len(row_N) == len(token_T) else row_N
        hidden_NC = None
        if rule is not None:
            hidden_NC = stream.state_TH if rows is None else stream.state_TH[rows]
        logit_rows = row_N[:0] if not logits else rows
        logits_NV = stream.head(stack.head, logit_rows)
        return ForwardOutput(logits_NV, tuple(aux[i] for i in aux_layers), hidden_NC)

    def _begin(
        self, token_T: Tensor, batch: AttentionBatch, kv: KV, features: Features | None
    ) -> tuple[ResidualStream, Tensor | None]:
        """(the residual stream, the input of the first q, k and v; None if that is the stream)."""
        stack, rule = self.stack, self.stack.features
        if rule is not None and features is not None and not isinstance(features, Tensor):
            features = self._products.multiply(torch.cat(list(features), dim=-1), rule.fc)
        # Plans of attention are made before any kernel lets the next one start.
        for heads, options in {(m.heads, m.options) for _, m, _, _ in stack.layers}:
            prepare(batch, len(token_T), heads, kv.keys[0], kv.values[0], options)
        table_VC, gain_C = plain(stack.embedding), stack.layers[0].mixer_norm_C
        if rule is None or not isinstance(features, Tensor):
            return ResidualStream(self._products, embed(token_T, table_VC), gain_C), None
        (rows, size), overlap = features.shape, self._products.overlap
        input_T2C = features.new_empty(rows, 2 * size)
        normed_TC = torch.empty_like(features) if rule.norm_before_residual else None
        launch(
            join_kernel, (rows, 2), token_T, table_VC, gain_C, features, rule.feature_norm_C,
            input_T2C, normed_TC, len(table_VC), size, triton.next_power_of_2(size), stack.eps,
            overlap, num_warps=8, **self._products.dependent,
        )  # fmt: skip
        state_TC = features if normed_TC is None else normed_TC
        return ResidualStream(self._products, state_TC, gain_C), input_T2C

    def _by_target_ids(self, logits_NQ: Tensor) -> Tensor:
        """[N, V]: logits in the columns of their target ids, -inf in all others."""
        if self._target_ids is None:
            return logits_NQ
        rows, num_ids = logits_NQ.shape
        fits = rows <= len(self._wide_NV)
        wide_NV = self._wide_NV[:rows] if fits else self._minus_inf(rows)
        if rows:
            launch(
                spread_kernel, (rows, triton.cdiv(num_ids, _SPREAD_BLOCK)), logits_NQ,
                self._target_ids, wide_NV, num_ids, wide_NV.shape[1], _SPREAD_BLOCK,
                self._products.overlap, num_warps=4, **self._products.dependent,
            )  # fmt: skip
        return wide_NV

    def _minus_inf(self, rows: int) -> Tensor:
        return plain(self.stack.embedding).new_full((rows, self.stack.vocab_size), -torch.inf)


def attend(
    qkv_TW: Tensor,
    heads: HeadInputs,
    options: AttentionOptions,
    batch: AttentionBatch,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Write the new tokens' K and V, then attend to all tokens: [T, heads * D]."""
    if 1 <= batch.most_queries <= MOST_NEW:
        size = keys.shape[3]
        out_TC = qkv_TW.new_empty(len(qkv_TW), qkv_TW.shape[1] - 2 * keys.shape[2] * size)
        overlap = len(qkv_TW) <= MOST_ROWS and overlaps(qkv_TW.device)
        attend_new(qkv_TW, heads, keys, values, batch, options, out_TC, overlap)
        return out_TC
    query_THD = write_new(qkv_TW, heads, keys, values, batch)
    return attention(query_THD, keys, values, batch, options).flatten(1)


def rotary_angles(rope: Rope, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, multiplied by the scale: float32 [positions, R]."""
    frequency_R, scale = rope
    position_P = torch.arange(positions, device=frequency_R.device, dtype=torch.float32)
    angle_PR = torch.outer(position_P, frequency_R.float())
    return angle_PR.cos().mul_(scale), angle_PR.sin().mul_(scale)


def _check_fit(stack: Stack) -> None:
    table_VC, mixers = plain(stack.embedding), [layer.mixer for layer in stack.layers]
    if table_VC.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise UnfitError(f"weights are on {table_VC.device}, not on a GPU")
    if table_VC.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UnfitError(f"weights are {table_VC.dtype}, not bfloat16, float16 or float32")
    check_dense(stack)
    if any((m.q_norm_D is None) != (m.k_norm_D is None) for m in mixers):
        raise UnfitError("only queries or only keys have a norm, not both")
    sizes = {(m.kv_heads, m.head_size) for m in mixers}
    if (largest := max(size for _, size in sizes)) > LARGEST_HEAD:
        raise UnfitError(f"heads of sizes up to {largest}: more than {LARGEST_HEAD}")
    if len(sizes) > 1:
        raise UnfitError(f"layers differ in (K/V heads, head size): {sorted(sizes)}")
    if names := _unsupported(stack, mixers[0]):
        raise UnfitError(f"the kernels of a draft head have no {', '.join(names)}")
    parts = "embedding", "layers", "norm_C", "head", "features"
    for name, weight in (pair for part in parts for pair in _weights(part, getattr(stack, part))):
        same = weight.dtype is table_VC.dtype and weight.device == table_VC.device
        if not (same and weight.is_contiguous()):
            raise UnfitError(f"`{name}` is not contiguous {table_VC.dtype} on {table_VC.device}")


def _unsupported(stack: Stack, mixer: Attention) -> list[str]:
    """Names of the stack's features that the kernels lack together with a `FeatureRule`."""
    if (rule := stack.features) is None:
        return []
    present = {
        "fc_norm": rule.fc_norm_PA is not None,
        "qk_norm": mixer.q_norm_D is not None,
        "qkv_bias": mixer.qkv.bias is not None,
        "o_bias": mixer.o.bias is not None,
        "norm_output": rule.norm_output,
        "sliding_window": mixer.options.sliding_window is not None,
        "partial_rotary_factor": 2 * len(mixer.rope.frequency_R) < mixer.head_size,
    }
    return [f"`{name}`" for name, is_set in present.items() if is_set]


def _weights(name: str, part: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all tensors in a record that products and norms read."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, tuple) and not isinstance(part, (Rope, AttentionOptions)):
        for key, value in zip(getattr(part, "_fields", range(len(part))), part, strict=True):
            yield from _weights(f"{name}.{key}", value)
