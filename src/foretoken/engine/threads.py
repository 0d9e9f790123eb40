"""How many threads to compute with, and telling everyone who computes.

On a machine of 2 cores that others use too, two OpenMP threads took a decode step from 7 to 77 ms,
since a team waits for its slowest member at every loop. The native pool does not (its threads take
small pieces), and where it runs the target OpenMP gets one thread: idle ones would spin on the
cores that the pool needs.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from foretoken.native import library

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Physical cores that this process may use: hyper-threads once, within a container's quota."""
    cpus = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = {_siblings(cpu) for cpu in cpus}
    count = len(cores)
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        count = min(count, int(int(quota) / int(period)))  # `max` is no number: no quota
    return max(count, 1)


def set_threads(asked: int | None, native_target: bool) -> int:
    """Set the process's threads; returns how many.

    Args:
        asked: None takes all usable cores, but no more than OpenMP had when this module was
            imported (`OMP_NUM_THREADS`); what is set later, by `torch.set_num_threads` for
            example, does not count and is overwritten.
        native_target: the target runs in the native decoder. A draft model beside it that does
            not is small: one thread is as fast there.
    """
    count = min(usable_cores(), _OPENMP_THREADS) if asked is None else asked
    if library.missing() is None:
        library.set_num_threads(count)
    torch.set_num_threads(1 if native_target else count)
    return count


def _siblings(cpu: int) -> str:
    """What names the core of a logical processor."""
    try:
        path = _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


_OPENMP_THREADS = torch.get_num_threads()  # before we set it
