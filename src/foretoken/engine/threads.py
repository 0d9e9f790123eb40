"""The number of computing threads, PyTorch's and the kernels'.

On 2 cores that other processes also used, two OpenMP threads took a decode step from 7 to 77 ms,
because a team waits for its slowest member at every loop. The native pool does not wait (its
threads take small pieces). If it runs the target, OpenMP gets one thread: idle ones would spin on
the cores that the pool needs. Only real steps show whether other processes use the machine: so
steps with one thread and with all threads are timed.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import torch

from foretoken.engine.request import Share
from foretoken.ops import Backend

_OPENMP_THREADS = torch.get_num_threads()  # before we set it
_STEPS = 3  # counts are compared by the median of so many steps
_PAUSE, _LONGEST_PAUSE = 64, 4096  # steps between trials of the slower count
_CLEARLY = 0.95  # change at this share of the other count's time
_HOPELESS = 2.0  # times the other count's time: a trial ends at the first such step
_PER_TRIAL = 20  # least steps between trials: times the ratio of the slower to the faster time


def usable_cores(
    cpus: Path = Path("/sys/devices/system/cpu"), quota: Path = Path("/sys/fs/cgroup/cpu.max")
) -> int:
    """Physical cores that this process may use, within a container's quota."""
    usable = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    count = len({_siblings(cpus / f"cpu{cpu}") or str(cpu) for cpu in usable})
    with suppress(OSError, ValueError):
        time_used, period = quota.read_text(encoding="ascii").split()
        count = min(count, int(int(time_used) / int(period)))  # `max` raises: no quota
    return max(count, 1)


class StepThreads:
    """Sets the process's threads for every step of one engine: a given number, or the faster one.

    Args:
        asked: None chooses between one thread and all usable cores (at most `openmp_threads`), by
            timing steps of the same size. It overwrites numbers that others set, for example by
            `torch.set_num_threads`.
        backend: the threads of its kernels are set, too.
        native_target: the native decoder runs the target: PyTorch gets one thread. A draft model in
            PyTorch's operators is small: one thread is as fast there.
        clock: seconds.
        openmp_threads: OpenMP's threads when this module was imported: `OMP_NUM_THREADS`, if set.
    """

    def __init__(
        self,
        asked: int | None,
        backend: Backend,
        native_target: bool,
        clock: Callable[[], float] = time.perf_counter,
        openmp_threads: int = _OPENMP_THREADS,
    ) -> None:
        self.most = min(usable_cores(), openmp_threads) if asked is None else asked
        self.chooses = asked is None and self.most > 1
        self._backend = backend
        self._native_target = native_target
        self._clock = clock
        self._for_size: dict[int, _FasterCount] = {}
        # Set while decode steps take many times as long with all threads.
        self._for_prompts: _FasterCount | None = None
        self._use(self.most)

    @contextmanager
    def during(self, shares: Sequence[Share]) -> Iterator[None]:
        """Inside, a step of these shares computes with the threads for its size.

        Steps with prompts take all threads, because no two of them are alike. Only while decode
        steps are many times slower with all threads, prompts take one thread, and all are tried
        again, by the time per token.
        """
        faster, tokens, decodes = None, 0, False
        if self.chooses and shares:
            tokens = sum(share.num_tokens + share.max_drafts for share in shares)
            decodes, faster = all(share.num_tokens == 1 for share in shares), self._for_prompts
            if decodes:
                size = _rounded(tokens)
                if size not in self._for_size:
                    counts = (1, self.most) if self._for_prompts else (self.most, 1)
                    self._for_size[size] = _FasterCount(*counts)
                faster = self._for_size[size]
        if faster is None:
            self._use(self.most)
            yield
            return
        count = faster.next()
        self._use(count)
        start = self._clock()
        yield
        faster.observe(count, (self._clock() - start) / tokens)
        if decodes and not faster.crowded:
            self._for_prompts = None
        elif self._for_prompts is None:
            self._for_prompts = _FasterCount(1, self.most, collapsed=True)

    def _use(self, count: int) -> None:
        self._backend.set_num_threads(count)
        openmp = 1 if self._native_target else count
        if torch.get_num_threads() != openmp:  # each thread has a number of its own
            torch.set_num_threads(openmp)


class _FasterCount:
    """The faster of two thread counts for steps of one kind, by the latest times per token.

    At first both are tried in turns. The slower one is tried again after 64 steps, then after twice
    as many each time that it stays slower, or later if a step with it takes very long. If the steps
    of the present count become slower than the other's last ones, the other is taken at once.

    Attributes:
        crowded: one thread is used because steps with all threads took many times as long.
    """

    def __init__(self, first: int, second: int, collapsed: bool = False) -> None:
        self._taken, self._other = first, second
        self._seconds: dict[int, deque[float]] = {n: deque(maxlen=_STEPS) for n in (first, second)}
        if collapsed:  # as if `second` had been tried and took for ever
            self._seconds[second].extend([math.inf] * _STEPS)
        self._wait = self._pause = _PAUSE
        self.crowded = first == 1

    def next(self) -> int:
        """The count for the coming step."""
        if len(self._seconds[self._other]) < min(_STEPS, len(self._seconds[self._taken])):
            return self._other
        return self._taken

    def observe(self, count: int, seconds: float) -> None:
        """Learn a step's seconds per token; choose again once both counts have enough steps."""
        taken, other = self._seconds[self._taken], self._seconds[self._other]
        tried = count == self._other
        own, rival = (other, taken) if tried else (taken, other)
        if len(own) < _STEPS and rival and seconds > _HOPELESS * median(rival):
            own.extend([seconds] * _STEPS)  # one such step is enough
        own.append(seconds)
        if min(len(taken), len(other)) < _STEPS:
            return
        self._wait -= 1
        ratio = median(other) / median(taken)
        if ratio < _CLEARLY:
            self._taken, self._other, ratio = self._other, self._taken, 1 / ratio
            self._pause = _PAUSE
        elif tried:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            if self._wait <= 0:
                other.clear()
            return
        self._wait = max(self._pause, int(_PER_TRIAL * ratio))
        self.crowded = self._taken == 1 and ratio > _HOPELESS


def _rounded(tokens: int) -> int:
    """`tokens` to two binary digits: steps of one rounded size take about the same time."""
    shift = max(tokens.bit_length() - 2, 0)
    return tokens >> shift << shift


def _siblings(cpu: Path) -> str:
    """The name of a logical processor's core; "" if unknown."""
    try:
        return (cpu / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return ""
