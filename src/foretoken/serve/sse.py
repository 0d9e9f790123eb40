"""An answer as it is sent: whole, or as server-sent events.

Charter: the stream of one answer, from its first delta to its end, and what writes it in OpenAI's
choices: one chunk for each that has something new. What stays equal in chunks is written once; a
step's chunks are one write.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from foretoken.serve.answers.events import Event, EventReader, Form
from foretoken.serve.answers.usage import Usage
from foretoken.serve.errors import Refusal, refusal
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


class AnswerWriter(Protocol):
    """How an API writes one answer."""

    def body(self, events: Sequence[Event], usage: Usage) -> dict[str, Any]:
        """The answer in one piece, from all its events."""

    def write(self, events: Sequence[Event], usage: Usage) -> bytes:
        """What is new; b"" if a client would learn nothing."""

    def last(self, usage: Usage) -> bytes:
        """What closes the stream."""

    def failed(self, refused: Refusal) -> bytes:
        """An error that ends the stream."""


class ChunkWriter:
    """An answer as choices.

    Args:
        model: its name in the answer.
    """

    def __init__(self, asked: Asked, form: Form, model: str) -> None:
        self._asked, self._form = asked, form
        self._fields = {
            "id": form.id_prefix + uuid.uuid4().hex,
            "object": form.chunk_object if asked.stream else form.body_object,
            "created": int(time.time()),
            "model": model,
        }
        self._head = "data: " + _dumps(self._fields)[:-1] + ',"choices":['

    def body(self, events: Sequence[Event], usage: Usage) -> dict[str, Any]:
        """The choices by index, and what they cost."""
        by_choice: dict[int, list[Event]] = {}
        for event in events:
            by_choice.setdefault(event.choice, []).append(event)
        choices = [self._form.whole(by_choice[index]) for index in sorted(by_choice)]
        return {**self._fields, "choices": choices, **_counts(usage)}

    def write(self, events: Sequence[Event], usage: Usage) -> bytes:
        """Chunks of what is new."""
        chunks = [c for event in events for c in self._form.chunks(event)]
        if not chunks:
            return b""
        tail = "]}\n\n"
        if self._asked.continuous_usage:
            tail = '],"usage":' + _dumps(usage.body()) + "}\n\n"
        elif self._asked.include_usage:
            tail = '],"usage":null}\n\n'
        head = self._head
        return "".join([head + _dumps(choice) + tail for choice in chunks]).encode()

    def last(self, usage: Usage) -> bytes:
        """The chunk of usage, where it was asked for, and the end."""
        if not self._asked.include_usage:
            return DONE
        return f"{self._head}],{_dumps(_counts(usage))[1:]}\n\n".encode() + DONE

    def failed(self, refused: Refusal) -> bytes:
        """The error's body, and the end."""
        return f"data: {_dumps(refused.body)}\n\n".encode() + DONE


def _counts(usage: Usage) -> dict[str, Any]:
    return {"usage": usage.body(), "metrics": usage.speculation()}


async def stream(
    news: News,
    rest: AsyncGenerator[News, None],
    reader: EventReader,
    writer: AnswerWriter,
    observe: Callable[[News], None],
) -> AsyncGenerator[bytes, None]:
    """Chunks of an answer that has begun with `news`."""
    item: News | None = news
    try:
        while item is not None:
            observe(item)
            if chunks := writer.write([*reader.read(item)], reader.usage):
                yield chunks
            item = await anext(rest, None)
    except Exception as error:  # the status has been sent: the client reads it here
        yield writer.failed(refusal(error))
    else:
        yield writer.last(reader.usage)


_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
