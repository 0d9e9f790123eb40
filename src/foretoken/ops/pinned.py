"""Pinned memory of the host: a device copies from and to it while the host goes on.

A copy from ordinary memory may wait for all that was launched before it, so that the host cannot
run ahead. A copy from pinned memory never waits.

PyTorch frees pinned memory by asking the device whether the copies are done. Once the device has
failed, that raises an error in a destructor, which ends the process before the failure can be
reported (torch 2.11). So memory pinned here is reused, and never given back to PyTorch.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LEAST = 4096  # bytes of a piece; sizes are powers of 2
_PIECE, _PIECES = 4 << 20, 8  # bytes that `fill` copies at once, and how often ahead of the GPU

_idle: defaultdict[int, deque[tuple[Tensor, torch.cuda.Event]]] = defaultdict(deque)
"""Pieces by size, each with the event that must have passed before it may be overwritten."""


class Staging:
    """A tensor in pinned memory, until `give_back`; on a CPU, in ordinary memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._piece: Tensor | None = None
        if device.type == "cpu":
            self.host = torch.empty(shape, dtype=dtype)
            return
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._piece = _lend(max(_LEAST, 1 << (num_bytes - 1).bit_length()))
        self.host = self._piece[:num_bytes].view(dtype).view(shape)

    def give_back(self, event: torch.cuda.Event | None = None) -> None:
        """Allow reuse once the event, or all that was launched until now, has passed."""
        if self._piece is not None:
            if event is None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            _idle[len(self._piece)].append((self._piece, event))
            self._piece = None


class ToHost:
    """Copies tensors to the host, after all that was launched before.

    On a CPU these are the tensors themselves: nothing may be written to them later.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = [*tensors]
        if tensors[0].is_cuda:
            self._staged = [Staging(tuple(t.shape), t.dtype, t.device) for t in tensors]
            self._host = [staging.host for staging in self._staged]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The copies, once they are complete."""
        if self._event is not None:
            self._event.synchronize()
            self._host = [host.clone() for host in self._host]
            self._give_back()
        return self._host

    def _give_back(self) -> None:
        if self._event is not None:
            for staging in self._staged:
                staging.give_back(self._event)
            self._event = None

    __del__ = _give_back  # the results of captures are never read


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """The array as a tensor on a device, after earlier launches; a CPU shares its memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    staging = Staging(array.shape, tensor.dtype, device)
    staging.host.copy_(tensor)
    sent = staging.host.to(device, non_blocking=True)
    staging.give_back()
    return sent


def fill(to: Tensor, source: Tensor) -> None:
    """Copy a large host tensor to a contiguous one of its shape, of any dtype, on any device.

    It returns when the copy is done. The driver's own copies, from memory that is not pinned, take
    twice as long (15 GiB to an H100: 2.5 s against 1.3 s; notes of `loading_gpu.json`).
    """
    if to.device.type == "cpu":
        to.copy_(source)
        return
    numbers, under_way = _PIECE // to.element_size(), deque[torch.cuda.Event]()
    pieces = (torch.split(one.view(-1), numbers) for one in (to, source))
    for new, old in zip(*pieces, strict=True):
        if len(under_way) == _PIECES:
            under_way.popleft().synchronize()
        staging = Staging(old.shape, to.dtype, to.device)
        staging.host.copy_(old)
        new.copy_(staging.host, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(to.device))
        staging.give_back(event)
        under_way.append(event)
    for event in under_way:
        event.synchronize()


def _lend(num_bytes: int) -> Tensor:
    """The piece that has been idle for longest, or a new one if its last copy is not done."""
    idle = _idle[num_bytes]
    try:
        piece, event = idle.popleft()
    except IndexError:
        return _pin(num_bytes)
    if event.query():  # type: ignore[no-untyped-call]
        return piece
    idle.appendleft((piece, event))
    return _pin(num_bytes)


def _pin(num_bytes: int) -> Tensor:
    piece = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(piece))  # never freed: see the top of this file
    return piece
