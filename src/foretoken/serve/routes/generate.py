"""Endpoints that generate, and the flow from a body to an answer: see `answer`."""

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
from foretoken.serve.conversions import read_messages, read_responses
from foretoken.serve.errors import Refusal, client_field_names, error_responses
from foretoken.serve.limits import JsonRoute
from foretoken.serve.metrics import RequestRecord
from foretoken.serve.protocol.chat import ChatBody, CompletionBody
from foretoken.serve.protocol.messages import CountBody, MessagesBody
from foretoken.serve.protocol.responses import ResponsesBody
from foretoken.serve.requests import (
    GenerationRequest,
    ServedModel,
    check_size,
    read_chat,
    read_completion,
)
from foretoken.serve.routes import Context
from foretoken.serve.running import GeneratingRequest, PromptDelta, run
from foretoken.serve.sse import (
    AnswerWriter,
    EventStream,
    WholeAnswer,
    dumps,
    in_thread_if_long,
    paced,
    while_connected,
)

Body = TypeVar("Body")
Reader = Callable[[Body, ServedModel], GenerationRequest]


def router(context: Context) -> APIRouter:
    """Endpoints that generate: those of OpenAI, and Anthropic's `/v1/messages`."""
    routes = APIRouter(prefix="/v1", tags=["generation"], route_class=JsonRoute)
    served, model = context.served, context.served.names[0]

    async def read(reader: Reader[Body], body: Body, request: Request) -> GenerationRequest:
        size = len(await request.body())
        return await in_thread_if_long(size, _read_and_check, reader, body, served)

    @routes.post("/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete prompts."""
        generation = await read(read_completion, body, request)
        return await answer(context, request, generation, CompletionWriter(generation, model))

    @routes.post("/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        generation = await read(read_chat, body, request)
        return await answer(context, request, generation, ChatWriter(generation, model))

    @routes.post("/responses", response_model=None)
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer an input; nothing is stored."""
        generation = await read(read_responses, body, request)
        return await answer(context, request, generation, ResponsesWriter(generation, body, model))

    anthropic_errors = error_responses(Refusal(400, "", "").anthropic)

    @routes.post("/messages", response_model=None, responses=anthropic_errors)
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answer a conversation as Anthropic's API does."""
        generation = await read(read_messages, body, request)
        return await answer(context, request, generation, MessagesWriter(generation, model))

    @routes.post("/messages/count_tokens", response_model=None, responses=anthropic_errors)
    async def count(body: CountBody, request: Request) -> Response:
        """Count the tokens of a conversation, as `usage` of its answer would."""
        generation = await read(read_messages, body, request)
        ids = await context.engine.encode_chat(generation.messages or (), **generation.template)
        return WholeAnswer([dumps({"input_tokens": len(ids)})])

    return routes


def _read_and_check(read: Reader[Body], body: Body, served: ServedModel) -> GenerationRequest:
    generation = read(body, served)
    with client_field_names(generation.client_names):
        check_size(generation, served)
    return generation


async def answer(
    context: Context, request: Request, generation: GenerationRequest, writer: AnswerWriter
) -> Response:
    """Have the engine generate; returns the response with the whole answer or with its stream.

    A stream begins with the first tokens, so that a refusal before them has its HTTP status. A
    client that disconnects at any time ends its request.
    """
    record, reader = RequestRecord(context.counts), EventReader(generation)
    request.state.usage, request.state.answer_id = reader.usage, generation.name  # for the log
    open_request = GeneratingRequest(context.lifetime, context.engine, uuid.uuid4().hex)
    max_logprobs = context.served.options.max_answer_logprobs
    deltas = run(context.engine, generation, open_request, max_logprobs)
    try:
        if not generation.stream:
            work = _whole_answer(deltas, reader, writer, record)
            return WholeAnswer(await while_connected(request.receive, work))
        first_delta = await while_connected(request.receive, _first_delta(deltas))
    except BaseException as error:
        await deltas.aclose()
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # for the log
        raise
    return EventStream(first_delta, deltas, reader, writer, record.observe)


async def _whole_answer(
    deltas: AsyncGenerator[PromptDelta, None], reader: EventReader,
    writer: AnswerWriter, record: RequestRecord,
) -> list[bytes]:  # fmt: skip
    choices: defaultdict[int, list[Event]] = defaultdict(list)
    async with aclosing(deltas):
        async for item in deltas:
            record.observe(item)
            for event in reader.read(item):
                choices[event.choice].append(event)
    return [part async for part in paced(writer.body(choices, reader.usage))]


async def _first_delta(deltas: AsyncGenerator[PromptDelta, None]) -> PromptDelta:
    async for item in deltas:
        return item
    raise StepError("the engine ended a request without a delta")
