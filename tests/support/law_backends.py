"""Which backends the law tests run on, on this machine, and on which device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from foretoken.ops import BACKENDS, Backend, get_backend, unavailable

CPU = torch.device("cpu")


class On(NamedTuple):
    """A backend, its name, and the device its tensors are on."""

    name: str
    backend: Backend
    device: torch.device


def runnable() -> list[On]:
    """The fast backends that can run here; the reference takes a millisecond per row."""
    found = [
        On(name, get_backend(name), CPU)
        for name in ("torch_cpu", "native_cpu")
        if not unavailable(name)
    ]
    if "triton" in BACKENDS and torch.cuda.is_available() and not unavailable("triton"):
        found.append(On("triton", get_backend("triton"), torch.device("cuda")))
    return found


RUNNABLE = runnable()
FASTEST = RUNNABLE[-1]
TORCH = RUNNABLE[0]

each_backend = pytest.mark.parametrize("on", RUNNABLE, ids=lambda on: on.name)
"""The law holds on every backend."""

fastest = pytest.mark.parametrize("on", [FASTEST], ids=lambda on: on.name)
"""What shows the power of a test, not the law of a backend, is shown on one."""
