"""Tensors that pretend to be on another device: what must not read or mix in host tensors runs on
them without any such device.

    with Elsewhere():
        there = torch.arange(3).to(DEVICE)  # computed on the CPU, but `there.device` is DEVICE
        there + torch.arange(3)  # raises: one operand is on the host

Numbers that Python asks for (`int(x)`, `if x:`) are given, as a device would after a wait; copies
to the CPU are given outside of `forbidding`'s functions only, that is, to the tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")  # a name that asks for no driver
CPU = torch.device("cpu")


class _There(Tensor):
    """Wraps a CPU tensor, `held`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> _There:
        strides, offset = held.stride(), held.storage_offset()
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=strides, storage_offset=offset, dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a tensor of another device is used outside of `Elsewhere`")


class Elsewhere(TorchDispatchMode):
    """Runs operators of tensors on `DEVICE`, and refuses those that mix them with host tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        there = [x for x in given if isinstance(x, _There)]
        copies = func._schema.name in ("aten::_to_copy", "aten::copy_")
        if there and not copies and any(x.dim() and not isinstance(x, _There) for x in given):
            raise RuntimeError(f"{func}: some tensors are on {DEVICE}, some on the host")
        device = kwargs.get("device")
        if device is not None:
            kwargs = {**kwargs, "device": CPU}
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, _There) else x, (args, kwargs))
        out = func(*args, **kwargs)
        if device == DEVICE or (device is None and there):
            out = tree_map(lambda x: _There(x) if isinstance(x, Tensor) else x, out)
        return out
