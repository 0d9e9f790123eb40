"""Replace `nn.Linear` in a loaded module by layers packed for oneDNN on a CPU.

Layers that read the same input run in one call. The self-check compares the result with logits from
before the replacement. For the gain, and for the shapes at which a row's result does not depend on
other rows, see docs/decisions/004-packed-linears-on-cpu.md.
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
    """A linear layer with frozen weights that a `_Pack` holds and multiplies."""

    def __init__(self, pack: _Pack, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self._pack, self._index = pack, index
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Some modules read the weight's dtype or shape. Its numbers are in the pack.
        self.weight = torch.empty_like(linear.weight, device="meta")
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self._pack.output(x, self._index)


class _Pack:
    """Linear layers with the same input, computed together when the first of them is called.

    The pack keeps its last input and output. A layer that is called with the same input object
    takes one part of that output. With another input the output is computed anew, so the order of
    calls affects only speed.
    """

    def __init__(self, linears: list[nn.Linear], backend: Backend) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._linear = backend.pack(Linear(Dense(weight), _joint_bias(linears)))
        self._multiply = backend.multiply
        self._sizes = [linear.out_features for linear in linears]
        self._last: tuple[Tensor | None, Sequence[Tensor]] = (None, ())

    def output(self, x: Tensor, index: int) -> Tensor:
        """The output of layer `index` for the input `x` [..., in]: [..., out]."""
        if len(self._sizes) == 1:
            return self._multiply(x, self._linear)
        # `_last` is read once, so that another thread can at worst cause one more computation.
        last_input, outputs = self._last
        if last_input is not x:
            outputs = torch.split_with_sizes(self._multiply(x, self._linear), self._sizes, -1)
            self._last = (x, outputs)
        elif index == len(outputs) - 1:
            self._last = (None, ())
        return outputs[index]


def _joint_bias(linears: list[nn.Linear]) -> Tensor | None:
    """The concatenated biases, with zeros for a layer without bias; None if no layer has one."""
    if all(linear.bias is None for linear in linears):
        return None
    biases: list[Tensor] = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return torch.cat(biases).detach()


@contextmanager
def observe_linears(module: nn.Module) -> Iterator[LinearCalls]:
    """Record the plain `nn.Linear` layers that run in the body of the `with`, and their inputs."""
    calls: LinearCalls = []

    def record(linear: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(linear, nn.Linear):
            calls.append((linear, args[0]))

    linears = [child for child in module.modules() if type(child) is nn.Linear]
    handles = [linear.register_forward_pre_hook(record) for linear in linears]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def pack_linears(module: nn.Module, calls: LinearCalls, backend: Backend) -> None:
    """Replace linear layers of a module by packed layers, in place, if the backend becomes faster.

    Only layers that a forward pass called exactly once are replaced, so experts are not. Children
    of one module that read the same tensor share one pack. A weight that is shared with an
    embedding also stays in the embedding.

    Args:
        calls: the linear layers' calls in one forward pass.
    """
    if not backend.pack_pays([linear.weight for linear, _ in calls]):
        return
    parents = {
        id(child): (parent, name)
        for parent in module.modules() for name, child in parent.named_children()
    }  # fmt: skip
    num_calls = Counter(id(linear) for linear, _ in calls)
    siblings: dict[tuple[int, int], list[nn.Linear]] = {}  # by parent and input
    for linear, x in calls:
        if num_calls[id(linear)] == 1:
            siblings.setdefault((id(parents[id(linear)][0]), id(x)), []).append(linear)
    for linears in siblings.values():
        pack = _Pack(linears, backend)
        for index, linear in enumerate(linears):
            parent, name = parents[id(linear)]
            setattr(parent, name, PackedLinear(pack, index, linear))
