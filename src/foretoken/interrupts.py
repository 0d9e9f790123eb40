"""Ctrl-C and SIGTERM while requests run take effect between steps; no signal is lost. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

from foretoken.errors import RequestError
from foretoken.outputs import RequestOutput

OnInterrupt = Literal["raise", "return"]
# By `on_interrupt`: the signals to catch. A signal is caught only if its present handler is one of
# the default handlers listed here: a program's own handler stays.
_CAUGHT: dict[str, dict[signal.Signals, tuple[Any, ...]]] = {
    "raise": {signal.SIGINT: (signal.default_int_handler,)},
    "return": {
        signal.SIGINT: (signal.default_int_handler, signal.SIG_DFL),
        signal.SIGTERM: (signal.SIG_DFL,),
    },
}


class Interrupt:
    """Records whether a signal came during one call, and which.

    Args:
        on_interrupt: `raise` catches only Ctrl-C; SIGTERM then ends the process at once, since no
            caller would see the results. `return` catches both. Other values raise `RequestError`.

    Attributes:
        name: name of the signal that came, SIGINT or SIGTERM; None before.
    """

    def __init__(self, on_interrupt: str) -> None:
        if on_interrupt not in _CAUGHT:
            raise RequestError("on_interrupt", on_interrupt, "`raise` or `return`")
        self.name: str | None = None
        self._returns = on_interrupt == "return"
        self._default_handlers = _CAUGHT[on_interrupt]
        self._replaced: dict[signal.Signals, Any] = {}  # handlers to put back

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Inside, the first signal only sets `name`; a second signal takes effect at once."""
        # Python allows signal handlers only in the main thread.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            for number, handlers in self._default_handlers.items():
                if signal.getsignal(number) in handlers:
                    self._replaced[number] = signal.signal(number, self._catch)
            yield
        finally:
            self._restore()

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Raise a caught signal again, for its usual handler, unless the outputs report it.

        Raises:
            KeyboardInterrupt: Ctrl-C; the attribute `outputs` holds the outputs. (A subclass that
                is not caught would end the process with exit status 1, and a shell's loop over
                programs would continue.)
        """
        if self.name is None:
            return
        if self._returns and any(output.interrupted_by for output in outputs):
            return
        try:
            signal.raise_signal(signal.Signals[self.name])
        except KeyboardInterrupt as error:
            vars(error)["outputs"] = list(outputs)
            raise

    def _restore(self) -> None:
        while self._replaced:
            signal.signal(*self._replaced.popitem())

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore()
