"""An answer as server-sent events: one chunk for each choice that has something new.

Charter: the stream of one answer, from its first delta to `[DONE]`. What stays equal in its chunks
is written once; a step's chunks are one write.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from foretoken.serve.answers.events import EventReader, Form
from foretoken.serve.errors import refusal
from foretoken.serve.requests import Asked
from foretoken.serve.running import News

DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A stream that ends with its client: nothing generates for nobody."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], news: AsyncGenerator[News, None]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(chunks, headers=headers)
        self._chunks, self._news = chunks, news

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks; however that ends, and if it never began, nothing is left open."""
        async with aclosing(self._news), aclosing(self._chunks):
            await super().__call__(scope, receive, send)


class ChunkWriter:
    """Chunks of one answer.

    Args:
        head: what is equal in all of them: `id`, `object`, `created`, `model`.
    """

    def __init__(self, asked: Asked, head: Mapping[str, Any], form: Form) -> None:
        self._asked, self._form = asked, form
        self._head = "data: " + _dumps(head)[:-1] + ',"choices":['

    def write(self, news: News, reader: EventReader) -> bytes:
        """Chunks of what is new; b"" if a client would learn nothing."""
        chunks = [c for event in reader.read(news) for c in self._form.chunks(event)]
        if not chunks:
            return b""
        tail = "]}\n\n"
        if self._asked.continuous_usage:
            tail = '],"usage":' + _dumps(reader.usage.body()) + "}\n\n"
        elif self._asked.include_usage:
            tail = '],"usage":null}\n\n'
        head = self._head
        return "".join([head + _dumps(choice) + tail for choice in chunks]).encode()

    def last(self, reader: EventReader) -> bytes:
        """The chunk of usage, where it was asked for, and the end."""
        if not self._asked.include_usage:
            return DONE
        counts = {"usage": reader.usage.body(), "metrics": reader.usage.speculation()}
        return f"{self._head}],{_dumps(counts)[1:]}\n\n".encode() + DONE


async def stream(
    news: News,
    rest: AsyncGenerator[News, None],
    reader: EventReader,
    writer: ChunkWriter,
    observe: Callable[[News], None],
) -> AsyncGenerator[bytes, None]:
    """Chunks of an answer that has begun with `news`."""
    item: News | None = news
    try:
        while item is not None:
            observe(item)
            if chunks := writer.write(item, reader):
                yield chunks
            item = await anext(rest, None)
    except Exception as error:  # the status has been sent: the client reads it here
        yield f"data: {_dumps(refusal(error).body)}\n\n".encode() + DONE
    else:
        yield writer.last(reader)


_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
