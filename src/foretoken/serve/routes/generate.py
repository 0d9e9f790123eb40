"""Endpoints that generate: the flow from a body to an answer. Begin reading at `answer`."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from foretoken.errors import StepError
from foretoken.serve.answers.chat import ChatForm
from foretoken.serve.answers.completions import CompletionForm
from foretoken.serve.answers.events import Event, EventReader, Form
from foretoken.serve.context import Context
from foretoken.serve.lifetime import Flight
from foretoken.serve.metrics import Record
from foretoken.serve.protocol.chat import ChatBody
from foretoken.serve.protocol.completions import CompletionBody
from foretoken.serve.requests import Asked, check_size, read_chat, read_completion
from foretoken.serve.running import News, run
from foretoken.serve.sse import ChunkWriter, EventStream, stream

T = TypeVar("T")


def router(context: Context) -> APIRouter:
    """`/v1/completions` and `/v1/chat/completions`."""
    routes = APIRouter(prefix="/v1", tags=["generation"])

    @routes.post("/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete prompts."""
        asked = read_completion(body, context.served)
        return await answer(context, request, asked, CompletionForm(asked))

    @routes.post("/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        asked = read_chat(body, context.served)
        return await answer(context, request, asked, ChatForm(asked))

    return routes


async def answer(context: Context, request: Request, asked: Asked, form: Form) -> Response:
    """Have the engine do what is asked, and write what comes of it.

    A stream begins when the first tokens are there, so that what is refused has its status. A
    client that leaves ends its request, before that and after it.
    """
    record, reader = Record(context.counts), EventReader(asked)
    check_size(asked, context.served)
    name = form.id_prefix + uuid.uuid4().hex
    head = {
        "id": name,
        "object": form.chunk_object if asked.stream else form.body_object,
        "created": int(time.time()),
        "model": context.served.names[0],
    }
    news = run(context.engine, asked, Flight(context.lifetime, name))
    try:
        if not asked.stream:
            body = await while_connected(request, whole(news, reader, form, record))
            return _json(head | body)
        first = await while_connected(request, _first(news))
    except BaseException as error:
        await news.aclose()
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        raise
    writer = ChunkWriter(asked, head, form)
    return EventStream(stream(first, news, reader, writer, record.observe), news)


async def whole(
    news: AsyncGenerator[News, None], reader: EventReader, form: Form, record: Record
) -> dict[str, Any]:
    """The answer in one piece, its choices by index."""
    events: dict[int, list[Event]] = {}
    async with aclosing(news):
        async for item in news:
            record.observe(item)
            for event in reader.read(item):
                events.setdefault(event.choice, []).append(event)
    return {
        "choices": [form.whole(events[index]) for index in sorted(events)],
        "usage": reader.usage.body(),
        "metrics": reader.usage.speculation(),
    }


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of this work; ends it and raises `ClientDisconnect` when the client leaves."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _first(news: AsyncGenerator[News, None]) -> News:
    async for item in news:
        return item
    raise StepError("a request ended before it began")


def _json(body: dict[str, Any]) -> Response:
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    return Response(text, media_type="application/json")
