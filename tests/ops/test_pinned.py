"""Pinned memory is lent again only when its copy is done, and never given back to PyTorch."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.ops import pinned
from foretoken.ops.pinned import Staging, ToHost, to_device

GPU = torch.device("cuda")


class Event:
    """What has been recorded, and has passed once somebody says so."""

    def __init__(self) -> None:
        self.has_passed = False

    def record(self) -> None:
        made.append(self)

    def query(self) -> bool:
        return self.has_passed


made: list[Event] = []


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        return torch.zeros(size, dtype=dtype)

    made.clear()
    monkeypatch.setattr(pinned, "_idle", defaultdict(deque))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(pinned.torch, "empty", pin)


def place(staging: Staging) -> int:
    return staging.host.data_ptr()


def test_memory_under_a_copy_is_not_lent() -> None:
    first = Staging((3, 5), torch.int64, GPU)
    at = place(first)
    assert first.host.shape == (3, 5)
    first.give_back()
    second = Staging((3, 5), torch.int64, GPU)
    assert place(second) != at
    made[0].has_passed = True
    assert place(Staging((7,), torch.float32, GPU)) == at
    assert place(Staging((7,), torch.float32, GPU)) not in (at, place(second))


def test_each_size_has_its_own() -> None:
    small, large = Staging((1,), torch.int64, GPU), Staging((1000,), torch.int64, GPU)
    for staging in (small, large):
        staging.give_back()
        staging.give_back()  # once is enough
    for event in made:
        event.has_passed = True
    assert len(made) == 2
    assert place(Staging((900,), torch.int64, GPU)) == place(large)
    assert place(Staging((2, 4), torch.bool, GPU)) == place(small)
    assert Staging((0, 4), torch.bool, GPU).host.shape == (0, 4)


def test_an_event_of_the_caller_is_enough() -> None:
    event, staging = Event(), Staging((4,), torch.int64, GPU)
    staging.give_back(event)  # type: ignore[arg-type]
    assert not made
    event.has_passed = True
    assert place(Staging((4,), torch.int64, GPU)) == place(staging)


class OnGpu(Tensor):
    device = GPU
    is_cuda = True


def test_what_nobody_reads_is_lent_again() -> None:
    numbers = torch.arange(3).as_subclass(OnGpu)
    unread = ToHost([numbers])
    (at,) = (staging.host.data_ptr() for staging in unread._staged)
    del unread
    (event,) = made
    assert place(Staging((3,), torch.int64, GPU)) != at
    event.has_passed = True
    assert place(Staging((3,), torch.int64, GPU)) == at


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    assert to_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data
