"""The number of threads that compute, of PyTorch and of the kernels.

On 2 cores that other processes also used, two OpenMP threads slowed a decode step from 7 to 77 ms,
because all OpenMP threads wait for the slowest one at every loop. The threads of the native pool
take small pieces of work and do not wait for each other. If that pool runs the target, OpenMP gets
one thread: idle OpenMP threads would spin on the cores that the pool needs. Only real steps show
whether other processes use the machine, so steps with one thread and with all threads are timed.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

from foretoken.engine.request import Share
from foretoken.ops import Backend

_OPENMP_THREADS = torch.get_num_threads()  # before this module changes the number
_COMPARED_STEPS = 3  # thread counts are compared by the median of so many steps
_PAUSE, _LONGEST_PAUSE = 64, 4096  # steps between trials of the slower count
_CHANGE_RATIO = 0.95  # the other count is used below this part of the present count's time
_HOPELESS_RATIO = 2.0  # a trial ends at a step that takes this many times the present time
_PAUSE_PER_RATIO = 20  # a pause has at least so many steps times (slower time / faster time)


def usable_cores(
    cpus: Path = Path("/sys/devices/system/cpu"),
    quota: Path = Path("/sys/fs/cgroup/cpu.max"),
    system: Any = os,
) -> int:
    """Physical cores that this process may use, within a container's quota.

    Args:
        system: an object with `sched_getaffinity` or `cpu_count`, such as the module `os`.
    """
    if hasattr(system, "sched_getaffinity"):
        usable: Iterable[int] = system.sched_getaffinity(0)
    else:
        usable = range(system.cpu_count() or 1)
    count = len({_siblings(cpus / f"cpu{cpu}") or str(cpu) for cpu in usable})
    with suppress(OSError, ValueError):
        microseconds, period = quota.read_text(encoding="ascii").split()
        count = min(count, int(int(microseconds) / int(period)))  # `int("max")`, no quota, raises
    return max(count, 1)


class StepThreads:
    """Sets the process's number of threads for every step of one engine, overwriting a number that
    was set by `torch.set_num_threads`.

    Args:
        count: the number of threads. None chooses for steps of each size the faster of one thread
            and all usable cores (at most `openmp_threads`), by timing.
        backend: the threads of its kernels are set, too.
        native_target: the native decoder runs the target, so PyTorch gets one thread, which is also
            enough for a draft model in PyTorch's operators.
        clock: returns seconds.
        openmp_threads: threads of OpenMP by default: `OMP_NUM_THREADS`, if set.
        cores: the number of usable cores; None: `usable_cores()`.
    """

    def __init__(
        self, count: int | None, backend: Backend, native_target: bool,
        clock: Callable[[], float] = time.perf_counter, openmp_threads: int = _OPENMP_THREADS,
        cores: int | None = None,
    ) -> None:  # fmt: skip
        self.max_threads = min(cores or usable_cores(), openmp_threads) if count is None else count
        self.chooses = count is None and self.max_threads > 1
        self._backend, self._native_target, self._clock = backend, native_target, clock
        self._for_size: dict[int, _FasterCount] = {}  # for decode steps, by `_rounded` tokens
        # Exists only while decode steps take many times as long with all threads.
        self._for_prompts: _FasterCount | None = None
        self._use(self.max_threads)

    @contextmanager
    def during(self, shares: Sequence[Share]) -> Iterator[None]:
        """Inside, a step of these shares computes with the number of threads for its size.

        Steps with prompts use all threads, because their sizes differ too much for comparison. But
        while decode steps are many times slower with all threads, steps with prompts use one
        thread. Then single steps try all threads, and are compared by the time per token.
        """
        faster, tokens, all_decode = None, 0, False
        if self.chooses and shares:
            tokens = sum(share.num_tokens + share.max_drafts for share in shares)
            all_decode, faster = all(share.num_tokens == 1 for share in shares), self._for_prompts
            if all_decode:
                size, counts = _rounded(tokens), (self.max_threads, 1)
                if size not in self._for_size:
                    counts = counts[::-1] if self._for_prompts else counts
                    self._for_size[size] = _FasterCount(*counts)
                faster = self._for_size[size]
        if faster is None:
            self._use(self.max_threads)
            yield
            return
        count = faster.next()
        self._use(count)
        start = self._clock()
        yield
        faster.observe(count, (self._clock() - start) / tokens)
        if all_decode and not faster.crowded:
            self._for_prompts = None
        elif self._for_prompts is None:
            self._for_prompts = _FasterCount(1, self.max_threads, second_is_hopeless=True)

    def _use(self, count: int) -> None:
        self._backend.set_num_threads(count)
        openmp = 1 if self._native_target else count
        if torch.get_num_threads() != openmp:  # PyTorch keeps a number for each calling thread
            torch.set_num_threads(openmp)


class _FasterCount:
    """The faster of two thread counts for steps of one kind, by the latest times per token.

    At first both counts are tried in turns. The slower count is tried again after 64 steps, and
    each time that it stays slower the pause doubles; the pause is longer if steps of the
    slower count take very long. If steps of the present count become slower than the last steps of
    the other count, the other count is used from the next step on.

    Args:
        first, second: the two counts; `first` is used at the start.
        second_is_hopeless: `second` counts as tried, with infinitely long steps.

    Attributes:
        crowded: one thread is used because steps with all threads took many times as long.
    """

    def __init__(self, first: int, second: int, second_is_hopeless: bool = False) -> None:
        self._present, self._other = first, second
        self._seconds = {n: deque[float](maxlen=_COMPARED_STEPS) for n in (first, second)}
        if second_is_hopeless:
            self._seconds[second].extend([math.inf] * _COMPARED_STEPS)
        self._wait = self._pause = _PAUSE
        self.crowded = first == 1

    def next(self) -> int:
        num_present = len(self._seconds[self._present])
        needs_trial = len(self._seconds[self._other]) < min(_COMPARED_STEPS, num_present)
        return self._other if needs_trial else self._present

    def observe(self, count: int, seconds: float) -> None:
        """Learn the seconds per token of a step with `count` threads, and choose the faster count
        once there are `_COMPARED_STEPS` times of both."""
        present, other = self._seconds[self._present], self._seconds[self._other]
        is_trial = count == self._other
        own, rival = (other, present) if is_trial else (present, other)
        if len(own) < _COMPARED_STEPS and rival and seconds > _HOPELESS_RATIO * median(rival):
            own.extend([seconds] * _COMPARED_STEPS)  # one step that slow is enough
        own.append(seconds)
        if min(len(present), len(other)) < _COMPARED_STEPS:
            return
        self._wait -= 1
        ratio = median(other) / median(present)
        if ratio < _CHANGE_RATIO:
            self._present, self._other, ratio = self._other, self._present, 1 / ratio
            self._pause = _PAUSE
        elif is_trial:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            if self._wait <= 0:
                other.clear()  # begins the next trial
            return
        self._wait = max(self._pause, int(_PAUSE_PER_RATIO * ratio))
        self.crowded = self._present == 1 and ratio > _HOPELESS_RATIO


def _rounded(tokens: int) -> int:
    """`tokens` with only the two leading bits. Steps of one rounded size take similar times."""
    shift = max(tokens.bit_length() - 2, 0)
    return tokens >> shift << shift


def _siblings(cpu: Path) -> str:
    """The list of logical processors on the same core, as Linux writes it; "" if unknown."""
    try:
        return (cpu / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return ""
