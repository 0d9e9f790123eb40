"""A server in a thread of the test's process, and its streams as lists."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from foretoken import AsyncEngine
from foretoken.serve.app import build_app
from foretoken.serve.options import ServeOptions
from foretoken.serve.server import bind, make_server

PROMPT = "def fibonacci(n):\n"


class Running(NamedTuple):
    url: str
    engine: AsyncEngine


@contextmanager
def running(engine: AsyncEngine, options: ServeOptions) -> Iterator[Running]:
    """A real server on a free port of the loopback; it and its engine have ended afterwards."""
    server = make_server(build_app(engine, options))
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


def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for a condition, and fail if it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a body, or the `error` of one."""
    answer: dict[str, Any] = http.post(path, json=body).json()
    return answer


def chunks(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends as it should."""
    text = http.post(path, json={"stream": True, **body}).text
    *events, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def choices(found: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """Of a stream's chunks, what they say of one choice."""
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
