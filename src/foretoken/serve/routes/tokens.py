"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from foretoken.errors import RequestError
from foretoken.serve.context import Context
from foretoken.serve.limits import JsonRoute
from foretoken.serve.pieces import WholeAnswer, dumps
from foretoken.serve.protocol.common import TemplateFields
from foretoken.serve.protocol.tokens import DetokenizeBody, TokenizeBody
from foretoken.serve.requests import chat_options, check_text


def router(context: Context) -> APIRouter:
    """Texts to tokens and back."""
    routes = APIRouter(tags=["tokens"], route_class=JsonRoute)

    @routes.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text or a conversation."""
        context.served.check_name(body.model)
        ids = await _encode(context, body)
        most = context.served.max_model_len
        found = {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": None}
        return WholeAnswer([dumps(found)])

    @routes.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        context.served.check_name(body.model)
        check_text("tokens", body.tokens, context.served)
        return WholeAnswer([dumps({"prompt": await context.engine.decode(body.tokens)})])

    return routes


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
