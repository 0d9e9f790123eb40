"""Which backends the law tests run on, on this machine, and what they demand of a law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from foretoken.lab.laws.emission import TRIALS
from foretoken.lab.laws.findings import Finding
from foretoken.ops import BACKENDS, Backend, get_backend, unavailable

CPU = torch.device("cpu")
# Trials of one case in `make test`, on CPUs: 0.2 s of a core in `torch` on average, 0.25 s in
# `native` (2026-11).
QUICK = {"torch": 5_000, "native": 20_000}


class On(NamedTuple):
    """A backend, its name, and the device its tensors are on."""

    name: str
    backend: Backend
    device: torch.device

    @property
    def quick(self) -> int:
        """Trials that `make test` can afford; `make law` has them all."""
        return QUICK.get(self.name, TRIALS)


def runnable() -> list[On]:
    """The fast backends that can run here; the reference takes a millisecond per row."""
    found = [
        On(name, get_backend(name), CPU) for name in ("torch", "native") if not unavailable(name)
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
"""What shows the power of a law, not that a backend keeps it, is shown on one."""


def require(findings: Sequence[Finding]) -> None:
    """Fail with every law that is broken."""
    broken = [str(finding) for finding in findings if not finding.passed]
    assert findings
    assert not broken, "\n".join(broken)
