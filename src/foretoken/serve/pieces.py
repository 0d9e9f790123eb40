"""JSON in pieces, made and sent without blocking the event loop.

Charter: what takes time on the event loop in proportion to an answer or a body. An answer is made
piece by piece, and after some milliseconds of work the loop rests for as long; a long body is read
in a thread, where Python lets others have the interpreter.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SLICE = 0.002
"""Seconds of work on an answer, then of rest. The engine's thread takes the interpreter many times
in a step, and waits for what is left of a slice each time; the rests are its own."""
LONG_BODY = 2**15
"""Bytes: a body of so many takes a millisecond or two, a thread 0.1 ms."""
T = TypeVar("T")
P = ParamSpec("P")


class Rows:
    """A long list in an answer: its items are made when they are written, once."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def dumps(value: Any) -> bytes:
    """JSON of a value without `Rows`."""
    try:
        return to_json(value, inf_nan_mode="null")
    except ValueError:  # half a surrogate pair, which a tool's description may have
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def pieces(value: Any) -> Iterator[bytes]:
    """JSON of a value: of dicts each value, and of `Rows` each item, is a piece."""
    if isinstance(value, dict):
        before = b"{"
        for name, item in value.items():
            yield before + dumps(name) + b":"
            yield from pieces(item)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Rows):
        before = b"["
        for item in value:
            yield before + dumps(item)
            before = b","
        yield b"[]" if before == b"[" else b"]"
    else:
        yield dumps(value)


async def paced(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The parts, joined to what was made in one slice."""
    made: list[bytes] = []
    start = perf_counter()
    for part in parts:
        made.append(part)
        if perf_counter() - start > SLICE:
            yield b"".join(made)
            made = []
            await asyncio.sleep(SLICE)
            start = perf_counter()
    yield b"".join(made)


async def aside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns: done here, or in a thread if it is for a body of many bytes."""
    if size < LONG_BODY:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


class WholeAnswer(Response):
    """JSON that is complete when its first byte is sent, and goes out by parts."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; the next part when the client has read most of those before it."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        *most, last = self._parts
        for part in most:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": last})
