"""Compiled kernels: called with little of the host's time, and compiled ahead in parallel.

Triton binds a kernel's arguments at each launch: 33 to 70 us of the host's time for records of
tensors. Here the compiled kernel is looked up by a signature of the arguments, and called as the
launcher of Triton 3.6 and 3.7 would call it, but without hooks.

Compiling takes 0.2 to 0.5 s of Python a kernel, most of it under the interpreter's lock: two
threads saved 8 %, so processes compile. They are forked, fill Triton's cache on disk and end; they
never touch the GPU. Kernels that the cache already holds need no process.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from types import NoneType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

from foretoken.ops.types import AttentionBatch

_log = logging.getLogger(__name__)

_DEADLINE = 120.0  # seconds for all processes together; this process then compiles the rest

P = ParamSpec("P")
Out = TypeVar("Out")

_Packer = Callable[[tuple[Any, ...]], tuple[tuple[Any, ...], tuple[Any, ...]]]
_Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]

# Packers by (kernel, device, keyword arguments), or () for `Shared`; one per nesting of arguments.
_packers: dict[tuple[Any, ...], list[_Packer]] = {}
# Compiled kernels, by a packer and the signature of the arguments that it returns.
_kernels: dict[tuple[_Packer, tuple[Any, ...]], tuple[Any, ...]] = {}
# One object for equal signatures of shared arguments, so that launches need not hash these.
_signatures: dict[tuple[_Packer, tuple[Any, ...]], object] = {}

_compiling = threading.Lock()  # Triton has one cache manager for all threads


class _Thread(threading.local):
    launches: dict[Any, _Launch] | None = None
    """In `record_launches`, one launch of each kernel that is not compiled yet; else None."""


_thread = _Thread()


class Shared:
    """A tuple that is an argument of several launches, packed once."""

    def __init__(self, value: tuple[Any, ...]) -> None:
        self.value = value
        pack, self.packed, signature = _pack(_packers.setdefault((), []), value, None)
        self.signature = _signatures.setdefault((pack, signature), object())


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Do what `kernel[grid](*args, **options)` does, faster from the second launch on.

    Args:
        args: runtime arguments, all by position: tensors, numbers, None, tensor maps, tuples of
            them; then any constants. No bools. An integer must be an integer in all launches.
        options: other constants, and options such as `num_warps`.
    """
    if not isinstance(kernel, JITFunction):  # interpreted
        if _thread.launches is None:
            kernel[grid](*_plain(args), **options)
        return
    device = driver.active.get_current_device()
    key = (id(kernel), device, *options.items())
    pack, packed, signature = _pack(_packers.setdefault(key, []), args, kernel)
    known, launches = _kernels.get((pack, signature)), _thread.launches
    if launches is not None:
        if known is None:
            launches[pack, signature] = kernel, grid, _plain(args), options
    elif known is not None:
        run, function, metadata, constants = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *packed, *constants)
    else:
        compiled = kernel[grid](*_plain(args), **options)
        # Not kept on AMD, where kernels also depend on the size of each tensor.
        if compiled is not None and not torch.version.hip:
            constants = [options.get(name) for name in kernel.arg_names[len(args) :]]
            known = compiled.run, compiled.function, compiled.packed_metadata, constants
            _kernels[pack, signature] = known


def _plain(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.value if isinstance(arg, Shared) else arg for arg in args)


def _pack(
    packers: list[_Packer], args: tuple[Any, ...], kernel: Any
) -> tuple[_Packer, tuple[Any, ...], tuple[Any, ...]]:
    """(the packer for arguments nested like these, packed arguments, their signature)."""
    for pack in packers:
        try:
            return pack, *pack(args)
        except (AttributeError, TypeError, ValueError):  # these arguments are nested differently
            continue
    pack = _packer(args, kernel)
    packers.append(pack)
    return pack, *pack(args)


def _packer(args: tuple[Any, ...], kernel: Any) -> _Packer:
    """A function that packs arguments nested like these, and raises an error for other nestings.

    It returns the arguments with tensors replaced by their addresses, and the signature that a
    kernel is compiled for: constants, dtypes, which integers are 1, multiples of 16 or too big for
    int32 (only the last with `do_not_specialize`), and which addresses are not multiples of 16, if
    any. The function is generated: a loop over 40 arguments takes 3 times as long.
    """
    params = [] if kernel is None else kernel.params
    num_runtime = next((p.num for p in params if p.is_constexpr), len(args))
    classes = Tensor, Shared, int, NoneType, object
    names: dict[type, list[str]] = {cls: [] for cls in classes}
    tensors, shared, integers, nones, objects = names.values()
    unspecialized = list[str]()  # integers under `do_not_specialize`

    def name_fields(value: Any) -> str:
        if isinstance(value, tuple):
            return f"({''.join(f'{name_fields(field)}, ' for field in value)})"
        cls = next(cls for cls in classes if isinstance(value, cls))
        names[cls].append(f"{cls.__name__}{len(names[cls])}")
        return names[cls][-1]

    constants = [f"constant{i}" for i in range(len(args) - num_runtime)]
    runtime = [*map(name_fields, args[:num_runtime])]
    for param, name in zip(params, runtime, strict=False):
        if param.do_not_specialize and name in integers:
            integers.remove(name)
            unspecialized.append(name)
    arguments = "".join(f"{name}, " for name in (*runtime, *constants))
    signature = constants + [f"{name}.signature" for name in shared]
    signature += [f"{name}.dtype" for name in tensors]
    signature += [f"{name} == 1, not {name} % 16, {name} >> 31" for name in integers]
    signature += [f"{name} >> 31" for name in unspecialized]
    signature += [f"{name}.__class__" for name in objects]
    lines = [f"({arguments}) = args", f"signature = ({''.join(f'{part}, ' for part in signature)})"]
    if nones:
        lines.append(f"if not ({' is '.join(nones)} is None): raise TypeError(args)")
    lines += [f"{name} = {name}.data_ptr()" for name in tensors]
    lines += [f"{name} = {name}.packed" for name in shared]
    if tensors:
        aligned = ", ".join(f"not {name} % 16" for name in tensors)
        lines.append(f"if ({' | '.join(tensors)}) % 16: signature += ({aligned},)")
    scope: dict[str, Any] = {}
    body = "\n    ".join([*lines, f"return ({arguments}), signature"])
    exec(f"def pack(args):\n    {body}", scope)
    pack: _Packer = scope["pack"]
    return pack


