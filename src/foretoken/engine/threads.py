"""How many threads compute, PyTorch's and the kernels'.

On a machine of 2 cores that others use too, two OpenMP threads took a decode step from 7 to 77 ms,
since a team waits for its slowest member at every loop. The native pool does not (its threads take
small pieces), and where it runs the target OpenMP gets one thread: idle ones would spin on the
cores that the pool needs. Only the steps themselves show whether others use the machine: so one
thread and all of them are timed on real steps.
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

_OPENMP_THREADS = torch.get_num_threads()  # before we set it
_STEPS = 3  # their median stands for a count
_PAUSE, _LONGEST_PAUSE = 64, 4096  # steps between trials of the slower count
_CLEARLY = 0.95  # of the other's time: enough to change
_HOPELESS = 2.0  # times the other's: a trial ends at the first such step
_PER_TRIAL = 20  # steps at least, in the time that one step of the slower count takes


def usable_cores(
    cpus: Path = Path("/sys/devices/system/cpu"),
    quota: Path = Path("/sys/fs/cgroup/cpu.max"),
    system: Any = os,
) -> int:
    """Physical cores that this process may use: hyper-threads once, within a container's quota.

    Args:
        system: has `sched_getaffinity` or `cpu_count`, as the module `os`.
    """
    if hasattr(system, "sched_getaffinity"):
        usable: Iterable[int] = system.sched_getaffinity(0)
    else:
        usable = range(system.cpu_count() or 1)
    count = len({_siblings(cpus / f"cpu{cpu}") or str(cpu) for cpu in usable})
    with suppress(OSError, ValueError):
        time_used, period = quota.read_text(encoding="ascii").split()
        count = min(count, int(int(time_used) / int(period)))  # `max` is no number: no quota
    return max(count, 1)


class StepThreads:
    """Sets the process's threads for every step of one engine: as asked, or as is faster now.

    Args:
        asked: None takes one thread, or all usable cores but no more than OpenMP had when this
            module was imported (`openmp_threads`), by steps of the same size; what is set by
            others, by `torch.set_num_threads` for example, does not count and is overwritten.
        backend: the threads of its kernels are set, too.
        native_target: the target runs in the native decoder: PyTorch gets one thread. A draft model
            next to it that does not is small: one thread is as fast there.
        clock: seconds.
        openmp_threads: `OMP_NUM_THREADS`, if that is set.
        cores: usable cores; None: `usable_cores()`.
    """

    def __init__(
        self,
        asked: int | None,
        backend: Backend,
        native_target: bool,
        clock: Callable[[], float] = time.perf_counter,
        openmp_threads: int = _OPENMP_THREADS,
        cores: int | None = None,
    ) -> None:
        self.most = min(cores or usable_cores(), openmp_threads) if asked is None else asked
        self.chooses = asked is None and self.most > 1
        self._backend = backend
        self._native_target = native_target
        self._clock = clock
        self._choices: dict[int, _Choice] = {}
        self._prompts: _Choice | None = None  # while decode steps collapse with all threads
        self._use(self.most)

    @contextmanager
    def during(self, shares: Sequence[Share]) -> Iterator[None]:
        """Compute a step of these shares, inside, with the threads for its size.

        Steps that compute prompts take all threads, since no two are alike. Only while decode steps
        collapse with them is there a choice for prompts, too, by the time per token: one thread,
        and all of them tried again.
        """
        choice, tokens, decodes = None, 0, False
        if self.chooses and shares:
            tokens = sum(share.num_tokens + share.max_drafts for share in shares)
            decodes, choice = all(share.num_tokens == 1 for share in shares), self._prompts
            if decodes:
                counts = (1, self.most) if self._prompts else (self.most, 1)
                size = _rounded(tokens)
                choice = self._choices.get(size) or self._choices.setdefault(size, _Choice(*counts))
        if choice is None:
            self._use(self.most)
            yield
            return
        count = choice.next()
        self._use(count)
        start = self._clock()
        yield
        choice.observe(count, (self._clock() - start) / tokens)
        if decodes and not choice.crowded:
            self._prompts = None
        elif self._prompts is None:
            self._prompts = _Choice(1, self.most, collapsed=True)

    def _use(self, count: int) -> None:
        self._backend.set_num_threads(count)
        openmp = 1 if self._native_target else count
        if torch.get_num_threads() != openmp:  # it is of this thread, not of the process
            torch.set_num_threads(openmp)


class _Choice:
    """Which of two counts is faster for steps of one kind, by the latest times per token.

    Both are tried in turns at first. The slower one is tried again after 64 steps, and after twice
    as many each time that it stays the slower, or later if a step with it takes very long. A count
    is left at once when its steps have become slower than the other's last ones.

    Attributes:
        crowded: one thread is taken because steps with all took many times as long.
    """

    def __init__(self, first: int, second: int, collapsed: bool = False) -> None:
        self._taken, self._other = first, second
        self._seconds: dict[int, deque[float]] = {n: deque(maxlen=_STEPS) for n in (first, second)}
        if collapsed:  # steps with `second` do: as if that had been tried
            self._seconds[second].extend([math.inf] * _STEPS)
        self._wait = self._pause = _PAUSE
        self.crowded = first == 1

    def next(self) -> int:
        """The count for the coming step."""
        if len(self._seconds[self._other]) < min(_STEPS, len(self._seconds[self._taken])):
            return self._other
        return self._taken

    def observe(self, count: int, seconds: float) -> None:
        """Learn from a step, by its seconds per token; settle once there are enough of both."""
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
    """`tokens` to two binary digits: steps of that size take about the same time."""
    shift = max(tokens.bit_length() - 2, 0)
    return tokens >> shift << shift


def _siblings(cpu: Path) -> str:
    """What names the core of a logical processor; "" if nothing does."""
    try:
        return (cpu / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return ""
