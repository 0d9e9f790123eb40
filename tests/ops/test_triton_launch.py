"""A compiled kernel is called again for the arguments it was compiled for, and for no others.

Without a GPU: in place of a kernel stands what records how it is compiled and called.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken.ops import Stream
from tests.support.cases import make_params

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)


class Kernel:
    """Every compilation is numbered; `calls` are (number, grid, what the kernel is called with)."""

    def __init__(self) -> None:
        self.compiled = 0
        self.calls: list[tuple[int, int, tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def compile_(*given: Any, **options: Any) -> Any:
            self.compiled += 1
            return SimpleNamespace(run=run, function=self.compiled, packed_metadata=None)

        def run(x: int, _y: int, _z: int, _s: int, number: int, *rest: Any) -> None:
            self.calls.append((number, x, rest[4:]))

        return compile_


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("foretoken.ops.backends.triton.launch")
    monkeypatch.setattr(module, "_PLANS", {})
    monkeypatch.setattr(module, "check_device", lambda logits: None)
    stream = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(module, "driver", stream)
    return module


def call_of(launch: Any, dtypes: tuple[torch.dtype, ...] = (), width: int = 8) -> Any:
    where = (torch.zeros(2, dtype=torch.int64),) * 4
    noise = (Stream.TARGET_TOKEN, Stream.TARGET_BLOCK)
    logits_NV = torch.zeros(2, width)
    return launch.Call.of(logits_NV, make_params(2), where, None, False, noise, 1, dtypes)


def test_a_kernel_is_compiled_once_and_called_with_addresses(launch: Any) -> None:
    kernel, call = Kernel(), call_of(launch)
    first, second = torch.zeros(4), torch.zeros(4)
    for _ in range(3):
        call_of(launch).launch(kernel, 5, (first, 3, (second, (first,), 9), ()), True, num_warps=4)
    nested = (first.data_ptr(), 3, (second.data_ptr(), (first.data_ptr(),), 9), ())
    assert kernel.compiled == 1
    assert kernel.calls == [(1, 5, (*nested, True, call.overlap))] * 2


def test_other_arguments_have_a_kernel_of_their_own(launch: Any) -> None:
    """Each difference compiles; then all are called in turns, each by its own kernel."""
    kernel, even = Kernel(), torch.zeros(8)
    odd, third = even[1:], even[2:]
    plain: dict[str, Any] = {"given": (even, 1, (even, 2)), "constants": (True,), "warps": 4}
    others: list[dict[str, Any]] = [
        {},
        {"given": (odd, 1, (even, 2))},
        {"given": (even, 1, (odd, 2))},
        {"given": (third, 1, (even, 2))},
        {"given": (even, 2, (even, 1))},
        {"given": (even, 1, (even, 16))},
        {"constants": (False,)},
        {"warps": 8},
        {"early": False},
        {"dtypes": (torch.int32,)},
        {"dtypes": (torch.int64,)},
    ]
    for _ in range(3):
        for other in others:
            asked = plain | other
            call_of(launch, asked.get("dtypes", ())).launch(
                kernel, 1, asked["given"], *asked["constants"], early=asked.get("early", True),
                num_warps=asked["warps"],
            )  # fmt: skip
    assert kernel.compiled == len(others)
    assert [number for number, _, _ in kernel.calls] == [*range(1, len(others) + 1)] * 2


def test_logits_of_other_dtypes_and_kernels_are_told_apart(launch: Any) -> None:
    call, given = call_of(launch), (torch.zeros(4), 3)
    half = replace(call, dtypes=(call.dtypes[0], torch.float16))
    first, second = Kernel(), Kernel()
    for kernel in (first, second):
        for one in (call, half, call, half):
            one.launch(kernel, 1, given)
    assert [(number, x) for number, x, _ in first.calls] == [(1, 1), (2, 1)]
    assert [(number, x) for number, x, _ in second.calls] == [(1, 1), (2, 1)]
