"""Linear layers for a CPU: packed for oneDNN, and one call for layers that read the same input.

Belongs here: replacing `nn.Linear` inside a loaded module. Model code stays as it is, and the
self-check compares the result with logits computed before.

Why: all linears of one forward (20 layers x 256 hidden, V 4096, float32, 2 threads, AMD EPYC with
AVX-512), ms:

    rows | stock (MKL) | packed | packed, q/k/v and gate/up in one call
    1    | 4.7         | 3.1    | 2.0
    5    | 5.0 to 6.8  | 3.3    | 2.2

And a row's result no longer depends on how many rows are computed with it: bit for bit from 1 to
256 rows, on that machine, for inputs of up to 768; at 2048 a single row still differs. With MKL two
and five rows always do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PackedLinear", "can_pack", "observe_linears", "pack_linears"]

# The row count that the packed layout is tuned for, one for all. With 1, single rows take another
# kernel, slower (3.5 ms instead of 2.7 in all) and with other rounding than several rows.
_ROWS_HINT = 64

# Smaller models stay as they are: their weights stay in the cache, where MKL's single rows are as
# fast and its calls 10 us cheaper (a draft of 2 layers x 256, one row: 0.57 ms stock, 0.73 packed).
MIN_BYTES = 16 << 20

LinearCalls = list[tuple[nn.Linear, Tensor]]
"""Linear layers with their inputs, in the order in which a forward pass called them."""


class PackedLinear(nn.Module):
    """One of the frozen linear layers of a `_Pack`; takes [..., in]."""

    def __init__(self, pack: _Pack, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self._pack, self._index = pack, index
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Some modules look at the dtype or shape of a weight; its numbers are in the pack.
        self.weight = torch.empty_like(linear.weight, device="meta")
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self._pack.output(x, self._index)


class _Pack:
    """Linear layers that read one input, computed together when the first of them is called.

    The others recognise the input by identity and take their part of the output. An input that is
    not the one last seen is computed afresh, so the order of calls affects speed only.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        ops: Any = torch.ops.mkldnn
        self._op = ops._linear_pointwise.default
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._weight = ops._reorder_linear_weight(weight, _ROWS_HINT)
        self._bias = _joint_bias(linears)
        self._sizes = [linear.out_features for linear in linears]
        self._last: tuple[Tensor | None, Sequence[Tensor]] = (None, ())

    def output(self, x: Tensor, index: int) -> Tensor:
        if len(self._sizes) == 1:
            return self._compute(x)
        last, outputs = self._last  # one tuple: threads can only make each other compute afresh
        if last is not x:
            outputs = torch.split_with_sizes(self._compute(x), self._sizes, -1)
            self._last = (x, outputs)
        elif index == len(outputs) - 1:
            self._last = (None, ())
        return outputs[index]

    def _compute(self, x: Tensor) -> Tensor:
        out: Tensor = self._op(x, self._weight, self._bias, "none", [], "")
        return out


def _joint_bias(linears: list[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
            for linear in linears
        ]
    ).detach()


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of PyTorch packs linear layers for this dtype and device."""
    return bool(
        device.type == "cpu"
        and dtype is torch.float32
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


@contextmanager
def observe_linears(module: nn.Module) -> Iterator[LinearCalls]:
    """Record which plain `nn.Linear` layers run inside, and what they read."""
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


def pack_linears(module: nn.Module, calls: LinearCalls) -> None:
    """Replace in place the linear layers that a forward pass called exactly once, if it pays.

    Siblings (children of one module) that read the same tensor share one pack. Others, such as
    experts, stay as they are. A weight shared with an embedding stays there too.
    """
    if sum(linear.weight.nbytes for linear, _ in calls) < MIN_BYTES:
        return
    parents = {
        id(child): (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
    }
    times: dict[int, int] = {}
    for linear, _ in calls:
        times[id(linear)] = times.get(id(linear), 0) + 1
    packs: dict[tuple[int, int], list[nn.Linear]] = {}
    for linear, x in calls:
        if times[id(linear)] == 1:
            packs.setdefault((id(parents[id(linear)][0]), id(x)), []).append(linear)
    for linears in packs.values():
        pack = _Pack(linears)
        for index, linear in enumerate(linears):
            parent, name = parents[id(linear)]
            setattr(parent, name, PackedLinear(pack, index, linear))
