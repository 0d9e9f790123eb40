"""Endpoints that generate: the flow from a body to an answer. Begin reading at `answer`."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from foretoken.errors import StepError
from foretoken.serve.answers.choices import ChatWriter, CompletionWriter
from foretoken.serve.answers.events import Event, EventReader
from foretoken.serve.answers.named import MessagesWriter, ResponsesWriter
from foretoken.serve.context import Context
from foretoken.serve.conversions import read_messages, read_responses
from foretoken.serve.errors import Refusal, documented, written_as
from foretoken.serve.limits import JsonRoute
from foretoken.serve.metrics import Record
from foretoken.serve.protocol.chat import ChatBody, CompletionBody
from foretoken.serve.protocol.messages import CountBody, MessagesBody
from foretoken.serve.protocol.responses import ResponsesBody
from foretoken.serve.requests import Asked, Served, check_size, read_chat, read_completion
from foretoken.serve.running import Flight, News, run
from foretoken.serve.sse import (
    AnswerWriter,
    EventStream,
    WholeAnswer,
    aside,
    dumps,
    paced,
    while_connected,
)

Body = TypeVar("Body")


def router(context: Context) -> APIRouter:
    """OpenAI's `/v1/completions`, `/v1/chat/completions`, `/v1/responses`; `/v1/messages`."""
    routes = APIRouter(prefix="/v1", tags=["generation"], route_class=JsonRoute)
    served, model = context.served, context.served.names[0]

    async def read(work: Callable[[Body, Served], Asked], body: Body, request: Request) -> Asked:
        """What a body asks for; of a long one others do not wait for that."""
        return await aside(len(await request.body()), _checked, work, body, served)

    @routes.post("/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete prompts."""
        asked = await read(read_completion, body, request)
        writer = CompletionWriter(asked, model)
        return await answer(context, request, asked, writer)

    @routes.post("/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        asked = await read(read_chat, body, request)
        writer = ChatWriter(asked, model)
        return await answer(context, request, asked, writer)

    @routes.post("/responses", response_model=None)
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer an input, of which nothing is kept."""
        asked = await read(read_responses, body, request)
        return await answer(context, request, asked, ResponsesWriter(asked, body, model))

    in_theirs = documented(Refusal(400, "", "").anthropic)

    @routes.post("/messages", response_model=None, responses=in_theirs)
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answer a conversation as Anthropic's API does."""
        asked = await read(read_messages, body, request)
        return await answer(context, request, asked, MessagesWriter(asked, model))

    @routes.post("/messages/count_tokens", response_model=None, responses=in_theirs)
    async def count(body: CountBody, request: Request) -> Response:
        """How many tokens a conversation has, as its answer would count them."""
        asked = await read(read_messages, body, request)
        ids = await context.engine.encode_chat(asked.messages or (), **asked.template)
        return WholeAnswer([dumps({"input_tokens": len(ids)})])

    return routes


def _checked(read: Callable[[Body, Served], Asked], body: Body, served: Served) -> Asked:
    asked = read(body, served)
    with written_as(asked.written):
        check_size(asked, served)
    return asked


async def answer(
    context: Context, request: Request, asked: Asked, writer: AnswerWriter
) -> Response:
    """Have the engine do what is asked, and write what comes of it.

    A stream begins when the first tokens are there, so that what is refused has its status. A
    client that leaves ends its request, before that and after it.
    """
    record, reader = Record(context.counts), EventReader(asked)
    request.state.usage, request.state.answer_id = reader.usage, asked.name  # for the log
    flight = Flight(context.lifetime, context.engine, uuid.uuid4().hex)
    news = run(context.engine, asked, flight, context.served.options.max_answer_logprobs)
    try:
        if not asked.stream:
            work = whole(news, reader, writer, record)
            return WholeAnswer(await while_connected(request.receive, work))
        first = await while_connected(request.receive, _first(news))
    except BaseException as error:
        await news.aclose()
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        raise
    return EventStream(first, news, reader, writer, record.observe)


async def whole(
    news: AsyncGenerator[News, None], reader: EventReader, writer: AnswerWriter, record: Record
) -> list[bytes]:
    """An answer that is complete, in parts."""
    choices: defaultdict[int, list[Event]] = defaultdict(list)
    async with aclosing(news):
        async for item in news:
            record.observe(item)
            for event in reader.read(item):
                choices[event.choice].append(event)
    return [part async for part in paced(writer.body(choices, reader.usage))]


async def _first(news: AsyncGenerator[News, None]) -> News:
    async for item in news:
        return item
    raise StepError("a request ended before it began")
