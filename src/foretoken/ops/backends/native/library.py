"""The compiled kernels as Python functions: choosing and loading a library, the C signatures.

Pointers are addresses of contiguous arrays that the caller keeps alive during the call. Calls
release the GIL, and raise an error if they fail. Functions of `steps`, shorter than a wait for the
GIL, keep the GIL and return a status, which the caller passes to `check`.
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
"""Environment variable: the only variant to load, for equal bits on different processors."""


class NotFiniteError(ValueError):
    """A scale of the weights is NaN or infinite."""


_REMEDY = "run `python -m foretoken.ops.backends.native.build` (needs g++)"
_V3 = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}
_V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
NEEDS = {
    "x86-64-v4-vnni": _V4 | {"avx512_vnni"},
    "x86-64-v4": _V4,
    "x86-64-v3-vnni": _V3 | {"avx_vnni"},
    "x86-64-v3": _V3,
}
"""The features that an x86 processor needs for each variant; `aarch64` needs none."""


class Machine(NamedTuple):
    """A machine and its folder of libraries.

    architecture: as `platform.machine()` names it
    features:     of the processor, as the Linux kernel names them; empty on other systems
    """

    architecture: str
    features: frozenset[str]
    libraries: Path = build.LIBRARIES

    def path(self, variant: str) -> Path:
        """Where a variant's library is, if it is built."""
        return self.libraries / build.library_path(variant).name


@cache
def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(platform.machine(), cpu_features())


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The processor's features, as the Linux kernel names them; none on other systems."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


@cache
def choose_variant(machine: Machine) -> tuple[str | None, str]:
    """The most capable variant that was built and runs on this processor, and ""; or None and the
    reason. `ConfigError` if the environment names a variant that this processor cannot run.
    """
    variants = build.VARIANTS.get(machine.architecture)
    if variants is None:
        return None, f"they do not exist for `{machine.architecture}`"
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
    """Why a machine, by default this one, has no native kernels; None if it has them."""
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
    """The library of a machine, by default this one; `OSError` if `missing` gives a reason."""
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
    for name, arguments in _SIGNATURES_WITH_GIL.items():
        function = getattr(keeps_gil, f"foretoken_{name}")
        function.argtypes, function.restype = arguments, c_int
        setattr(library, f"foretoken_{name}", function)
    library.foretoken_misfit.restype = c_char_p
    return library


_ADDRESS = [c_void_p]
_SIGNATURES: dict[str, list[Any]] = {
    "set_num_threads": [c_int64],
    "stack_new": [*_ADDRESS * 3, c_float, c_float, c_float, c_void_p],
    "stack_set_fetches": [c_void_p, c_int64, c_int64],
    "stack_logits": [c_void_p, c_void_p, c_int64, c_void_p],
    "logprobs": [*_ADDRESS * 6, c_int64],
    "suffix_append": [c_void_p, c_int64],
    "suffix_propose": [*_ADDRESS * 3, c_int64, c_double, c_double],
    # Only addresses.
    "stack_free": _ADDRESS, "process": _ADDRESS * 2, "sample": _ADDRESS * 3, "draft": _ADDRESS * 4,
    "stack_measure_fetches": _ADDRESS * 4, "verify": _ADDRESS * 4, "stack_draft": _ADDRESS * 5,
    "stack_observe": _ADDRESS * 6, "stack_run": _ADDRESS * 8,
}  # fmt: skip
_SIGNATURES_WITH_GIL: dict[str, list[Any]] = {
    **{f"steps_{name}": _ADDRESS for name in ("count", "write", "pack", "advance", "begin_round")},
    "steps_look_up": [c_void_p, c_int64, c_int64],
}


def check(status: int, function: Any, arguments: Any = None) -> None:
    """Raise the error, if any, that a `Status` (`csrc/call.h`) names; `ctypes` calls this."""
    if status == 1:
        raise NotImplementedError(f"native kernels: {function.__name__} met an unknown rule")
    if status == 2:
        raise MemoryError(f"native kernels: {function.__name__} could not allocate memory")
    if status == 3:
        raise RuntimeError(f"native kernels: {function.__name__} failed")
    if status == 4:
        raise IntegrityError(load().foretoken_misfit().decode())
    if status == 5:
        raise NotFiniteError


def set_num_threads(count: int) -> None:
    """Share the work of each call among `count` threads, including the caller's; process-wide."""
    load().foretoken_set_num_threads(count)
