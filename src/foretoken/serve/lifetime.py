"""How long requests and the server live: deadlines, what is under way, and the way out.

Charter: who ends a request that neither its client nor the model ends. A `Flight` is one request
over HTTP while the engine works for it; `Lifetime` knows all of them. Routes ask it, signals tell
it; how a process notices is `server.py`'s.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any, Self

from foretoken.async_engine import AsyncEngine
from foretoken.outputs import RequestDelta
from foretoken.serve.errors import UnavailableError
from foretoken.serve.options import ServeOptions

_GRACE = 5.0
"""Seconds that a client has to receive and read an answer that was cut off."""
_TOLD = {
    "queue": "No token was made within `queue_timeout`: the server is too busy.",
    "timeout": "No token was made within `request_timeout`: the server is too busy.",
    "shutdown": "The server ends, and its engine did not let go of this request.",
}


class Lifetime:
    """What is under way, and whether more is taken.

    Attributes:
        num_cut: requests that the end came before.
    """

    def __init__(self, engine: AsyncEngine, options: ServeOptions) -> None:
        self.engine, self.options = engine, options
        self.flights: set[Flight] = set()
        self._end: float | None = None
        self.num_cut = 0

    @property
    def is_draining(self) -> bool:
        """Whether only what has begun is still answered."""
        return self._end is not None

    def drain(self) -> None:
        """Take no more, and let what is under way end in time. Safe in a signal handler."""
        self._end = self._end or time.monotonic() + self.options.drain_timeout

    def seconds_left(self) -> float:
        """How long a client may still take to read the end of its answer."""
        left = _GRACE if self._end is None else self._end + _GRACE - time.monotonic()
        return min(max(left, 1.0), _GRACE)

    def is_over(self) -> bool:
        """Whether all has been answered, or has had its time; to be asked again and again."""
        if self._end is None:
            return False
        late = time.monotonic() - self._end
        if late >= 0:
            self.num_cut = max(self.num_cut, len(self.flights))
            for flight in [*self.flights]:
                flight.cut("shutdown", refuses=late >= _GRACE)
        return not self.flights or late >= _GRACE


class Flight:
    """One request over HTTP, from the engine's queue to its last delta; a context.

    What is cut off is aborted, and its last delta brings what there is. Before its first token it
    is refused, whatever the engine is doing: the task that entered is cancelled, and learns of it
    as `UnavailableError`. The end of the server refuses nothing that it has accepted: if the engine
    had not begun with it, its answer is empty, and says why.

    Args:
        name: of its requests to the engine, a number added.

    Raises, when it is entered:
        UnavailableError: the server takes no more.
    """

    def __init__(self, lifetime: Lifetime, name: str) -> None:
        self._lifetime, self._name = lifetime, name
        self._why, self._has_begun, self._is_refused, self._num_names = "", False, False, 0
        self._task: asyncio.Task[Any] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._aborts: set[asyncio.Task[bool]] = set()

    def __enter__(self) -> Self:
        if self._lifetime.is_draining:
            raise UnavailableError("The server ends and takes no more requests.")
        self._task = asyncio.current_task()
        options, loop = self._lifetime.options, asyncio.get_running_loop()
        self._timers = [
            loop.call_later(options.queue_timeout, self.cut, "queue"),
            loop.call_later(options.request_timeout, self.cut, "timeout"),
        ]
        self._lifetime.flights.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        for timer in self._timers:
            timer.cancel()
        self._lifetime.flights.discard(self)
        if self._is_refused and self._task and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise UnavailableError(_TOLD[self._why])

    def new_name(self) -> str:
        """The name of a further request to the engine."""
        self._num_names += 1
        return f"{self._name}-{self._num_names}"

    def cut(self, why: str, *, refuses: bool = True) -> None:
        """End it where it is: `queue`, `timeout` or `shutdown`; if that `refuses`, at once."""
        if refuses and not (self._has_begun or self._is_refused) and self._task:
            self._is_refused = self._task.cancel()
        self._why = self._why or why
        for number in range(self._num_names):
            task = asyncio.ensure_future(self._lifetime.engine.abort(f"{self._name}-{number + 1}"))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def read(self, delta: RequestDelta) -> RequestDelta:
        """A delta as clients understand it: one that was cut off ends by `length`."""
        if not self._has_begun and any(sample.token_ids for sample in delta.outputs):
            self._has_begun = True
            self._timers[0].cancel()
        if not self._why:
            return delta
        if not delta.finished:
            self.cut(self._why, refuses=False)  # it was not queued yet when its time was up
        outputs = [
            replace(sample, finish_reason="length", stop_reason=self._why)
            if sample.finish_reason == "abort"
            else sample
            for sample in delta.outputs
        ]
        return replace(delta, outputs=outputs)
