"""Whether a backend's kernels agree with stock operators, on pieces of a model's own weights.

This check replaces the self-check of `guards.py` for quantised stacks: a module's plain weights
would take several times the memory of the stack's weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.errors import UnsupportedModelError
from foretoken.models.guards import BLOCK, MOST_POSITIONS, NUM_BLOCKS, TOLERANCE, run_schedule
from foretoken.ops import Backend
from foretoken.ops.formats import SUPER

from foretoken.ops.stack import (  # isort: skip
    Gated, Grouped, Joined, Layer, Linear, Stack, Weight, first_columns, first_rows, format_of,
    parts_of, rounds_rows,
)  # fmt: skip

# The bound in `check_kernels` for stacks that round rows to eight bits. A number halfway between
# two codes may be rounded to either code, which causes differences of 0.01 to 0.05. Misplaced codes
# or scales cause 0.3 and more.
ROUNDED_TOLERANCE = 0.1
_VOCAB_SIZE = 512  # of the small stack


def check_kernels(stack: Stack, backend: Backend) -> float:
    """Run the self-check's passes in the backend's kernels and in stock operators; compare logits.

    Both run a small stack that is cut from `stack`: the first rows and columns of the embedding, of
    the output layer, and of one layer for each combination of formats. So the check takes some
    milliseconds for a model of any size.

    Returns:
        The difference of logits in the worst pass; see `_difference`.

    Raises:
        UnfitError: the kernels lack something that the stack needs.
        UnsupportedModelError: the logits differ by more than rounding.
    """
    small = _small_stack(stack)
    logits = []
    for network in (backend.load_stack(small, MOST_POSITIONS, 0), backend.stock_stack(small)):
        kv = KVPool(small.layer_shapes, NUM_BLOCKS, BLOCK, dtype=network.dtype, device=small.device)
        logits.append(run_schedule(partial(network.run, kv=kv), small.vocab_size, small.device))
    is_rounded = rounds_rows(small)
    error = max(
        _difference(kernel_NV.float(), stock_NV.float(), 0.85 if is_rounded else 1.0)
        for kernel_NV, stock_NV in zip(*logits, strict=True)
    )
    tolerance = ROUNDED_TOLERANCE if is_rounded else TOLERANCE[torch.float32]
    if not error <= tolerance:  # NaN too
        formats = sorted({name for layer in stack.layers for name, _ in _formats(layer)})
        raise UnsupportedModelError(
            f"With weights stored as {', '.join(formats)}, the kernels of backend `{backend.name}` "
            f"give logits that differ from stock operators' by {error:.1e} standard deviations "
            f'(bound {tolerance:.1e}). `backend="torch"` runs the model in stock operators.'
        )
    return error


def _difference(kernel_NV: Tensor, stock_NV: Tensor, quantile: float) -> float:
    """A quantile of the rows' differences in one pass. A row's difference is the root mean square,
    relative to the standard deviation of the row's stock logits. NaN counts as infinite."""
    error_N = (kernel_NV - stock_NV).square().mean(-1).sqrt() / stock_NV.std(-1)
    return error_N.nan_to_num(torch.inf).quantile(quantile).item()


def _small_stack(stack: Stack) -> Stack:
    """A stack cut from a large one, with one layer for each combination of formats."""
    layers = {_formats(layer): layer for layer in stack.layers}
    size = _num_kept_inputs(stack.hidden_size, layers)
    vocab_size = min(_VOCAB_SIZE, stack.vocab_size)
    return replace(
        stack,
        embedding=first_columns(first_rows(stack.embedding, vocab_size), size),
        layers=tuple(_cut_layer(layer, size) for layer in layers.values()),
        norm_C=stack.norm_C[:size].contiguous(), head=_cut(stack.head, vocab_size, size),
        vocab_size=vocab_size,
    )  # fmt: skip


def _cut_layer(layer: Layer, hidden_size: int) -> Layer:
    """A layer with fewer heads and a smaller feed-forward part, for a smaller hidden size. It has
    the fewest K/V heads with which the queries fill whole blocks of weights."""
    mixer, feed = layer.mixer, layer.feed
    heads_per_kv = mixer.heads // mixer.kv_heads
    counts = range(1, mixer.kv_heads)
    fitting_counts = (n for n in counts if n * heads_per_kv * mixer.head_size % SUPER == 0)
    kv_heads = next(fitting_counts, mixer.kv_heads)
    heads = kv_heads * heads_per_kv
    feed_size = _num_kept_inputs(feed.down.weight.shape[1], [_formats(layer)])
    q_size, kv_size = heads * mixer.head_size, kv_heads * mixer.head_size
    small_mixer = mixer._replace(
        qkv=_cut_joined(mixer.qkv, (q_size, kv_size, kv_size), hidden_size),
        o=_cut(mixer.o, hidden_size, q_size), heads=heads, kv_heads=kv_heads,
    )  # fmt: skip
    gate_up = _cut_joined(feed.gate_up, (feed_size, feed_size), hidden_size)
    small_feed = Gated(gate_up, _cut(feed.down, hidden_size, feed_size))
    mixer_norm_C, feed_norm_C = layer.mixer_norm_C[:hidden_size], layer.feed_norm_C[:hidden_size]
    return Layer(mixer_norm_C.contiguous(), small_mixer, feed_norm_C.contiguous(), small_feed)


def _cut(linear: Linear, out: int, inputs: int) -> Linear:
    """A linear layer with only the first outputs and the first inputs."""
    bias = None if linear.bias is None else linear.bias[:out].contiguous()
    return Linear(first_columns(first_rows(linear.weight, out), inputs), bias)


def _cut_joined(linear: Linear, outs: tuple[int, ...], inputs: int) -> Linear:
    """Joined linear layers with only the first outputs of each layer and the first inputs."""
    weights = [
        first_columns(first_rows(part, out), inputs)
        for part, out in zip(parts_of(linear.weight), outs, strict=True)
    ]
    bias = None
    if linear.bias is not None:
        biases = torch.split(linear.bias, list(linear.split))
        bias = torch.cat([whole[:out] for whole, out in zip(biases, outs, strict=True)])
    parts = tuple(part for weight in weights for part in parts_of(weight))
    return Linear(Joined(parts), bias, outs)


def _formats(layer: Layer) -> tuple[tuple[str, int], ...]:
    """The format and the group size of each matrix in a layer; see `_group_size`."""
    mixer, feed = layer.mixer, layer.feed
    linears = (mixer.qkv, mixer.o, feed.gate_up, feed.down)
    parts = (part for linear in linears for part in parts_of(linear.weight))
    return tuple((format_of(part), _group_size(part)) for part in parts)


def _group_size(weight: Weight) -> int:
    """How many numbers share a scale, in a `Grouped` weight with several scales a row; else 0."""
    groups = weight.scale_NG.shape[1] if isinstance(weight, Grouped) else 1
    return weight.shape[1] // groups if groups > 1 else 0


def _num_kept_inputs(inputs: int, formats: Iterable[tuple[tuple[str, int], ...]]) -> int:
    """How many of a layer's inputs are kept: as many as the largest block holds, or all if there
    are fewer or if a matrix has groups of a size that does not divide the largest block."""
    fits = all(SUPER % group == 0 for matrices in formats for _, group in matrices if group)
    return SUPER if fits and inputs >= SUPER else inputs
