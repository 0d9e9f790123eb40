"""A server in a thread of the test's process, and its streams as lists."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from foretoken import AsyncEngine
from foretoken.serve.app import build_app
from foretoken.serve.options import ServeOptions
from foretoken.serve.running import Lifetime
from foretoken.serve.server import bind, make_server
from tests.support.asynchronous import PATIENCE, until

PATH = "/v1/completions"
PROMPT = "def fibonacci(n):\n"


class Running(NamedTuple):
    url: str
    engine: AsyncEngine


@contextmanager
def running(
    engine: AsyncEngine, options: ServeOptions, life: Lifetime | None = None
) -> Iterator[Running]:
    """A real server on a free port of the loopback; it and its engine have ended afterwards."""
    server = make_server(build_app(engine, options, life=life))
    with bind(ServeOptions(port=0)) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        host, port = bound.getsockname()
        until(lambda: server.started)
        try:
            yield Running(f"http://{host}:{port}", engine)
        finally:
            server.should_exit = True
            thread.join()


class Deadlines(Lifetime):
    """Deadlines of requests come when a test says so, however fast the machine is."""

    def __init__(self, options: ServeOptions) -> None:
        super().__init__(options, lambda: None)
        self.timers: list[tuple[float, asyncio.TimerHandle, Any]] = []

    def call_later(self, seconds: float, call: Any, *args: Any) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        handle = loop.call_later(10**6, call, *args)
        self.timers.append((seconds, handle, lambda: loop.call_soon_threadsafe(call, *args)))
        return handle

    def come(self, seconds: float) -> None:
        """Let all deadlines of this length come that are not cancelled."""
        for call in self.left(seconds):
            call()

    def left(self, seconds: float) -> list[Any]:
        """The calls of deadlines of this length that are not cancelled."""
        return [call for length, handle, call in self.timers
                if length == seconds and not handle.cancelled()]  # fmt: skip


def connect(server: Running) -> socket.socket:
    address = httpx.URL(server.url)
    return socket.create_connection((address.host, address.port or 80), timeout=PATIENCE)


def request(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = http.post(path, json=body).json()
    return answer


def chunks(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    text = http.post(path, json={"stream": True, **body}).text
    *events, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def choices(found: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The parts of one choice in the chunks of a stream."""
    return [c for chunk in found for c in chunk["choices"] if c["index"] == index]


def fail_later(owner: Any, name: str, says: str, steps: int = 3) -> None:
    """Have a method of an engine raise, after so many calls."""
    right, count = getattr(owner, name), 0

    def wrong(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count > steps:
            raise RuntimeError(says)
        return right(*given)

    setattr(owner, name, wrong)
