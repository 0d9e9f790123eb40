"""Sending an answer, whole or as server-sent events, without blocking the event loop.

An answer is written in slices: after `SLICE` seconds of work the task sleeps for the same time. The
tokens of a step are sent together, unless writing them takes longer than a slice.
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
from foretoken.serve.running import PromptDelta

SLICE = 0.002
"""Seconds. The engine's thread takes the interpreter's lock many times in a step, and each time it
waits for the rest of a slice of work."""
LONG_BODY = 2**15  # bytes, which take a millisecond or two to read; starting a thread takes 0.1 ms
DONE = b"data: [DONE]\n\n"
Choices = dict[int, list[Event]]
"""All events of an answer, by the index of the choice. Writers remove the choices that they have
written, since freeing all events together would stall the event loop."""
T = TypeVar("T")
P = ParamSpec("P")


class LazyList:
    """A long list in an answer, which makes items while they are written; iterate only once."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def dumps(value: Any) -> bytes:
    """The JSON of a value that contains no `LazyList`."""
    try:
        return to_json(value, inf_nan_mode="null")
    except ValueError:  # half a surrogate pair, for example in a tool's description
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a value in pieces: one for each value of a dict and each item of a `LazyList`."""
    if isinstance(value, dict):
        prefix = b"{"
        for name, item in value.items():
            yield prefix + dumps(name) + b":"
            yield from pieces(item)
            prefix = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, LazyList):
        prefix = b"["
        for item in value:
            yield prefix + dumps(item)
            prefix = b","
        yield b"[]" if prefix == b"[" else b"]"
    else:
        yield dumps(value)


async def paced(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The parts, joined into one chunk per slice. Iterating over `parts` is the work of a slice."""
    chunk: list[bytes] = []
    start = perf_counter()
    for part in parts:
        chunk.append(part)
        if perf_counter() - start > SLICE:
            yield b"".join(chunk)
            chunk = []
            await asyncio.sleep(SLICE)
            start = perf_counter()
    yield b"".join(chunk)


async def in_thread_if_long(
    size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """The result of `work` on a body of `size` bytes; a thread does it for a long body."""
    if size < LONG_BODY:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


class AnswerWriter(Protocol):
    """Writes one answer of an API, in pieces that each take little time to make."""

    def body(self, choices: Choices, usage: Usage) -> Iterable[bytes]:
        """The whole answer."""

    def write(self, events: Sequence[Event], usage: Usage) -> Iterable[bytes]:
        """Chunks of the stream for these events; no chunks if there is nothing to tell."""

    def end(self, usage: Usage) -> Iterable[bytes]:
        """The end of the stream."""

    def failure(self, refused: Refusal) -> Iterable[bytes]:
        """An error that ends the stream."""


class WholeAnswer(Response):
    """A response of JSON that is complete before its first byte is sent."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, parts)))})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Each `send` waits until the client has read most of what was sent before.
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        *parts, last = self._parts
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": last})


class EventStream(StreamingResponse):
    """A streamed answer, which ends early if its client disconnects.

    One task takes each delta from the engine to the socket; Starlette's response makes the head.

    Args:
        first, rest: the first delta, and the other deltas.
        observe: called with each delta, to count it.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: PromptDelta, rest: AsyncGenerator[PromptDelta, None], reader: EventReader,
        writer: AnswerWriter, observe: Callable[[PromptDelta], None],
    ) -> None:  # fmt: skip
        super().__init__((), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._first, self._rest = first, rest
        self._reader, self._writer, self._observe = reader, writer, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._rest):
            with suppress(ClientDisconnect):
                await send(start)
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        item: PromptDelta | None = self._first
        body: Message = {"type": "http.response.body", "more_body": True}
        try:
            while item is not None:
                self._observe(item)
                chunks = self._writer.write(self._reader.read(item), self._reader.usage)
                async for part in paced(chunks):
                    if part:
                        await send({**body, "body": part})
                item = await anext(self._rest, None)
        except Exception as error:  # the status is already sent, so the stream reports the error
            last = self._writer.failure(refusal(error))
        else:
            last = self._writer.end(self._reader.usage)
        async for part in paced(last):
            await send({**body, "body": part})
        await send({**body, "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if the client disconnects, cancel `work` and raise `ClientDisconnect`.

    `work` runs in the calling task, which is cancelled and uncancelled as in `asyncio.timeout`.
    """
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    num_cancellations, has_cancelled, is_over = task.cancelling(), False, False

    def cancel_work(disconnected: asyncio.Task[None]) -> None:
        nonlocal has_cancelled
        if not is_over:
            has_cancelled = task.cancel()

    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    disconnected.add_done_callback(cancel_work)
    try:
        return await work
    except asyncio.CancelledError:
        if has_cancelled and task.cancelling() == num_cancellations + 1:
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        disconnected.cancel()
        if has_cancelled:
            task.uncancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
