"""The process: an application, its lifetime, and uvicorn in front of them.

Charter: a socket, signals, and how the process ends. The first SIGTERM or Ctrl-C lets what is under
way be answered, and ends with 0; the second ends at once. An engine that failed ends the process,
once everybody who waits has been told. Nothing is taken down that ends with the process anyway.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Literal, NoReturn

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from foretoken.errors import ConfigError, ForetokenError
from foretoken.serve.connection import Connection
from foretoken.serve.options import ServeOptions
from foretoken.serve.running import Lifetime

Lifespan = Literal["on", "off"]
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 2048
_OLD = 10, 10_000
"""Collections of the second generation before one of the third: when idle, and at the latest."""


def bind(options: ServeOptions) -> socket.socket:
    """A socket at the address that the options say; nobody can connect before it listens.

    Raises:
        ConfigError: there is no such address here, or another program listens there.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((options.host, options.port))
    except (OSError, UnicodeError) as error:
        bound.close()
        raise _taken(options, error) from None
    return bound


def check_tls(options: ServeOptions) -> None:
    """Raise `ConfigError` where the files of TLS cannot be used, before a model is loaded."""
    if not options.has_tls:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    names, given = "ssl_certfile, ssl_keyfile", f"{options.ssl_certfile}, {options.ssl_keyfile}"
    try:
        context.load_cert_chain(str(options.ssl_certfile), options.ssl_keyfile, lambda: b"")
        if options.ssl_ca_certs is not None:
            names, given = "ssl_ca_certs", options.ssl_ca_certs
            context.load_verify_locations(given)
    except OSError as error:  # `ssl.SSLError` is one
        bound = f"files of PEM, the key without a password: {error.strerror or error}"
        raise ConfigError(names, given, bound) from None


def collect_when_idle() -> None:
    """Have the process look for garbage in old objects when it has nothing else to do.

    Nothing runs meanwhile, which was 0.2 s for what PyTorch and Transformers have loaded, and 0.3 s
    for the 300 000 objects of the longest answers. What is loaded now is left out from here on.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _OLD[1])


def make_config(app: ASGIApp, life: Lifetime, *, lifespan: Lifespan) -> uvicorn.Config:
    """Uvicorn as it serves an application; it says nothing of what it serves."""
    options = life.options
    return uvicorn.Config(
        app,
        http=partial(Connection, options),  # type: ignore[arg-type]
        log_level="warning",
        log_config=None,  # see `logs.py`
        access_log=False,
        ws="none",
        lifespan=lifespan,
        server_header=False,
        proxy_headers=False,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
        timeout_graceful_shutdown=math.ceil(life.seconds_left()),
    )


def make_server(app: FastAPI) -> uvicorn.Server:
    """A server of this application for a program that has other things to do."""
    return uvicorn.Server(make_config(app, app.state.context.lifetime, lifespan="on"))


class Process(uvicorn.Server):
    """A server that is all that its process does: it ends by signals, and by a failure."""

    def __init__(
        self, app: ASGIApp, life: Lifetime, say: Callable[[str], None], *, is_front: bool = False
    ) -> None:
        super().__init__(make_config(app, life, lifespan="on" if is_front else "off"))
        self._life, self._say, self._has_said, self._is_front = life, say, False, is_front
        self._is_hurried = False
        self.failure: ForetokenError | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the next one finds no handler, or has a front end at once."""
        if self._is_front and self._life.is_draining:
            self._is_hurried = True
            return
        if not self._is_front:
            for each in _SIGNALS:
                signal.signal(each, signal.SIG_DFL)
        self._life.drain()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is over."""
        life = self._life
        if life.is_draining and not self._has_said:  # a signal handler must not write
            self._has_said = True
            seconds = life.options.drain_timeout
            self._say(f"Ending: requests left: {len(life.flights)} ({seconds:g} s at most).")
        if not life.flights and gc.get_count()[2] > _OLD[0]:
            gc.collect()
        if self._is_hurried:
            life.num_cut = max(life.num_cut, len(life.flights))
            for flight in [*life.flights]:
                flight.cut("shutdown")
        self.failure = life.failed()
        is_over = self._is_hurried or self.failure is not None or life.is_over()
        return await super().on_tick(counter) or is_over

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for clients to read the ends of their answers, as long as there is time."""
        self.config.timeout_graceful_shutdown = math.ceil(self._life.seconds_left())
        await super().shutdown(sockets)


def serve(
    app: ASGIApp,
    life: Lifetime,
    bound: socket.socket,
    told: Sequence[str],
    say: Callable[[str], None],
    *,
    is_front: bool = False,
) -> None:
    """Serve until a signal ends that. Threads of an engine go on: `leave` does not wait for them.

    Args:
        told: lines about what is served.
        is_front: whether it has replicas elsewhere. Then the application learns when it begins and
            ends, and this returns at a second signal, too, so that they can be ended.

    Raises:
        ConfigError: another program has begun to listen at this address.
        ForetokenError: what `life` failed by.
    """
    options = life.options
    try:
        bound.listen(_BACKLOG)
    except OSError as error:  # another began to listen meanwhile
        raise _taken(options, error) from None
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if options.is_exposed:
        say(f"WARNING: whoever reaches {shown} can use this server: there is no --api-key.")
    for line in told:
        say(line)
    say("Ctrl-C or SIGTERM ends it when what is under way is answered; a second one at once.")
    scheme = "https" if options.has_tls else "http"
    say(f"Serving on {scheme}://{shown}:{port}")
    process = Process(app, life, say, is_front=is_front)
    process.run(sockets=[bound])
    if process.failure is not None:
        raise process.failure
    num_cut = life.num_cut
    say("Ended: " + (f"{num_cut} requests were cut off." if num_cut else "all is answered."))


def leave(code: int) -> NoReturn:
    """End this process now, with all that it has written.

    Python would take 3 000 modules and 400 000 objects apart first, which took 1.4 to 2.7 s, and
    wait for the engine's step, which may take as long as it likes.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # who should read it has left, or it is closed
            if stream is not None:
                stream.flush()
    os._exit(code)


def _taken(options: ServeOptions, error: Exception) -> ConfigError:
    told = getattr(error, "strerror", None) or error
    bound = f"an address of this machine that is free: {told}"
    remedy = "Give another --host or --port; --port 0 takes a port that is free."
    return ConfigError("host, port", f"{options.host}, {options.port}", bound, remedy)
