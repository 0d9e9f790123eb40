"""Linear layers for a CPU: packed for oneDNN, and one call for layers that read the same input.

Belongs here: replacing `nn.Linear` inside a loaded module. Model code is unchanged, and the
self-check compares the result with logits computed before. For the gain, and for the shapes at
which a row's result is independent of other rows, see docs/decisions/004-packed-linears-on-cpu.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.ops import Backend
from foretoken.ops.stack import Dense, Linear

LinearCalls = list[tuple[nn.Linear, Tensor]]
"""Linear layers with their inputs, in the order of calls in a forward pass."""


class PackedLinear(nn.Module):
    """One of the frozen linear layers of a `_Pack`; takes [..., in]."""

    def __init__(self, pack: _Pack, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self._pack, self._index = pack, index
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Some modules read a weight's dtype or shape; its numbers are in the pack.
        self.weight = torch.empty_like(linear.weight, device="meta")
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self._pack.output(x, self._index)


class _Pack:
    """Linear layers with the same input, computed together when the first of them is called.

    The others recognise the input by identity and take their part of the output. For any other
    input than the last one the output is computed again, so the order of calls affects only speed.
    """

    def __init__(self, linears: list[nn.Linear], backend: Backend) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._linear = backend.pack(Linear(Dense(weight), _joint_bias(linears)))
        self._multiply = backend.multiply
        self._sizes = [linear.out_features for linear in linears]
        self._last: tuple[Tensor | None, Sequence[Tensor]] = (None, ())

    def output(self, x: Tensor, index: int) -> Tensor:
        if len(self._sizes) == 1:
            return self._multiply(x, self._linear)
        last, outputs = self._last  # read at once: another thread can only cause a new computation
        if last is not x:
            outputs = torch.split_with_sizes(self._multiply(x, self._linear), self._sizes, -1)
            self._last = (x, outputs)
        elif index == len(outputs) - 1:
            self._last = (None, ())
        return outputs[index]


def _joint_bias(linears: list[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    zeros = [linear.weight.new_zeros(linear.out_features) for linear in linears]
    biases = [linear.bias for linear in linears]
    return torch.cat([z if b is None else b for z, b in zip(zeros, biases, strict=True)]).detach()


@contextmanager
def observe_linears(module: nn.Module) -> Iterator[LinearCalls]:
    """Record which plain `nn.Linear` layers run inside, and their inputs."""
    calls: LinearCalls = []

    def record(linear: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(linear, nn.Linear):
            calls.append((linear, args[0]))

    handles = [
        child.register_forward_pre_hook(record)
        for child in module.modules()
        if type(child) is nn.Linear
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def pack_linears(module: nn.Module, calls: LinearCalls, backend: Backend) -> None:
    """Replace in place the linear layers that a forward pass called exactly once, if it pays.

    Siblings (children of one module) that read the same tensor share one pack. Other layers, such
    as experts, stay as they are. A weight shared with an embedding also stays in the embedding.
    """
    if not backend.pack_pays([linear.weight for linear, _ in calls]):
        return
    parents = {
        id(child): (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
    }
    times = Counter(id(linear) for linear, _ in calls)
    packs: dict[tuple[int, int], list[nn.Linear]] = {}
    for linear, x in calls:
        if times[id(linear)] == 1:
            packs.setdefault((id(parents[id(linear)][0]), id(x)), []).append(linear)
    for linears in packs.values():
        pack = _Pack(linears, backend)
        for index, linear in enumerate(linears):
            parent, name = parents[id(linear)]
            setattr(parent, name, PackedLinear(pack, index, linear))
