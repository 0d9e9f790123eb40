"""The process: an engine, its application, and uvicorn in front of them."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from foretoken.serve.options import ServeOptions


def listen(options: ServeOptions) -> socket.socket:
    """A socket that listens where the options say; `OSError` if it cannot."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    return socket.create_server((options.host, options.port), family=family, backlog=2048)


def make_server(app: FastAPI) -> uvicorn.Server:
    """A server of this application that says nothing of what it serves."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="on")
    return uvicorn.Server(config)


def serve(app: FastAPI, options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it."""
    with listen(options) as bound:
        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        say(f"Serving on http://{shown}:{port}")
        make_server(app).run(sockets=[bound])
