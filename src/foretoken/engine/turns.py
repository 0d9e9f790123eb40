"""Who may touch an engine: its own process, one thread at a time. No torch.

Charter: an engine is not safe for two threads, and its native decoder keeps scratch memory between
calls. Threads that share one take turns of a step each, first come, first served, so that every
step serves the requests of all of them. A plain lock goes to whoever asks while it is free, which
is the thread that just let go of it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from foretoken.errors import UsageError


class HomeProcess:
    """The process that made an engine. A fork of it has the engine's memory but not its threads."""

    def __init__(self, owner: str) -> None:
        self._owner, self._pid = owner, os.getpid()

    @property
    def is_left(self) -> bool:
        """Whether this is another process: a forked child."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise `UsageError` in a forked child, where computing would wait for ever."""
        if self.is_left:
            raise UsageError(
                f"this {self._owner} belongs to process {self._pid}, and this is a fork of it "
                f"(process {os.getpid()}): make the {self._owner} after the fork, or start "
                "processes by `spawn`"
            )


class Turns:
    """A lock that threads get in the order in which they ask: `with turns:`.

    What raises while a thread waits (Ctrl-C) costs it its place in the line and nothing else.

    Raises, on entering:
        UsageError: in a forked child, or in a thread that has or awaits its turn: a signal handler
            or a finalizer that runs in the midst of a call.
    """

    def __init__(self, owner: str) -> None:
        self.home = HomeProcess(owner)
        # One locked lock per thread; the first thread has the turn, the others wait for theirs.
        self._line: deque[threading.Lock] = deque()
        self._threads: set[int] = set()
        self._work: deque[Callable[[], None]] = deque()

    @property
    def inside(self) -> bool:
        """Whether this thread has or awaits its turn."""
        return threading.get_ident() in self._threads

    def __enter__(self) -> None:
        self.home.check()
        if self.inside:
            raise UsageError(
                "this call came from within another one of the same thread, from a signal handler "
                "or a finalizer: let the handler set a flag and make the call when the other ended"
            )
        place = threading.Lock()
        place.acquire()
        try:
            self._threads.add(threading.get_ident())
            self._line.append(place)
            if self._line[0] is not place:
                place.acquire()
        except BaseException:
            self._leave(place)
            raise

    def __exit__(self, *raised: object) -> None:
        try:
            while self._work:
                self._work.popleft()()
        finally:
            self._leave(self._line[0])

    def later(self, work: Callable[[], None]) -> None:
        """Have `work` done at the end of a turn: this thread's present one, or one taken for it.

        It is for whatever may run in the midst of a call, like finalizers, and for what must not be
        lost if waiting is interrupted: the next turn of any thread does it then. Does nothing in a
        forked child.
        """
        if self.home.is_left:
            return
        self._work.append(work)
        if not self.inside:
            with self:
                pass

    def _leave(self, place: threading.Lock) -> None:
        """Give up a place in the line and wake whoever is first, also when Ctrl-C comes between."""
        try:
            self._give_up(place)
        except BaseException:
            self._give_up(place)
            raise

    def _give_up(self, place: threading.Lock) -> None:
        """`_leave`, in steps that may be done twice.

        To wake a thread that is awake does no harm, so that no step here needs a lock. The thread
        counts as inside to the last: a finalizer that ran before would queue behind itself.
        """
        with suppress(ValueError):  # interrupted before it stood in the line
            self._line.remove(place)
        with suppress(IndexError, RuntimeError):  # nobody waits; awake already
            self._line[0].release()
        self._threads.discard(threading.get_ident())
