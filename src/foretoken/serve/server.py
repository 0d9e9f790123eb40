"""The process of a server: the socket, uvicorn, signals, and the end of the process.

After the first SIGTERM or Ctrl-C open requests are answered, and the process ends with 0; a second
signal ends it at once. If the engine fails, the process ends after all waiting clients have got an
error.
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

_BACKLOG = 2048
_IDLE_THRESHOLD, _BUSY_THRESHOLD = 10, 10_000
"""Garbage collections of the second generation before one of the third, by the process' state."""


def bind(options: ServeOptions) -> socket.socket:
    """A socket that does not listen yet; `ConfigError` if its address is wrong or not free."""
    new_socket = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    try:
        new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if new_socket.family == socket.AF_INET6:
            new_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        new_socket.bind((options.host, options.port))
    except (OSError, UnicodeError) as error:
        new_socket.close()
        raise _address_error(options, error) from None
    return new_socket


def check_tls(options: ServeOptions) -> None:
    """Raise `ConfigError` if the files of TLS cannot be used."""
    if not options.has_tls:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    names, paths = "ssl_certfile, ssl_keyfile", f"{options.ssl_certfile}, {options.ssl_keyfile}"
    try:
        context.load_cert_chain(str(options.ssl_certfile), options.ssl_keyfile, lambda: b"")
        if options.ssl_ca_certs is not None:
            names, paths = "ssl_ca_certs", options.ssl_ca_certs
            context.load_verify_locations(paths)
    except OSError as error:  # `ssl.SSLError` is one
        bound = f"PEM files, and the key without a password: {error.strerror or error}"
        raise ConfigError(names, paths, bound) from None


def collect_when_idle() -> None:
    """Have the process collect garbage among old objects only when it is idle.

    A collection stops all threads: 0.2 s for the objects of PyTorch and Transformers, which are
    frozen here, and 0.3 s for the 300 000 objects of the longest answers.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _BUSY_THRESHOLD)


def _make_config(app: ASGIApp, life: Lifetime, lifespan: Literal["on", "off"]) -> uvicorn.Config:
    options = life.options
    return uvicorn.Config(
        app,
        http=partial(Connection, options),  # type: ignore[arg-type]
        log_level="warning", log_config=None, access_log=False,  # `logs.py` logs requests
        ws="none", lifespan=lifespan, server_header=False, proxy_headers=False,
        ssl_keyfile=options.ssl_keyfile, ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs, ssl_cert_reqs=options.ssl_cert_reqs,
        timeout_graceful_shutdown=math.ceil(life.seconds_left()),
    )  # fmt: skip


def make_server(app: FastAPI) -> uvicorn.Server:
    """A server of this application, for a program that runs the server itself."""
    return uvicorn.Server(_make_config(app, app.state.context.lifetime, "on"))


class Process(uvicorn.Server):
    """A server that has the process to itself, and ends at a signal or by an engine's failure."""

    def __init__(
        self, app: ASGIApp, life: Lifetime, say: Callable[[str], None], *, is_front: bool = False
    ) -> None:
        super().__init__(_make_config(app, life, "on" if is_front else "off"))
        self._life, self._say, self._is_front = life, say, is_front
        self._has_announced_end, self._ends_at_once = False, False
        self.failure: ForetokenError | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, and end at once at the second.

        The default handler, which kills the process, is restored for the second signal, except for
        a front, which must end the replicas first.
        """
        if self._is_front and self._life.is_draining:
            self._ends_at_once = True
            return
        if not self._is_front:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
        self._life.drain()

    async def on_tick(self, counter: int) -> bool:
        """Whether the server must end; uvicorn calls this ten times a second."""
        life = self._life
        if life.is_draining and not self._has_announced_end:  # a signal handler must not write
            self._has_announced_end = True
            seconds = life.options.drain_timeout
            self._say(f"Ending: requests left: {len(life.open_requests)} ({seconds:g} s at most).")
        if not life.open_requests and gc.get_count()[2] > _IDLE_THRESHOLD:
            gc.collect()
        if self._ends_at_once:
            life.cut_open_requests()
        self.failure = life.failed()
        is_over = self._ends_at_once or self.failure is not None or life.is_over()
        return await super().on_tick(counter) or is_over

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the server, after clients had time to read the ends of answers."""
        self.config.timeout_graceful_shutdown = math.ceil(self._life.seconds_left())
        await super().shutdown(sockets)


def serve(
    app: ASGIApp,
    life: Lifetime,
    bound_socket: socket.socket,
    lines: Sequence[str],
    say: Callable[[str], None],
    *,
    is_front: bool = False,
) -> None:
    """Serve until a signal. The engine's threads still run after that: call `exit_now` next.

    Args:
        lines: messages about the model, for the user.
        is_front: whether the application is a fleet's front. A front gets ASGI's lifespan events,
            and at a second signal the function returns, so that the caller can end the replicas.

    Raises:
        ConfigError: another program has begun to listen at this address.
        ForetokenError: the failure that `life` reports.
    """
    options = life.options
    try:
        bound_socket.listen(_BACKLOG)
    except OSError as error:
        raise _address_error(options, error) from None
    host, port = bound_socket.getsockname()[:2]
    shown_host = f"[{host}]" if ":" in host else host
    if options.is_exposed:
        say(f"WARNING: whoever reaches {shown_host} can use this server: there is no --api-key.")
    for line in lines:
        say(line)
    say("At Ctrl-C or SIGTERM open requests are answered; a second signal ends the server at once.")
    scheme = "https" if options.has_tls else "http"
    say(f"Serving on {scheme}://{shown_host}:{port}")
    process = Process(app, life, say, is_front=is_front)
    process.run(sockets=[bound_socket])
    if process.failure is not None:
        raise process.failure
    num_cut = life.num_cut
    say("Ended: " + (f"{num_cut} requests were cut off." if num_cut else "no request was cut off."))


def exit_now(code: int) -> NoReturn:
    """End this process now, after flushing its output.

    Python would first destroy 3 000 modules and 400 000 objects, which took 1.4 to 2.7 s, and wait
    for the engine's step, which has no time limit.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream is closed or has no reader
            if stream is not None:
                stream.flush()
    os._exit(code)


def _address_error(options: ServeOptions, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    bound = f"an address of this machine that is free: {reason}"
    remedy = "Give another --host or --port; --port 0 takes a free port."
    return ConfigError("host, port", f"{options.host}, {options.port}", bound, remedy)
