"""An answer as it is sent: whole, or as server-sent events, and what keeps that from blocking.

Charter: the stream of one answer, from its first delta to its end, and what takes time on the event
loop in proportion to an answer or a body. An answer is made piece by piece, and after some
milliseconds of work the loop rests for as long; what a step brings is one write, unless making it
takes long. A long body is read in a thread, where Python lets others have the interpreter.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from time import perf_counter
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from foretoken.serve.answers.events import Event, EventReader, Usage
from foretoken.serve.errors import Refusal, refusal
from foretoken.serve.running import News

SLICE = 0.002
"""Seconds of work on an answer, then of rest. The engine's thread takes the interpreter many times
in a step, and waits for what is left of a slice each time; the rests are its own."""
LONG_BODY = 2**15
"""Bytes: a body of so many takes a millisecond or two, a thread 0.1 ms."""
DONE = b"data: [DONE]\n\n"
Choices = dict[int, list[Event]]
"""All events of an answer, by choice. It is emptied as it is written: to free it at once would
stall the loop."""
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


async def paced(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
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


class AnswerWriter(Protocol):
    """How an API writes one answer: in pieces, in order, each of which is made quickly."""

    def body(self, choices: Choices, usage: Usage) -> Iterable[bytes]:
        """The whole answer."""

    def write(self, events: Sequence[Event], usage: Usage) -> Iterable[bytes]:
        """What is new; nothing if a client would learn nothing."""

    def last(self, usage: Usage) -> Iterable[bytes]:
        """What closes the stream."""

    def failed(self, refused: Refusal) -> Iterable[bytes]:
        """An error that ends the stream."""


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


class EventStream(StreamingResponse):
    """An answer that has begun with `first`; it ends with its client: nothing is made for nobody.

    Of Starlette's response it has the head alone: one task takes a step's news from the engine to
    the socket.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: News,
        rest: AsyncGenerator[News, None],
        reader: EventReader,
        writer: AnswerWriter,
        observe: Callable[[News], None],
    ) -> None:
        super().__init__((), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._first, self._rest = first, rest
        self._reader, self._writer, self._observe = reader, writer, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it; however that ends, and if it never began, nothing is left open."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._rest):
            with suppress(ClientDisconnect):
                await send(start)
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        item: News | None = self._first
        body: Message = {"type": "http.response.body", "more_body": True}
        try:
            while item is not None:
                self._observe(item)
                chunks = self._writer.write(self._reader.read(item), self._reader.usage)
                async for part in paced(chunks):
                    if part:
                        await send({**body, "body": part})
                item = await anext(self._rest, None)
        except Exception as error:  # the status has been sent: the client reads it here
            last = self._writer.failed(refusal(error))
        else:
            last = self._writer.last(self._reader.usage)
        async for part in paced(last):
            await send({**body, "body": part})
        await send({**body, "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of this work; ends it and raises `ClientDisconnect` when the client leaves.

    It is done in the task that asks for it, which is cancelled as `asyncio.timeout` does that.
    """
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    before, has_left, is_over = task.cancelling(), False, False

    def leave(gone: asyncio.Task[None]) -> None:
        nonlocal has_left
        if not is_over:
            has_left = task.cancel()

    gone = asyncio.ensure_future(_gone(receive))
    gone.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.cancelling() == before + 1:
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        gone.cancel()
        if has_left:
            task.uncancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
