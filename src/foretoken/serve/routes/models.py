"""The model: its names at `/v1/models`; `/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from foretoken.errors import RequestError
from foretoken.serve.context import Context
from foretoken.serve.limits import JsonRoute
from foretoken.serve.protocol.chat import DetokenizeBody, TokenizeBody
from foretoken.serve.protocol.common import TemplateFields
from foretoken.serve.requests import chat_options, check_text
from foretoken.serve.sse import WholeAnswer, dumps


def router(context: Context) -> APIRouter:
    """What is served, under all its names, and texts to tokens and back."""
    routes = APIRouter()

    @routes.get("/v1/models", response_model=None, tags=["models"])
    async def models() -> JSONResponse:
        """All names of the model."""
        listed = [_card(context, name) for name in context.served.names]
        return JSONResponse({"object": "list", "data": listed})

    @routes.get("/v1/models/{name:path}", response_model=None, tags=["models"])
    async def model(name: str) -> JSONResponse:
        """One of them."""
        context.served.check_name(name)
        return JSONResponse(_card(context, name))

    tokens = APIRouter(tags=["tokens"], route_class=JsonRoute)

    @tokens.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text or a conversation."""
        context.served.check_name(body.model)
        ids = await _encode(context, body)
        most = context.served.max_model_len
        found = {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": None}
        return WholeAnswer([dumps(found)])

    @tokens.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        context.served.check_name(body.model)
        check_text("tokens", body.tokens, context.served)
        return WholeAnswer([dumps({"prompt": await context.engine.decode(body.tokens)})])

    routes.include_router(tokens)
    return routes


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "foretoken",
        "root": context.served.root,
        "parent": None,
        "max_model_len": context.served.max_model_len,
    }


async def _encode(context: Context, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt", body.prompt, "given, or else `messages`, and not both")
    if body.messages is None:
        for name in TemplateFields.model_fields:
            if getattr(body, name) is not None:
                raise RequestError(name, getattr(body, name), "left out without `messages`")
        check_text("prompt", body.prompt or "", context.served)
        special = body.add_special_tokens is not False
        return await context.engine.encode(body.prompt or "", add_special_tokens=special)
    check_text("messages", body.messages, context.served)
    return await context.engine.encode_chat(body.messages, **chat_options(body, context.served))
