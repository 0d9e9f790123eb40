"""Whether a backend's kernels compute what stock operators do, on a part of a model's own weights.

Belongs here: the check of stacks that are read without Transformers' module beside them, since its
weights would take several times the memory of theirs. Does not: the self-check against a module
(`guards.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from foretoken.cache.kv_pool import KVPool
from foretoken.errors import UnsupportedModelError
from foretoken.models.guards import BLOCK, MOST_POSITIONS, NUM_BLOCKS, scheduled
from foretoken.ops import Backend
from foretoken.ops.stack import Layer, Linear, Stack, first_rows, format_of

# Relative to the largest logit. Both round rows to eight bits. Where a number lies between codes,
# the last bit of the sum before it decides, and they are 1/127 of a group's largest apart.
TOLERANCE = 2e-2
_TOKENS = 512  # of the output layer


def check_kernels(stack: Stack, backend: Backend) -> float:
    """Run the self-check's passes in the backend's kernels and in stock operators.

    A layer of each combination of formats takes part, and the first rows of the output layer: some
    tenths of a second. What reads the configuration is not checked here, but by a miniature.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        UnfitError: the kernels lack something that the stack has.
        UnsupportedModelError: they differ by more than rounding.
    """
    layers = {tuple(map(_formats, _linears(layer))): layer for layer in stack.layers}
    count = min(_TOKENS, stack.vocab_size)
    head = stack.head._replace(weight=first_rows(stack.head.weight, count))
    small = replace(stack, layers=tuple(layers.values()), head=head, vocab_size=count)
    logits = []
    for network in (backend.load_stack(small, MOST_POSITIONS, 0), backend.stock_stack(small)):
        kv = KVPool(small.layer_shapes, NUM_BLOCKS, BLOCK, dtype=network.dtype, device=small.device)
        run = partial(network.run, kv=kv)
        logits.append(torch.cat(scheduled(run, count, small.device)).float())
    own, stock = logits
    error = ((own - stock).abs().max() / stock.abs().max()).item()
    if not error <= TOLERANCE:  # NaN too
        formats = ", ".join(sorted({name for names in layers for name in names}))
        raise UnsupportedModelError(
            f"With weights stored as {formats}, the kernels of backend `{backend.name}` give "
            f"logits that differ from those of stock operators by {error:.1e} of the largest "
            f'(bound {TOLERANCE:.0e}). `backend="torch"` runs it in stock operators.'
        )
    return error


def _linears(layer: Layer) -> Iterator[Linear]:
    yield from (layer.mixer.qkv, layer.mixer.o, layer.feed.gate_up, layer.feed.down)


def _formats(linear: Linear) -> str:
    return format_of(linear.weight)
