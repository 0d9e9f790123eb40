"""A launch finds the kernel compiled for its arguments, and no other; compiling ahead.

Without a GPU: kernels are compiled for one, and in place of calling them their calls are noted.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from foretoken.ops.steps import DraftRequests, PackSizes, StepTokens
from foretoken.ops.types import Verdict
from tests.ops.test_steps import make_case
from tests.support.cases import make_params

compiled = importlib.import_module("foretoken.ops.backends.triton.compiled")


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor | None


@triton.jit
def scale_kernel(x, y, pair: Pair, count, factor, WIDTH: tl.constexpr, TWICE: tl.constexpr = False):
    i = tl.arange(0, WIDTH)
    value = tl.load(x + i, mask=i < count, other=0.0) + tl.load(pair.one + i)
    tl.store(y + i, value * factor)


@triton.jit
def other_kernel(x, WIDTH: tl.constexpr):
    tl.store(x + tl.arange(0, WIDTH), 1.0)


@triton.jit(do_not_specialize=["size"])
def fill_kernel(x, size, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    tl.store(x + i, size, mask=i < size)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[tuple[Any, ...]]:
    """What compiled kernels are called with: number of the kernel, grid, arguments."""
    made: list[tuple[Any, ...]] = []
    numbers: list[Any] = []

    def launcher(source: Any, metadata: Any) -> Any:
        numbers.append(source)
        number = len(numbers)
        return lambda *given: made.append((number, given[:3], given[9:]))

    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 7,
        launcher_cls=launcher,
        utils=SimpleNamespace(
            load_binary=lambda *given: (1, 2, 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        ),
    )
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for kernel in (scale_kernel, other_kernel, fill_kernel):
        kernel.device_caches.clear()
    return made


def scale(x: torch.Tensor, y: torch.Tensor, **changed: Any) -> None:
    given = {"pair": Pair(x, None), "count": 5, "factor": 0.5, "width": 8, "warps": 1} | changed
    compiled.launch(
        scale_kernel, (3, 2), x, y, given["pair"], given["count"], given["factor"],
        WIDTH=given["width"], num_warps=given["warps"],
    )  # fmt: skip


def test_a_kernel_is_bound_once_and_then_called_with_addresses(calls: list[Any]) -> None:
    first, second = torch.zeros(8), torch.zeros(8)
    scale(first, second)
    assert len(calls) == 1
    scale(second, first, count=7, factor=2.5)
    number, grid, given = calls[1]
    at, to = second.data_ptr(), first.data_ptr()
    assert (number, grid) == (1, (3, 2, 1))
    assert given == (at, to, (at, None), 7, 2.5, 8, None)


def test_other_arguments_have_kernels_of_their_own(calls: list[Any]) -> None:
    x, odd = torch.zeros(8), torch.zeros(9)[1:]
    others: list[tuple[Any, dict[str, Any]]] = [
        (x, {}),
        (odd, {}),
        (x.half(), {}),
        (x, {"pair": Pair(x, x)}),
        (x, {"count": 1}),
        (x, {"count": 16}),
        (x, {"count": 2**40 + 1}),
        (x, {"width": 16}),
        (x, {"warps": 2}),
    ]
    for _ in range(2):
        for tensor, changed in others:
            scale(tensor, x, **changed)
    numbers = [number for number, _, _ in calls]
    assert numbers[: len(others)] == numbers[len(others) :] == list(range(1, len(others) + 1))


def test_a_size_that_is_not_compiled_in_shares_its_kernel(calls: list[Any]) -> None:
    x = torch.zeros(8)
    for size in (1, 5, 16, 2**40):
        compiled.launch(fill_kernel, (1,), x, size, WIDTH=8)
    assert [(number, given[1]) for number, _, given in calls] == [
        (1, 1),
        (1, 5),
        (1, 16),
        (2, 2**40),
    ]


def test_a_shared_argument_is_packed_once(calls: list[Any]) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    for one, other in ((x, None), (x, y), (x.half(), None)):
        pair = Pair(one, other)
        shared = compiled.Shared(pair)
        for _ in range(2):
            scale(x, y, pair=shared)
        scale(x, y, pair=pair)
    numbers = [number for number, _, _ in calls]
    assert numbers == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    packed = calls[1][2][2]
    assert packed == (x.data_ptr(), None)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_noted_is_compiled_and_not_launched(
    calls: list[Any], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    missing, forked = [], compiled._compile_in_processes
    monkeypatch.setattr(
        compiled,
        "_compile_in_processes",
        lambda jobs, count: (missing.append((len(jobs), count)), forked(jobs, count)),
    )

    def run() -> None:
        for _ in range(2):
            scale(x, y)
            compiled.launch(other_kernel, (1,), x, WIDTH=8, num_warps=1)
        assert compiled.zero_if_noted(lambda: (torch.ones(2), None))()[0].sum() == 0

    for _ in range(2):
        compiled.compile_ahead(run, processes)
        assert calls == []
        cached = [len(kernel.device_caches[0][0]) for kernel in (scale_kernel, other_kernel)]
        assert cached == [1, 1]
        for kernel in (scale_kernel, other_kernel, fill_kernel):
            kernel.device_caches.clear()
    assert missing == ([] if processes == 1 else [(2, 2)]), "not those on disk"
    scale(x, y)
    assert [grid for _, grid, _ in calls] == [(3, 2, 1)]
    assert compiled.zero_if_noted(lambda: torch.ones(2))().sum() == 2
    compiled.compile_ahead(lambda: scale(x, y), processes)
    assert len(calls) == 1, "a kernel that is compiled is not launched either"


def test_other_threads_launch_meanwhile(calls: list[Any]) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    other = threading.Thread(target=scale, args=(x, y))

    def run() -> None:
        other.start()
        other.join()

    compiled.compile_ahead(run, 2)
    assert len(calls) == 1


def test_two_engines_are_compiled_one_after_the_other(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, before = torch.zeros(8), triton.knobs.cache.manager_class
    first_is_done, real = threading.Event(), compiled._warm_up

    def begin(kernel: Any, *given: Any, **named: Any) -> None:
        compiled.compile_ahead(lambda: compiled.launch(kernel, (1,), *given, **named), 1)

    other = threading.Thread(target=begin, args=(other_kernel, x), kwargs={"WIDTH": 8})

    def warm_up(job: Any) -> Any:
        if threading.current_thread() is other:
            first_is_done.wait(10)
        elif other.ident is None:
            other.start()
            other.join(0.2)  # where it is free to, it begins now
        return real(job)

    monkeypatch.setattr(compiled, "_warm_up", warm_up)
    begin(other_kernel, x, WIDTH=16)
    first_is_done.set()
    other.join()
    assert triton.knobs.cache.manager_class is before
    assert len(other_kernel.device_caches[0][0]) == 2


def test_a_kernel_that_does_not_compile_is_an_error_there(calls: list[Any]) -> None:
    x = torch.zeros(8)

    def run() -> None:
        compiled.launch(other_kernel, (1,), x, WIDTH=7, num_warps=1)
        compiled.launch(other_kernel, (1,), x, WIDTH=8, num_warps=1)

    with pytest.raises(triton.CompilationError):
        compiled.compile_ahead(run, 2)
    assert calls == []


def test_steps_of_all_sizes_share_their_kernels(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches are noted, as ahead of compiling: one request, odd numbers and multiples of 16."""
    noted: dict[Any, Any] = {}
    monkeypatch.setattr(compiled._thread, "noted", noted)
    state = make_case(1, 30, 4, device=torch.device("cpu")).state
    steps = importlib.import_module("foretoken.ops.backends.triton.steps").Steps(state)

    def run(size: int, most: int) -> None:
        slot_B, ones_B = torch.arange(size), torch.ones(size, dtype=torch.int64)
        num_B, position_B = steps.count_drafts(slot_B, ones_B)
        asked = DraftRequests(slot_B, num_B, position_B, most, make_params(34))
        tokens = StepTokens(slot_B, ones_B, None, num_B)
        packed = PackSizes(size * (most + 1), size * (most + 1), most + 1)
        batch = steps.pack(tokens, packed, 16)
        steps.shift(slot_B, batch.attention, packed.tokens)
        token_BK1, finite_B = num_B.new_zeros(size, most + 1), num_B > 0
        steps.advance(tokens, Verdict(token_BK1, num_B, finite_B))
        steps.begin_round(asked, 2, 99, 16)
        drafts = steps.join_drafts([num_B] * most, num_B)
        steps.write_drafts(asked, num_B, drafts, 99)

    run(3, 4)
    first = len(noted)
    assert first == 7  # `pack_kernel` twice: of a step, and of a round of drafting
    for size in (1, 2, 5, 7, 16, 17, 32, 33):
        run(size, 4)
    assert len(noted) == first
