"""The compiled kernels as Python functions.

Belongs here: choosing and loading a library, the C signatures. Does not: the structs that kernels
read (`arguments.py`).

Pointers are addresses of contiguous arrays that the caller keeps alive during the call; nothing is
checked on the C side. Calls release the GIL and raise an error if they fail. The exception are the
calls of a step's bookkeeping, which are very short: another thread would keep the GIL for longer
than the call takes. They do not release it, and return a status; if the status is not 0, pass it to
`check`.
"""

from __future__ import annotations

import ctypes
import platform
from ctypes import c_char_p, c_double, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.config import check_choice, from_environment
from foretoken.errors import IntegrityError
from foretoken.ops.backends.native import build

VARIANT = "FORETOKEN_NATIVE_VARIANT"
"""Environment variable: the name of the only variant that may be loaded. Processors with the same
variant compute the same bits. Tests set it to run the AVX2 variant on machines with AVX-512."""


class NotFiniteError(ValueError):
    """A scale of the weights is NaN or infinite."""


_REMEDY = "run `python -m foretoken.ops.backends.native.build` (needs g++)"
_CPUINFO = Path("/proc/cpuinfo")
_V3 = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}
_V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
NEEDS = {
    "x86-64-v4-vnni": _V4 | {"avx512_vnni"},
    "x86-64-v4": _V4,
    "x86-64-v3-vnni": _V3 | {"avx_vnni"},
    "x86-64-v3": _V3,
}
"""The features that a processor needs for each variant; none are listed for other architectures."""


class Machine(NamedTuple):
    """What decides which library is loaded.

    architecture: as `platform.machine()` names it
    features:     of the processor, as the Linux kernel names them; empty on other systems
    libraries:    the folder of the libraries
    """

    architecture: str
    features: frozenset[str]
    libraries: Path = build.LIBRARIES

    def path(self, variant: str) -> Path:
        """The path of a variant's library, whether it is built or not."""
        return self.libraries / build.library_path(variant).name


@cache
def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(platform.machine(), cpu_features())


def cpu_features(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """The processor's features, as the Linux kernel names them; none on other systems."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


@cache
def choose_variant(machine: Machine) -> tuple[str | None, str]:
    """The most capable variant that was built and runs on this processor, and "".

    If there is none: None, and the reason.

    Raises:
        ConfigError: the environment names a variant that this processor cannot run.
    """
    variants = build.VARIANTS.get(machine.architecture)
    if variants is None:
        return None, f"there are none for `{machine.architecture}`"
    fitting = [v for v in variants if NEEDS.get(v, set()) <= machine.features]
    if not fitting:
        return None, "this processor is older than x86-64-v3 (AVX2)"
    chosen = from_environment(VARIANT)
    if chosen is not None:
        check_choice(VARIANT, chosen, tuple(fitting), "Unset it to use the most capable one.")
        fitting = [chosen]
    built = [v for v in fitting if machine.path(v).exists()]
    if not built:
        return None, f"they were not built: {_REMEDY}"
    return built[0], ""


def missing(machine: Machine | None = None) -> str | None:
    """The reason why there are no native kernels on a machine, by default this one; None if there
    are."""
    variant, reason = choose_variant(machine or this_machine())
    if variant is None:
        return reason
    try:
        if machine is None:
            load()
        else:
            load(machine)
    except OSError as error:  # damaged, or built on a machine with newer system libraries
        return f"they cannot be loaded ({error}): {_REMEDY}"
    return None


@cache
def load(machine: Machine | None = None) -> ctypes.CDLL:
    """Load the library of a machine, by default this one; declare its functions' signatures.

    Raises:
        OSError: the library is missing (`missing()` returns the reason), or cannot be loaded.
    """
    machine = machine or this_machine()
    variant, reason = choose_variant(machine)
    if variant is None:
        raise OSError(f"there are no native kernels: {reason}")
    path = machine.path(variant)
    if not build.is_whole(path):
        raise OSError(f"{path} is damaged: its digest is not that of its contents")
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, f"foretoken_{name}")
        function.argtypes, function.restype, function.errcheck = arguments, c_int, check
    keeps_gil = ctypes.PyDLL(str(path), handle=library._handle)
    for name, arguments in _SHORT_SIGNATURES.items():
        function = getattr(keeps_gil, f"foretoken_{name}")
        function.argtypes, function.restype = arguments, c_int
        setattr(library, f"foretoken_{name}", function)
    library.foretoken_misfit.restype = c_char_p
    return library


_ADDRESS = [c_void_p]
_SIGNATURES: dict[str, list[Any]] = {
    "set_num_threads": [c_int64],
    "stack_new": [*_ADDRESS * 3, c_float, c_float, c_float, c_void_p],
    "stack_free": _ADDRESS,
    "stack_measure_fetches": _ADDRESS * 4,
    "stack_set_fetches": [c_void_p, c_int64, c_int64],
    "stack_run": _ADDRESS * 8,
    "stack_draft": _ADDRESS * 5,
    "stack_observe": _ADDRESS * 6,
    "stack_logits": [c_void_p, c_void_p, c_int64, c_void_p],
    "process": _ADDRESS * 2,
    "sample": _ADDRESS * 3,
    "draft": _ADDRESS * 4,
    "logprobs": [*_ADDRESS * 6, c_int64],
    "verify": _ADDRESS * 4,
    "suffix_append": [c_void_p, c_int64],
    "suffix_propose": [*_ADDRESS * 3, c_int64, c_double, c_double],
}
_SHORT_SIGNATURES: dict[str, list[Any]] = {
    "steps_count": _ADDRESS,
    "steps_write": _ADDRESS,
    "steps_pack": _ADDRESS,
    "steps_advance": _ADDRESS,
    "steps_begin_round": _ADDRESS,
    "steps_look_up": [c_void_p, c_int64, c_int64],
}


def check(status: int, function: Any, arguments: Any = None) -> None:
    """Raise the error that a status stands for; 0 is success. `csrc/call.h` defines the numbers."""
    if status == 1:
        raise NotImplementedError(f"native kernels: {function.__name__} lacks a rule of the batch")
    if status == 2:
        raise MemoryError(f"native kernels: {function.__name__} could not allocate memory")
    if status == 3:
        raise RuntimeError(f"native kernels: {function.__name__} failed")
    if status == 4:
        raise IntegrityError(load().foretoken_misfit().decode())
    if status == 5:
        raise NotFiniteError


def set_num_threads(count: int) -> None:
    """Share the work of each call among `count` threads, including the caller; process-wide."""
    load().foretoken_set_num_threads(count)
