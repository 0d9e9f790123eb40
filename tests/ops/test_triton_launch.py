"""A compiled kernel is called again for the arguments it was compiled for, and for no others.

Without a GPU: in place of a kernel stands what records how it is compiled and called.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
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
    monkeypatch.setattr(module, "_KERNELS", {})
    monkeypatch.setattr(module, "_PACKERS", {})
    monkeypatch.setattr(module, "check_device", lambda logits: None)
    stream = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(module, "driver", stream)
    return module


def call_of(launch: Any, variant: tuple[Any, ...] = (), width: int = 8) -> Any:
    requests = launch.requests_of(*[torch.zeros(2, dtype=torch.int64)] * 4)
    logits_NV, stream = torch.zeros(2, width), Stream.TARGET_TOKEN
    return launch.Call(logits_NV, make_params(2), requests, None, None, False, stream, 1, *variant)


def addresses(value: Any) -> Any:
    """What a compiled kernel is called with in place of tensors, at any depth."""
    if isinstance(value, tuple):
        return tuple(map(addresses, value))
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def test_a_kernel_is_compiled_once_and_called_with_addresses(launch: Any) -> None:
    kernel, called = Kernel(), []
    first, second = torch.zeros(4), torch.zeros(4)
    given = (first, 3, (second, None, (first,), 9), ())
    for _ in range(3):
        call = call_of(launch)
        call.launch(kernel, 5, given, True, num_warps=4)
        called.append((1, 5, (addresses(call.batch), *addresses(given), True, call.overlap)))
    assert kernel.compiled == 1
    assert kernel.calls == called[1:]


def test_the_batch_is_packed_once_for_all_kernels_of_an_op(launch: Any) -> None:
    call, kernels = call_of(launch), (Kernel(), Kernel())
    for kernel in (*kernels, *kernels):
        call.launch(kernel, 1, ())
    packed = [kernel.calls[0][2][0] for kernel in kernels]
    assert packed[0] is packed[1]
    assert packed[0] == addresses(call.batch)


def test_what_is_none_cannot_become_a_tensor(launch: Any) -> None:
    """The variant must tell such calls apart: their kernels are compiled for None."""
    kernel, call, x = Kernel(), call_of(launch), torch.zeros(4)
    call.launch(kernel, 1, (x, (None, 1)))
    for other in ((x, (x, 1)), (None, (None, 1))):
        with pytest.raises((TypeError, AttributeError)):
            call.launch(kernel, 1, other)
    call_of(launch, ("other",)).launch(kernel, 1, (x, (x, 1)))
    assert kernel.compiled == 2


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
        {"width": 9},
        {"variant": (torch.int32,)},
        {"variant": (torch.int64,)},
    ]
    for _ in range(3):
        for other in others:
            asked = plain | other
            call_of(launch, asked.get("variant", ()), asked.get("width", 8)).launch(
                kernel, 1, asked["given"], *asked["constants"], early=asked.get("early", True),
                num_warps=asked["warps"],
            )  # fmt: skip
    assert kernel.compiled == len(others)
    assert [number for number, _, _ in kernel.calls] == [*range(1, len(others) + 1)] * 2


def test_logits_of_other_dtypes_and_kernels_are_told_apart(launch: Any) -> None:
    call, given = call_of(launch), (torch.zeros(4), 3)
    half = copy.copy(call)
    half.variant = (call.variant[0], torch.float16)
    first, second = Kernel(), Kernel()
    for kernel in (first, second):
        for one in (call, half, call, half):
            one.launch(kernel, 1, given)
    assert [(number, x) for number, x, _ in first.calls] == [(1, 1), (2, 1)]
    assert [(number, x) for number, x, _ in second.calls] == [(1, 1), (2, 1)]
