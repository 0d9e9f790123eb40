"""An answer as it is sent: whole, or as server-sent events.

Charter: the stream of one answer, from its first delta to its end, and what writes it in OpenAI's
choices: one chunk for each that has something new. What stays equal in chunks is written once; a
step's chunks are one write, unless making them takes long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from foretoken.serve.answers.events import Event, EventReader, Form
from foretoken.serve.answers.usage import Usage
from foretoken.serve.errors import Refusal, refusal
from foretoken.serve.pieces import dumps, paced, pieces
from foretoken.serve.requests import Asked
from foretoken.serve.running import News

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


Choices = dict[int, list[Event]]
"""All events of an answer, by choice. It is emptied as it is written: to free it at once would
stall the loop."""


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


class ChunkWriter:
    """An answer as choices.

    Args:
        model: its name in the answer.
    """

    def __init__(self, asked: Asked, form: Form, model: str) -> None:
        self._asked, self._form = asked, form
        self._is_long = asked.num_top is not None or asked.params.trace  # else there are no `Rows`
        self._fields = {
            "id": asked.answer_id(form.id_prefix),
            "object": form.chunk_object if asked.stream else form.body_object,
            "created": int(time.time()),
            "model": model,
        }
        self._head = b"data: " + dumps(self._fields)[:-1] + b',"choices":['

    def body(self, choices: Choices, usage: Usage) -> Iterator[bytes]:
        between, root = self._head.removeprefix(b"data: "), dict[str, Any]()
        for index in sorted(choices):
            root |= self._form.root(choices[index])
            yield between
            yield from pieces(self._form.whole(choices.pop(index)))
            between = b","
        yield b"]," + dumps(root | _counts(usage))[1:]

    def write(self, events: Sequence[Event], usage: Usage) -> Iterator[bytes]:
        tail = b"]}\n\n"
        if self._asked.continuous_usage:
            tail = b'],"usage":' + dumps(usage.body()) + b"}\n\n"
        elif self._asked.include_usage:
            tail = b'],"usage":null}\n\n'
        for event in events:
            root = self._form.root([event])
            beside = b"]," + dumps(root)[1:-1] + tail[1:] if root else tail
            for choice in self._form.chunks(event):
                yield self._head
                yield from pieces(choice) if self._is_long else (dumps(choice),)
                yield beside
                beside = tail

    def last(self, usage: Usage) -> Iterator[bytes]:
        """The chunk of usage, where it was asked for, and the end."""
        if self._asked.include_usage:
            yield self._head + b"]," + dumps(_counts(usage))[1:] + b"\n\n"
        yield DONE

    def failed(self, refused: Refusal) -> Iterator[bytes]:
        yield b"data: " + dumps(refused.body) + b"\n\n" + DONE


def _counts(usage: Usage) -> dict[str, Any]:
    return {"usage": usage.body(), "metrics": usage.speculation()}


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
