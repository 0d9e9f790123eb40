"""Endpoints for the model and its tokens, in vLLM's shapes, and for the server's state."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from foretoken import __version__
from foretoken.errors import RequestError
from foretoken.serve.errors import UnavailableError, refusal
from foretoken.serve.limits import JsonRoute
from foretoken.serve.metrics import EngineCollector, exposition
from foretoken.serve.protocol.chat import DetokenizeBody, TokenizeBody
from foretoken.serve.protocol.common import TemplateFields
from foretoken.serve.requests import chat_options, check_text
from foretoken.serve.routes import Context
from foretoken.serve.sse import WholeAnswer, dumps


def router(context: Context) -> APIRouter:
    """Endpoints for models, tokens, and the server's state."""
    routes = APIRouter()

    @routes.get("/v1/models", response_model=None, tags=["models"])
    async def models() -> JSONResponse:
        """All names of the model, as models."""
        cards = [_card(context, name) for name in context.served.names]
        return JSONResponse({"object": "list", "data": cards})

    @routes.get("/v1/models/{name:path}", response_model=None, tags=["models"])
    async def model(name: str) -> JSONResponse:
        """The model with this name; 404 if there is no such model."""
        context.served.check_name(name)
        return JSONResponse(_card(context, name))

    tokens = APIRouter(tags=["tokens"], route_class=JsonRoute)

    @tokens.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text or a conversation."""
        context.served.check_name(body.model)
        ids = await _encode(context, body)
        longest = context.served.max_model_len
        answer = {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": None}
        return WholeAnswer([dumps(answer)])

    @tokens.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        context.served.check_name(body.model)
        check_text("tokens", body.tokens, context.served)
        return WholeAnswer([dumps({"prompt": await context.engine.decode(body.tokens)})])

    routes.include_router(tokens)
    routes.include_router(_state(context))
    return routes


def _state(context: Context) -> APIRouter:
    routes = APIRouter(tags=["state"])
    collector = EngineCollector(context.engine, context.counts, context.served.names[0])
    tokenizer = tokenizer_facts(context.engine.engine.tokenizer)
    options = {
        "version": __version__,
        "served_model_names": list(context.served.names),
        "max_model_len": context.served.max_model_len,
        "foretoken_config": asdict(context.engine.config),
    }

    # The engine is built before the socket listens, so the server is ready until the engine fails.
    @routes.get("/health", response_model=None)
    async def health() -> Response:
        """200 while the engine serves, 503 once it has failed."""
        failure = context.engine.status.failure
        return JSONResponse({}) if failure is None else refusal(failure).response()

    @routes.get("/ping", response_model=None)
    @routes.post("/ping", response_model=None)
    async def ping() -> Response:
        """As `/health`, under the name that some load balancers use."""
        return await health()

    @routes.get("/load", response_model=None)
    async def load() -> JSONResponse:
        """The number of requests being answered."""
        return JSONResponse({"server_load": len(context.lifetime.open_requests)})

    @routes.get("/server_info", response_model=None)
    async def server_info() -> JSONResponse:
        """The engine's options."""
        return JSONResponse(options)

    @routes.get("/tokenizer_info", response_model=None)
    async def tokenizer_info() -> JSONResponse:
        """The tokenizer's facts from the checkpoint's files, with its own chat template."""
        return JSONResponse(tokenizer)

    @routes.get("/health/ready", response_model=None)
    async def ready() -> Response:
        """As `/health`, and 503 once the server takes no more requests."""
        if context.lifetime.is_draining:
            return refusal(UnavailableError("The server ends.")).response()
        return await health()

    @routes.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Counts, gauges and histograms for Prometheus."""
        return Response(exposition(collector), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/version", response_model=None)
    async def version() -> JSONResponse:
        """Foretoken's version."""
        return JSONResponse({"version": __version__})

    return routes


def _card(context: Context, name: str) -> dict[str, Any]:
    served = context.served
    return {
        "id": name, "object": "model", "created": context.started, "owned_by": "foretoken",
        "root": served.root, "parent": None, "max_model_len": served.max_model_len,
    }  # fmt: skip


async def _encode(context: Context, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt", body.prompt, "given if `messages` is left out, and only then")
    if body.messages is None:
        for name in TemplateFields.model_fields:
            if getattr(body, name) is not None:
                raise RequestError(name, getattr(body, name), "left out without `messages`")
        check_text("prompt", body.prompt or "", context.served)
        adds_special = body.add_special_tokens is not False
        return await context.engine.encode(body.prompt or "", add_special_tokens=adds_special)
    check_text("messages", body.messages, context.served)
    return await context.engine.encode_chat(body.messages, **chat_options(body, context.served))


def tokenizer_facts(tokenizer: Any | None) -> dict[str, Any]:
    """Facts of a tokenizer for clients, with its own template: `--chat-template` may be private."""
    if tokenizer is None:
        return {}
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        **{name: getattr(tokenizer, name, None) for name in names},
        "additional_special_tokens": list(tokenizer.all_special_tokens),
        "add_bos_token": getattr(tokenizer, "add_bos_token", None),
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
