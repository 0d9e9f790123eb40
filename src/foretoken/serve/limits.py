"""Limits on a body before it is parsed, and an answer for every exception."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from inspect import signature
from typing import Any, get_type_hints

import numpy as np
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.errors import Refusal, refusal
from foretoken.serve.options import ServeOptions
from foretoken.serve.sse import in_thread_if_long

METHODS_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
_QUOTE = 2
_DEPTH_CHANGES = np.zeros(256, np.int8)  # of the depth, by byte; `_QUOTE` for a quote
_DEPTH_CHANGES[[*b"[{"]], _DEPTH_CHANGES[[*b"]}"]], _DEPTH_CHANGES[ord('"')] = 1, -1, _QUOTE


class BodyLimits:
    """Reads a body, refuses it if it exceeds a limit or is not UTF-8, or passes it on in one piece.

    An exception of the application becomes a refusal, if no answer has begun.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, max_model_len: int) -> None:
        self._app, self._options = app, options
        self._max_values = options.max_json_values or max(2**17, 2 * max_model_len)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if scope["method"] in METHODS_WITHOUT_BODY:
                await self._app(scope, receive, send_watched)
            elif isinstance(body := await self._read(scope, receive), Refusal):
                await body.response(scope)(scope, receive, send_watched)
            elif body is not None:  # else the client has left
                await self._app(scope, _replay(body, receive), send_watched)
        except Exception as error:
            refused = refusal(error)  # also logs bugs and faults of the engine
            if not has_begun:
                await refused.response(scope)(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | Refusal | None:
        """The body; a refusal if it is too long or `_check` refuses it; None: the client left."""
        limit = self._options.max_body_bytes
        length = Headers(scope=scope).get("content-length", "0")
        parts, size = [], int(length) if length.isdecimal() and len(length) < 20 else 0
        is_announced = size > 0
        has_more = True
        while has_more and size <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += 0 if is_announced else len(parts[-1])
            has_more = message.get("more_body", False)
        if size > limit:
            text = f"The body must have at most {limit} bytes."
            return Refusal(413, text, "invalid_request_error", code="body_too_large")
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return await in_thread_if_long(size, self._check, body) or body

    def _check(self, body: bytes) -> Refusal | None:
        """A refusal of a body that is not UTF-8 or would take too long to parse; else None."""
        # Only in UTF-8 is each bracket one byte that can be counted.
        if not json.detect_encoding(body).startswith("utf-8"):
            text = "The body must be UTF-8."
            return Refusal(400, text, "invalid_request_error", code="body_not_utf8")
        num_brackets, limit = body.count(b"[") + body.count(b"{"), self._max_values
        if num_brackets + body.count(b",") > limit:
            text = f"The body must have at most {limit} commas and opening brackets."
            return Refusal(400, text, "invalid_request_error", code="body_too_large")
        max_depth = self._options.max_json_depth
        if num_brackets > max_depth and json_depth(body) > max_depth:
            text = f"Lists and objects must not be nested more than {max_depth} deep."
            return Refusal(400, text, "invalid_request_error", code="body_too_deep")
        return None


class JsonRoute(APIRoute):
    """A route to an endpoint with the parameter `body`, a JSON object, and possibly `request`.

    FastAPI only describes the route in OpenAPI, and this class calls the endpoint: FastAPI would
    resolve dependencies, which took nearly a fifth of the CPU time of a short request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint, kind = self.endpoint, get_type_hints(self.endpoint)["body"]
        takes_request = "request" in signature(endpoint).parameters

        async def handle(request: Request) -> Response:
            arguments: dict[str, Any] = {"body": await _read_body(request, kind)}
            if takes_request:
                arguments["request"] = request
            response: Response = await endpoint(**arguments)
            return response

        self._answer = handle
        return handle

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # refuses the method
            return
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)


async def _read_body(request: Request, kind: type[BaseModel]) -> BaseModel:
    """The body, by `_parse`; `HTTPException` for a body with a `Content-Encoding`."""
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise HTTPException(415, f"Send the body without `Content-Encoding: {coding}`.")
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = content_type == "application/json" or (
        content_type.startswith("application/") and content_type.endswith("+json")
    )
    body = await request.body()
    return await in_thread_if_long(len(body), _parse, body, kind, is_json=is_json)


def _parse(body: Any, kind: type[BaseModel], *, is_json: bool) -> BaseModel:
    """The body as an object of class `kind`; `RequestValidationError` if it is no such JSON."""
    try:
        if body and is_json:
            # Python also reads NaN and 1e999, but the JSON of an answer cannot have them.
            body = json.loads(body, parse_constant=_finite, parse_float=_finite)
    except json.JSONDecodeError as error:
        details = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([details]) from None
    except UnicodeDecodeError as error:
        raise _unreadable(f"JSON in UTF-8, not {body[error.start : error.end]!r}") from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"JSON: {error}") from None
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in errors]) from None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise _unreadable(f"JSON with finite numbers, not {text[:20]}")
    return value


def _unreadable(bound: str) -> RequestValidationError:
    return RequestValidationError([{"type": "value_error", "loc": (), "ctx": {"error": bound}}])


def json_depth(text: bytes) -> int:
    """How deep lists and objects are nested; brackets within strings do not count.

    If the JSON is invalid, the result is at least the depth up to the first wrong character.
    """
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # remaining quotes delimit strings
    changes = _DEPTH_CHANGES[np.frombuffer(plain, np.uint8)]
    changes = changes[changes != 0]
    is_quote = changes == _QUOTE
    is_in_string = np.cumsum(is_quote, dtype=np.uint8) % 2 == 1  # wraps at 256, an even number
    changes[is_quote | is_in_string] = 0
    return int(np.cumsum(changes, dtype=np.int32).max(initial=0))


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, and then the messages of the given `receive`."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return pending.pop() if pending else await receive()

    return receive_next
