"""A launch finds the kernel compiled for its arguments, and no other; compiling ahead.

No GPU is needed: kernels are compiled for one, and their calls are recorded, not made.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
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
from triton.runtime.cache import FileCacheManager

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
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[Any, ...]]]:
    """The calls of compiled kernels: number of the kernel, grid, arguments."""
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
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = driver._active
    driver.set_active(gpu)
    forget_kernels()
    yield made
    forget_kernels()
    driver.set_active(before)


def forget_kernels() -> None:
    """Kernels are looked up on disk again."""
    compiled._kernels.clear()
    for kernel in (scale_kernel, other_kernel, fill_kernel):
        kernel.device_caches.clear()


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
    changes = [("pair", Pair(x, x)), ("count", 1), ("count", 16), ("count", 2**40 + 1)]
    others: list[tuple[Any, dict[str, Any]]] = [(x, {}), (odd, {}), (x.half(), {})]
    others += [(x, {name: value}) for name, value in (*changes, ("width", 16), ("warps", 2))]
    for _ in range(2):
        for tensor, changed in others:
            scale(tensor, x, **changed)
    numbers = [number for number, _, _ in calls]
    assert numbers[: len(others)] == numbers[len(others) :] == list(range(1, len(others) + 1))


def test_a_size_that_is_not_compiled_in_shares_its_kernel(calls: list[Any]) -> None:
    x = torch.zeros(8)
    for size in (1, 5, 16, 2**40):
        compiled.launch(fill_kernel, (1,), x, size, WIDTH=8)
    found = [(number, given[1]) for number, _, given in calls]
    assert found == [(1, 1), (1, 5), (1, 16), (2, 2**40)]


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
def test_recorded_kernels_are_compiled_and_not_launched(calls: list[Any], processes: int) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    from_disk: list[bool] = []  # how this process got each kernel

    def run() -> None:
        for _ in range(2):
            scale(x, y)
            compiled.launch(other_kernel, (1,), x, WIDTH=8, num_warps=1)
        assert compiled.zero_if_recording(lambda: (torch.ones(2), None))()[0].sum() == 0

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: from_disk.append(cache_hit)
        for _ in range(2):
            forget_kernels()
            compiled.compile_ahead(run, processes)
            assert calls == []
            cached = [len(kernel.device_caches[0][0]) for kernel in (scale_kernel, other_kernel)]
            assert cached == [1, 1]
    assert from_disk == [processes > 1] * 2 + [True] * 2, "other processes compile, and only once"
    forget_kernels()
    scale(x, y)
    assert [grid for _, grid, _ in calls] == [(3, 2, 1)]
    assert compiled.zero_if_recording(lambda: torch.ones(2))().sum() == 2
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


def test_two_engines_are_compiled_one_after_the_other(calls: list[Any]) -> None:
    x, first_is_done, knobs = torch.zeros(8), threading.Event(), triton.knobs.cache

    def begin(kernel: Any, *given: Any, **named: Any) -> None:
        compiled.compile_ahead(lambda: compiled.launch(kernel, (1,), *given, **named), 1)

    other = threading.Thread(target=begin, args=(other_kernel, x), kwargs={"WIDTH": 8})

    class Cache(FileCacheManager):
        """Starts the other engine when the first looks for its kernel on disk."""

        def get_group(self, filename: str) -> Any:
            if threading.current_thread() is other:
                first_is_done.wait(10)
            elif other.ident is None:
                other.start()
                other.join(0.2)  # without the lock it would begin now
            return super().get_group(filename)

    with knobs.scope():
        knobs.manager_class = Cache
        begin(other_kernel, x, WIDTH=16)
        first_is_done.set()
        other.join()
        assert knobs.manager_class is Cache
    assert len(other_kernel.device_caches[0][0]) == 2


def test_a_kernel_that_does_not_compile_is_an_error_there(calls: list[Any]) -> None:
    x = torch.zeros(8)

    def run() -> None:
        compiled.launch(other_kernel, (1,), x, WIDTH=7, num_warps=1)
        compiled.launch(other_kernel, (1,), x, WIDTH=8, num_warps=1)

    with pytest.raises(triton.CompilationError):
        compiled.compile_ahead(run, 2)
    assert calls == []


def test_steps_of_all_sizes_share_their_kernels(calls: list[Any]) -> None:
    """Launches are recorded, not made: one request, odd numbers and multiples of 16."""
    state = make_case(1, 30, 4, device=torch.device("cpu")).state
    module = importlib.import_module("foretoken.ops.backends.triton.steps")
    most = 4

    def run(*sizes: int) -> None:
        steps = module.Steps(state)
        for size in sizes:
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

    first = compiled.record_launches(lambda: run(3))
    assert len(first) == 7  # `pack_kernel` twice: of a step, and of a round of drafting
    every = compiled.record_launches(lambda: run(3, 1, 2, 5, 7, 16, 17, 32, 33))
    assert len(every) == len(first)