def compile_ahead(run: Callable[[], object], processes: int | None = None) -> None:
    """Call `run`, record its launches instead of making them, and compile their kernels.

    Only this thread's launches are affected. Results of kernels stay uninitialised, except that
    `zero_if_recording` sets those of an op to 0, so that `run` can continue. PyTorch's operators do
    run and can write anywhere in the K/V pools and slots: call this before serving. Under Triton's
    interpreter nothing is compiled.

    Args:
        processes: upper bound, at most 16. None: one per CPU that this process is allowed to use.
    """
    jobs = record_launches(run)
    if jobs:
        with _compiling:
            _compile_all(jobs, processes)


def record_launches(run: Callable[[], object]) -> list[_Launch]:
    """Call `run` without launching its kernels; return a launch of each that is not compiled."""
    _thread.launches = {}
    try:
        run()
        return list(_thread.launches.values())
    finally:
        _thread.launches = None


def _compile_all(jobs: list[_Launch], processes: int | None) -> None:
    missing = _not_on_disk(jobs)
    count = min(processes or len(os.sched_getaffinity(0)), 16, len(missing))
    if count > 1 and not multiprocessing.current_process().daemon:  # daemons cannot have children
        _compile_in_processes(missing, count)
    # Kernels that no process has compiled are compiled here, where their errors are raised.
    compiled = [_warm_up(job) for job in jobs]
    device = driver.active.get_current_device()
    with ThreadPoolExecutor(16, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        list(pool.map(lambda kernel: kernel.run, compiled))  # loads it (3.6 compiles C launchers)


def _warm_up(job: _Launch) -> Any:
    kernel, grid, args, options = job
    return kernel.warmup(*args, grid=grid, **options)


class _NotOnDisk(Exception):
    """Raised instead of compiling a kernel."""


def _not_on_disk(jobs: list[_Launch]) -> list[_Launch]:
    """The jobs that Triton's cache on disk lacks; loads the kernels of all other jobs."""
    thread, missing = threading.get_ident(), []

    class Cache(knobs.cache.manager_class or FileCacheManager):  # type: ignore[misc]
        def get_group(self, filename: str) -> Any:
            group = super().get_group(filename)
            if not group and threading.get_ident() == thread:
                raise _NotOnDisk
            return group

    with knobs.cache.scope():
        knobs.cache.manager_class = Cache
        for job in jobs:
            try:
                _warm_up(job)
            except _NotOnDisk:
                missing.append(job)
    return missing


def zero_if_recording(op: Callable[P, Out]) -> Callable[P, Out]:
    """The op, which under `record_launches` sets its results to 0. These must be new tensors."""

    @wraps(op)
    def zeroing_op(*args: P.args, **named: P.kwargs) -> Out:
        result = op(*args, **named)
        if _thread.launches is not None:
            _zero(result)
        return result

    return zeroing_op


def _zero(result: Any) -> None:
    if isinstance(result, Tensor):
        result.zero_()
    elif isinstance(result, tuple):
        for part in result:
            _zero(part)
    elif isinstance(result, AttentionBatch):
        _zero((result.query_start_B1, result.length_B, result.block_BL))


def _compile_in_processes(jobs: list[_Launch], count: int) -> None:
    target, device = driver.active.get_current_target(), driver.active.get_current_device()
    stub_driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
    )
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_compile, args=(jobs[i::count], stub_driver), daemon=True)
        for i in range(count)
    ]
    with warnings.catch_warnings():
        # Other threads of this process can hold locks, but none that a compiler takes.
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        try:
            for worker in workers:
                worker.start()
        except OSError as error:
            _log.warning("Kernels are compiled by fewer processes, slower: %s", error)
    end = time.monotonic() + _DEADLINE
    for worker in [worker for worker in workers if worker.pid is not None]:  # those started
        worker.join(max(end - time.monotonic(), 0))
        if worker.is_alive():
            worker.kill()
            worker.join()


def _compile(jobs: list[_Launch], stub_driver: Any) -> None:
    driver.set_active(stub_driver)  # CUDA cannot be used in a forked process,
    gc.disable()  # nor can objects that hold GPU memory be freed in it
    for job in jobs:
        with suppress(Exception):  # raised again when the parent compiles the kernel
            _warm_up(job)
