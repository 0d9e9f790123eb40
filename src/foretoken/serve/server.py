"""The process: an engine, its application, and uvicorn in front of them.

Charter: a socket, signals, and how the process ends. The first SIGTERM or Ctrl-C lets what is under
way be answered, and ends with 0; the second ends at once. An engine that failed ends the process,
once everybody who waits has been told.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from foretoken.errors import ForetokenError
from foretoken.serve.connection import Connection
from foretoken.serve.context import Context
from foretoken.serve.options import ServeOptions

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_SECONDS = 5
"""For clients that do not read the end of their answer."""


def listen(options: ServeOptions) -> socket.socket:
    """A socket that listens where the options say; `OSError` if it cannot."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    return socket.create_server((options.host, options.port), family=family, backlog=2048)


def make_config(app: FastAPI) -> uvicorn.Config:
    """Uvicorn as it serves an application; it says nothing of what it serves."""
    context: Context = app.state.context
    return uvicorn.Config(
        app,
        http=partial(Connection, context.served.options),  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="on",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )


def make_server(app: FastAPI) -> uvicorn.Server:
    """A server of this application for a program that has other things to do."""
    return uvicorn.Server(make_config(app))


class Process(uvicorn.Server):
    """A server that is all that its process does: it ends by signals, and with its engine."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(make_config(app))
        self._context: Context = app.state.context
        self.failure: ForetokenError | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the next one finds no handler."""
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self._context.lifetime.drain()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is over."""
        self.failure = self._context.engine.status.failure
        is_over = self.failure is not None or self._context.lifetime.is_over()
        return await super().on_tick(counter) or is_over


def serve(app: FastAPI, options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve until a signal ends that.

    Raises:
        ForetokenError: the engine failed.
    """
    with listen(options) as bound:
        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        if options.is_exposed:
            say(f"WARNING: whoever reaches {shown} can use this server: there is no --api-key.")
        process = Process(app)
        say(f"Serving on http://{shown}:{port}")
        process.run(sockets=[bound])
    if process.failure is not None:
        raise process.failure
