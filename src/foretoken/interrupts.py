"""Ctrl-C and SIGTERM while requests run: noticed between steps instead of anywhere. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Interrupt:
    """Whether a signal came, and which: `name` is SIGINT, SIGTERM or None."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take over the signals that have their default handler; those of a program stay its own.

        Does nothing outside the main thread, where Python lets nobody handle signals.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if signal.getsignal(number) in _DEFAULTS:
                self._before[number] = signal.signal(number, self._notice)

    def restore(self) -> None:
        """Put the handlers back that `install` replaced."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self.restore()  # a second signal does what it always does


@contextmanager
def noticed() -> Iterator[Interrupt]:
    """Signals that come inside are told by the `Interrupt` it yields, and stop nothing."""
    interrupt = Interrupt()
    interrupt.install()
    try:
        yield interrupt
    finally:
        interrupt.restore()
