"""Pinned memory is lent again only when its copy is done, and never given back to PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.ops.pinned import Pool, Staging, ToHost, to_device

GPU = torch.device("cuda")


class Event:
    def __init__(self) -> None:
        self.has_passed = False

    def record(self) -> None:
        recorded.append(self)

    def query(self) -> bool:
        return self.has_passed


recorded: list[Event] = []


@pytest.fixture
def pool() -> Pool:
    """Ordinary memory, and events of no device."""
    recorded.clear()
    return Pool(lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8), Event)


def place(staging: Staging) -> int:
    return staging.host.data_ptr()


def test_memory_under_a_copy_is_not_lent(pool: Pool) -> None:
    first = Staging((3, 5), torch.int64, GPU, pool)
    at = place(first)
    assert first.host.shape == (3, 5)
    first.give_back()
    second = Staging((3, 5), torch.int64, GPU, pool)
    assert place(second) != at
    recorded[0].has_passed = True
    assert place(Staging((7,), torch.float32, GPU, pool)) == at
    assert place(Staging((7,), torch.float32, GPU, pool)) not in (at, place(second))


def test_each_size_has_its_own_memory(pool: Pool) -> None:
    small, large = Staging((1,), torch.int64, GPU, pool), Staging((1000,), torch.int64, GPU, pool)
    for staging in (small, large):
        staging.give_back()
        staging.give_back()  # once is enough
    for event in recorded:
        event.has_passed = True
    assert len(recorded) == 2
    assert place(Staging((900,), torch.int64, GPU, pool)) == place(large)
    assert place(Staging((2, 4), torch.bool, GPU, pool)) == place(small)
    assert Staging((0, 4), torch.bool, GPU, pool).host.shape == (0, 4)


def test_an_event_of_the_caller_is_enough(pool: Pool) -> None:
    event, staging = Event(), Staging((4,), torch.int64, GPU, pool)
    staging.give_back(event)  # type: ignore[arg-type]
    assert not recorded
    event.has_passed = True
    assert place(Staging((4,), torch.int64, GPU, pool)) == place(staging)


class OnGpu(Tensor):
    device = GPU
    is_cuda = True


def test_memory_of_unread_copies_is_lent_again(pool: Pool) -> None:
    numbers = torch.arange(3).as_subclass(OnGpu)
    unread = ToHost([numbers], pool)
    (at,) = (staging.host.data_ptr() for staging in unread._staged)
    del unread
    (event,) = recorded
    assert place(Staging((3,), torch.int64, GPU, pool)) != at
    event.has_passed = True
    assert place(Staging((3,), torch.int64, GPU, pool)) == at


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    assert to_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data
