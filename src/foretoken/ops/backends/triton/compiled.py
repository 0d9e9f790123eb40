"""Compiled kernels: called with little of the host's time, and compiled ahead in parallel.

Triton binds a kernel's arguments anew at each launch: 33 to 70 us of the host's time for records of
tensors. Here what a kernel was compiled for is found by a key of its arguments, and the compiled
kernel is called as Triton's own launcher would (3.6 and 3.7), but without hooks.

Compiling takes 0.2 to 0.5 s of Python a kernel, most of it under the interpreter's lock, so that
two threads saved 8 % and processes are what helps. They are forked, fill Triton's cache on disk and
end; they never touch the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from foretoken.ops.types import AttentionBatch

_DEADLINE = 300.0  # seconds for all processes together; what is not compiled then, is at its launch

P = ParamSpec("P")
Out = TypeVar("Out")

_Key = tuple[Any, ...]
_Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]

_kernels: dict[_Key, tuple[Any, ...]] = {}
_noted: dict[_Key, _Launch] | None = None
"""Inside `compiling_ahead`: one launch for each kernel that is not compiled."""


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
    """What `kernel[grid](*given, **named)` does, faster from the second time on.

    Args:
        given: runtime arguments, all by position: tensors, numbers, None, tensor maps, tuples of
            them; constants may follow.
        named: other constants, and options such as `num_warps`.
    """
    if not isinstance(kernel, JITFunction):  # interpreted
        kernel[grid](*given, **named)
        return
    number, device = _runtime_arguments(kernel), driver.active.get_current_device()
    kinds: list[Any] = []
    packed = [_pack(value, kinds) for value in given[:number]]
    constants = given[number:]
    key = (id(kernel), device, constants, tuple(named.items()), tuple(kinds))
    known = _kernels.get(key)
    if _noted is not None:
        if known is None:
            _noted[key] = kernel, grid, given, named
    elif known is None:
        compiled = kernel[grid](*given, **named)
        # AMD's kernels also depend on the size of each tensor.
        if compiled is not None and not torch.version.hip:
            rest = [named.get(name) for name in kernel.arg_names[len(given) :]]
            _kernels[key] = compiled.run, compiled.function, compiled.packed_metadata, rest
    else:
        run, function, metadata, rest = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        run(
            x, y, z, stream, function, metadata, None, None, None, *packed, *constants, *rest
        )  # fmt: skip


def is_noted(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> bool:
    """Inside `compiling_ahead`, note this launch, which the caller then leaves out."""
    if _noted is None:
        return False
    launch(kernel, grid, *given, **named)
    return True


@cache
def _runtime_arguments(kernel: Any) -> int:
    """How many arguments come before the first constant."""
    return next((p.num for p in kernel.params if p.is_constexpr), len(kernel.params))


def _pack(value: Any, kinds: list[Any]) -> Any:
    """A value with tensors replaced by their addresses; `kinds` gets what is compiled in of it."""
    if isinstance(value, Tensor):
        address = value.data_ptr()
        kinds.append(value.dtype)
        if address % 16:
            kinds.append("unaligned")
        return address
    if isinstance(value, tuple):
        return tuple([_pack(one, kinds) for one in value])
    if isinstance(value, int):
        kinds.append(1 if value == 1 else 16 if value % 16 == 0 else 0)
        if not -(2**31) <= value < 2**31:
            kinds.append("wide")
        return value
    kinds.append(None if value is None else type(value))
    return value


@contextmanager
def compiling_ahead(processes: int | None = None) -> Iterator[None]:
    """Launch nothing inside; compile all that would have been launched on leaving, in parallel.

    Results are memory as it was: `zero_if_noted` makes those of an op safe to go on with. Under
    Triton's interpreter, which compiles nothing, launches run.

    Args:
        processes: None: one per CPU that this process may use, up to 16.
    """
    global _noted
    _noted = {}
    try:
        yield
        jobs = list(_noted.values())
    finally:
        _noted = None
    if not jobs:
        return
    count = min(processes or len(os.sched_getaffinity(0)), 16, len(jobs))
    if count > 1:
        _compile_in_processes(jobs, count)
    # From the cache on disk, or what a process failed at: an error is raised here.
    compiled = [kernel.warmup(*given, grid=grid, **named) for kernel, grid, given, named in jobs]
    with ThreadPoolExecutor(count, initializer=_take_device(driver)) as pool:
        list(pool.map(lambda one: one.run, compiled))  # loads it; Triton 3.6 compiles C for it


def zero_if_noted(op: Callable[P, Out]) -> Callable[P, Out]:
    """The op; inside `compiling_ahead` its results, tensors of its own, are 0 and no garbage."""

    @wraps(op)
    def safe(*given: P.args, **named: P.kwargs) -> Out:
        result = op(*given, **named)
        if _noted is not None:
            _zero(result)
        return result

    return safe


def _zero(result: Any) -> None:
    if isinstance(result, Tensor):
        result.zero_()
    elif isinstance(result, tuple):
        for one in result:
            _zero(one)
    elif isinstance(result, AttentionBatch):
        _zero((result.query_start_B1, result.length_B, result.block_BL))


def _take_device(driver: Any) -> Callable[[], None]:
    device = driver.active.get_current_device()
    return lambda: torch.cuda.set_device(device)


def _compile_in_processes(jobs: list[_Launch], count: int) -> None:
    """Fill Triton's cache on disk."""
    target, device = driver.active.get_current_target(), driver.active.get_current_device()
    stub = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
    )
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_compile, args=(jobs[i::count], stub), daemon=True)
        for i in range(count)
    ]
    with warnings.catch_warnings():
        # Threads of this process may hold locks; those are none that a compiler takes.
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        for worker in workers:
            worker.start()
    for worker in workers:
        worker.join(_DEADLINE)
        if worker.is_alive():
            worker.kill()
            worker.join()


def _compile(jobs: list[_Launch], stub: Any) -> None:
    driver.set_active(stub)  # CUDA cannot be used in a forked process
    for kernel, grid, given, named in jobs:
        try:
            kernel.warmup(*given, grid=grid, **named)
        except Exception:  # raised again where the parent compiles it
            continue
