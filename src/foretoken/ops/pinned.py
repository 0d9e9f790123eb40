"""Pinned memory of the host: a device copies from and to it while the host continues to run.

A copy from ordinary memory may make the host wait for everything that was launched before.

Pinned memory is reused here, and never given back to PyTorch. Before PyTorch frees pinned memory,
it asks the device whether the copies are done. If the device has failed, this query raises an
error in a destructor, which ends the process before the failure can be reported (torch 2.11).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MIN_BYTES = 4096  # smallest piece of pinned memory; the bytes of a piece are a power of 2
_FILL_BYTES = 4 << 20  # of each piece that `fill` copies
_MAX_RUNNING = 8  # copies of `fill` that may run at the same time


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _pin(num_bytes: int) -> Tensor:
    piece = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(piece))  # never freed: see the module's docstring
    return piece


class Pool:
    """Pieces of pinned memory that are lent and given back.

    Args:
        pin: allocates a uint8 tensor of that many bytes.
        new_event: makes an event of the device.
    """

    def __init__(
        self, pin: Callable[[int], Tensor] = _pin, new_event: Callable[[], Any] = _new_event
    ) -> None:
        self._pin, self._new_event = pin, new_event
        # Idle pieces by their bytes. A piece may be overwritten once its event has passed.
        self._idle: defaultdict[int, deque[tuple[Tensor, Any]]] = defaultdict(deque)

    def lend(self, num_bytes: int) -> Tensor:
        """The piece that has been idle longest, if its copies are done, else a new piece."""
        idle = self._idle[num_bytes]
        try:
            piece, event = idle.popleft()
        except IndexError:
            return self._pin(num_bytes)
        if event.query():
            return piece
        idle.appendleft((piece, event))
        return self._pin(num_bytes)

    def give_back(self, piece: Tensor, event: Any) -> None:
        self._idle[len(piece)].append((piece, event))

    def record(self) -> Any:
        """An event that passes once everything that was launched before is done."""
        event = self._new_event()
        event.record()
        return event


POOL = Pool()


class Staging:
    """A tensor `host`, valid until `give_back`: in pinned memory, or in ordinary memory if `device`
    is a CPU."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pool: Pool = POOL
    ) -> None:
        self._piece: Tensor | None = None
        if device.type == "cpu":
            self.host = torch.empty(shape, dtype=dtype)
            return
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._pool = pool
        self._piece = pool.lend(max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length()))
        self.host = self._piece[:num_bytes].view(dtype).view(shape)

    def give_back(self, event: torch.cuda.Event | None = None) -> None:
        """Allow reuse of `host` once `event` has passed; None: once all launched work is done."""
        if self._piece is not None:
            self._pool.give_back(self._piece, self._pool.record() if event is None else event)
            self._piece = None


class ToHost:
    """Copies of a device's tensors in host memory, made after all work that was launched before.
    Tensors on a CPU are not copied, and must not be written to later."""

    def __init__(self, tensors: Sequence[Tensor], pool: Pool = POOL) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = [*tensors]
        if tensors[0].is_cuda:
            self._staged = [Staging(tuple(t.shape), t.dtype, t.device, pool) for t in tensors]
            self._copies = [staging.host for staging in self._staged]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._event = pool.record()

    def wait(self) -> list[Tensor]:
        """The copies, once they are complete."""
        if self._event is not None:
            self._event.synchronize()
            self._copies = [copy.clone() for copy in self._copies]
            self._give_back()
        return self._copies

    def _give_back(self) -> None:
        if self._event is not None:
            for staging in self._staged:
                staging.give_back(self._event)
            self._event = None

    __del__ = _give_back  # `wait` is never called for results of a captured step


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copy an array to a device, in launch order; a tensor on a CPU shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    staging = Staging(array.shape, tensor.dtype, device)
    staging.host.copy_(tensor)
    copy = staging.host.to(device, non_blocking=True)
    staging.give_back()
    return copy


def fill(target: Tensor, source: Tensor) -> None:
    """Copy a large host tensor to a contiguous tensor of the same shape, and wait for the copy. The
    driver's own copies, from memory that is not pinned, take twice as long (15 GiB to an H100:
    2.5 s instead of 1.3 s; notes of `loading_gpu.json`)."""
    if target.device.type == "cpu":
        target.copy_(source)
        return
    numel, running = _FILL_BYTES // target.element_size(), deque[torch.cuda.Event]()
    pieces = (torch.split(tensor.view(-1), numel) for tensor in (target, source))
    for target_piece, source_piece in zip(*pieces, strict=True):
        if len(running) == _MAX_RUNNING:
            running.popleft().synchronize()
        staging = Staging(source_piece.shape, target.dtype, target.device)
        staging.host.copy_(source_piece)
        target_piece.copy_(staging.host, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(target.device))
        staging.give_back(event)
        running.append(event)
    for event in running:
        event.synchronize()
