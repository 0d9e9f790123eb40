"""Whether a backend's kernels agree with stock operators, on pieces of a model's own weights.

Belongs here: the check of stacks that are read without Transformers' module, whose weights would
take several times the memory of theirs. Does not: the self-check against a module (`guards.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.errors import UnsupportedModelError
from foretoken.models.guards import BLOCK, MOST_POSITIONS, NUM_BLOCKS, TOLERANCE, scheduled
from foretoken.ops import Backend
from foretoken.ops.formats import SUPER

from foretoken.ops.stack import (  # isort: skip
    Gated, Grouped, Joined, Layer, Linear, Stack, Weight, first_columns, first_rows, format_of,
    parts_of, rounds_rows,
)  # fmt: skip

# A bound on the root mean squared difference of a row's logits, relative to their spread, in the
# 85th percentile of the worst pass. Both sides round rows to eight bits; if a number is between two
# codes, the last bit of the sum before it decides, which causes 0.01 to 0.05. Misplaced codes or
# scales give 0.3 and more.
ROUNDED_TOLERANCE = 0.1
_TOKENS = 512


def check_kernels(stack: Stack, backend: Backend) -> float:
    """Run the self-check's passes in the backend's kernels and in stock operators.

    A small stack is cut from the given one: the first rows and columns of the embedding, of the
    output layer, and of one layer for each combination of formats. So it takes some milliseconds
    whatever the model's size. A miniature checks how the configuration is read.

    Returns:
        The difference that was compared with the bound.

    Raises:
        UnfitError: the kernels lack something that the stack has.
        UnsupportedModelError: the logits differ by more than rounding.
    """
    small = _piece(stack)
    logits = []
    for network in (backend.load_stack(small, MOST_POSITIONS, 0), backend.stock_stack(small)):
        kv = KVPool(small.layer_shapes, NUM_BLOCKS, BLOCK, dtype=network.dtype, device=small.device)
        logits.append(scheduled(partial(network.run, kv=kv), small.vocab_size, small.device))
    rounds = rounds_rows(small)
    error = max(
        _difference(own_NV.float(), stock_NV.float(), 0.85 if rounds else 1.0)
        for own_NV, stock_NV in zip(*logits, strict=True)
    )
    tolerance = ROUNDED_TOLERANCE if rounds else TOLERANCE[torch.float32]
    if not error <= tolerance:  # NaN too
        formats = sorted({name for layer in stack.layers for name, _ in _formats(layer)})
        raise UnsupportedModelError(
            f"With weights stored as {', '.join(formats)}, the kernels of backend `{backend.name}` "
            f"give logits that differ from those of stock operators by {error:.1e} of their spread "
            f'(bound {tolerance:.1e}). `backend="torch"` runs it in stock operators.'
        )
    return error


def _difference(own_NV: Tensor, stock_NV: Tensor, quantile: float) -> float:
    """The relative difference in a pass; infinite for NaN."""
    error_N = (own_NV - stock_NV).square().mean(-1).sqrt() / stock_NV.std(-1)
    return error_N.nan_to_num(torch.inf).quantile(quantile).item()


def _piece(stack: Stack) -> Stack:
    layers = {_formats(layer): layer for layer in stack.layers}
    size = _border(stack.hidden_size, layers)
    count = min(_TOKENS, stack.vocab_size)
    head = _cut(stack.head, count, size)
    return replace(
        stack,
        embedding=first_columns(first_rows(stack.embedding, count), size),
        layers=tuple(_layer(layer, size) for layer in layers.values()),
        norm_C=stack.norm_C[:size].contiguous(),
        head=head,
        vocab_size=count,
    )


def _layer(layer: Layer, size: int) -> Layer:
    mixer, feed = layer.mixer, layer.feed
    per_head = mixer.heads // mixer.kv_heads
    kv_heads = next(
        (n for n in range(1, mixer.kv_heads) if n * per_head * mixer.head_size % SUPER == 0),
        mixer.kv_heads,
    )
    heads = kv_heads * per_head
    wide = _border(feed.down.weight.shape[1], [_formats(layer)])
    q, kv = heads * mixer.head_size, kv_heads * mixer.head_size
    small = mixer._replace(
        qkv=_cut_several(mixer.qkv, (q, kv, kv), size), o=_cut(mixer.o, size, q),
        heads=heads, kv_heads=kv_heads,
    )  # fmt: skip
    gated = Gated(_cut_several(feed.gate_up, (wide, wide), size), _cut(feed.down, size, wide))
    mixer_norm_C, feed_norm_C = layer.mixer_norm_C[:size], layer.feed_norm_C[:size]
    return Layer(mixer_norm_C.contiguous(), small, feed_norm_C.contiguous(), gated)


def _cut(linear: Linear, out: int, inputs: int) -> Linear:
    bias = None if linear.bias is None else linear.bias[:out].contiguous()
    return Linear(first_columns(first_rows(linear.weight, out), inputs), bias)


def _cut_several(linear: Linear, outs: tuple[int, ...], inputs: int) -> Linear:
    """Cut a linear layer of several joined ones: the first rows of each."""
    cut = [
        first_columns(first_rows(part, out), inputs)
        for part, out in zip(parts_of(linear.weight), outs, strict=True)
    ]
    bias = None
    if linear.bias is not None:
        biases = torch.split(linear.bias, list(linear.split))
        bias = torch.cat([each[:out] for each, out in zip(biases, outs, strict=True)])
    return Linear(Joined(tuple(part for one in cut for part in parts_of(one))), bias, outs)


def _formats(layer: Layer) -> tuple[tuple[str, int], ...]:
    """Each matrix's format, and its numbers per group if a row has several groups; else 0."""
    mixer, feed = layer.mixer, layer.feed
    linears = (mixer.qkv, mixer.o, feed.gate_up, feed.down)
    return tuple((format_of(p), _group(p)) for one in linears for p in parts_of(one.weight))


def _group(weight: Weight) -> int:
    groups = weight.scale_NG.shape[1] if isinstance(weight, Grouped) else 1
    return weight.shape[1] // groups if groups > 1 else 0


def _border(inputs: int, formats: Iterable[tuple[tuple[str, int], ...]]) -> int:
    """How many inputs are kept: the largest block's size, if groups end there; else all."""
    ends = all(SUPER % group == 0 for names in formats for _, group in names if group)
    return SUPER if ends and inputs >= SUPER else inputs
