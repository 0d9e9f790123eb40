"""Every error as a status and a body in OpenAI's or Anthropic's shape.

A client can change a request that got 4xx, and repeat one that got 429 or 503; 500 is our bug. A
message names fields as the client wrote them.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any, NamedTuple, get_args, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from foretoken.errors import (
    CapacityError,
    EngineBrokenError,
    EngineMemoryError,
    ForetokenError,
    OverloadedError,
    RequestError,
    StepError,
    UsageError,
)
from foretoken.serve.protocol.common import Fields

_log = logging.getLogger(__name__)
_BATCH_ERRORS = {
    EngineBrokenError: "The engine's device failed, so this server answers no more requests.",
    EngineMemoryError: "The engine ran out of memory in work for several requests.",
    StepError: "The engine failed in work for several requests.",
}
_UNAVAILABLE = (*_BATCH_ERRORS, UsageError)
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
    413: "request_too_large", 421: "invalid_request_error", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip
_RETRY_LATER = {"Retry-After": "1"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: _RETRY_LATER, 503: _RETRY_LATER}
_WHAT_IS_SERVED = (
    "This server generates text and does nothing else: no embeddings, scores, ranks or classes, no "
    "images or audio, no files. POST /v1/chat/completions, /v1/completions, /v1/responses or "
    "/v1/messages; GET /docs shows all paths."
)
_BOUNDS = {
    "int_type": "an integer", "float_type": "a number", "finite_number": "a finite number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "an object",
    "model_attributes_type": "an object", "model_type": "an object", "string_type": "a text",
    "string_unicode": "a text without lone surrogates",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "literal_error": "{expected}", "too_long": "of at most {max_length} members",
    "missing": "given", "extra_forbidden": "left out: there is no such field",
    "value_error": "{error}",
}  # fmt: skip
"""What a value must be, by pydantic's type of the error."""
request_id = ContextVar("request_id", default="")  # of the request that this task serves


def path_without_root(scope: Scope) -> str:
    """The path of a request without `--root-path`."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


class Refusal(NamedTuple):
    """An error as the client gets it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None

    @property
    def openai(self) -> dict[str, Any]:
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}

    @property
    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, scope: Scope | None = None) -> Response:
        """The error as a response; in Anthropic's shape for a request to `/v1/messages`."""
        is_anthropic = scope is not None and path_without_root(scope).startswith("/v1/messages")
        body = self.anthropic if is_anthropic else self.openai
        # ASCII, since a quoted value can be invalid Unicode.
        text = json.dumps(body, separators=(",", ":"))
        return Response(text, self.status, _HEADERS.get(self.status), "application/json")


def error_responses(body: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's `responses` for errors in the shape of the example `body`."""

    def schema(value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return {"type": "object", "properties": {k: schema(v) for k, v in value.items()}}
        return {"type": "string" if value is not None else ["string", "null"]}

    error = {"description": "An error", "content": {"application/json": {"schema": schema(body)}}}
    return {"4XX": error, "5XX": error}


class UnavailableError(ForetokenError):
    """The server cannot answer now: it ends, is too busy, or has no replica that answers."""


class UnknownModelError(RequestError):
    """The request names a model that is not served."""


def refusal(error: BaseException) -> Refusal:
    """The refusal that a client gets for an error; faults of the engine and bugs are logged."""
    if isinstance(error, OverloadedError):
        return Refusal(429, str(error), "rate_limit_error", code="overloaded")
    if isinstance(error, UnknownModelError):
        return Refusal(404, str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, CapacityError) else None
        return Refusal(400, str(error), "invalid_request_error", error.field, code)
    if isinstance(error, UnavailableError):
        return Refusal(503, str(error), "server_error", code="unavailable")
    if isinstance(error, _UNAVAILABLE):
        _log_error("not served", error)
        name = request_id.get() if isinstance(error, (*_BATCH_ERRORS,)) else None
        where = f" Look for request_id {name} there." if name else ""
        return Refusal(503, public_message(error) + where, "server_error", code="unavailable")
    _log_error("a request failed", error)
    message = str(error) if isinstance(error, ForetokenError) else "This is a bug in Foretoken."
    return Refusal(500, message, "server_error", code="internal_error")


def public_message(error: ForetokenError) -> str:
    """An error's message for clients; a general message if the error can quote other clients."""
    for kind, message in _BATCH_ERRORS.items():
        if isinstance(error, kind):
            return f"{message} The server's log says where."
    return str(error)


def _log_error(summary: str, error: BaseException) -> None:
    """Log where an error was raised; only `debug` logs the message, which can quote a prompt."""
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)[-1:]
    places = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    _log.error("%s: %s in %s", summary, type(cause).__name__, places or "another thread")
    _log.debug("details of the failure", exc_info=error)


@contextmanager
def client_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Give the field of a `RequestError` its name in the body; `names`: {our name: that name}."""
    try:
        yield
    except RequestError as error:
        for our_name in sorted(names, key=len, reverse=True):
            if error.field == our_name or error.field.startswith((f"{our_name}.", f"{our_name}[")):
                client_name = names[our_name] + error.field[len(our_name) :]
                raise type(error)(client_name, error.value, error.bound, error.remedy) from None
        raise


def install(app: FastAPI) -> None:
    """Have the application answer invalid bodies, `HTTPException` and `ForetokenError` by a
    `Refusal`. `BodyLimits` answers all other exceptions."""

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(request: Request, error: RequestValidationError) -> Response:
        return _invalid(request, error.errors()).response(request.scope)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = path_without_root(request.scope)
        message, code = f"{request.method} {path}: {error.detail}", None
        if error.status_code == 404:
            message, code = f"{request.method} {path} is not here. {_WHAT_IS_SERVED}", "unknown_url"
        answer = Refusal(error.status_code, message, "invalid_request_error", code=code)
        response = answer.response(request.scope)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ForetokenError)
    async def on_our_error(request: Request, error: ForetokenError) -> Response:
        return refusal(error).response(request.scope)


def _invalid(request: Request, errors: Sequence[dict[str, Any]]) -> Refusal:
    """The refusal of a body that is no JSON object, or does not fit the schema."""
    first_error = errors[0]
    cause = first_error.get("ctx", {}).get("error")
    has_field = len(first_error["loc"]) > 1 or isinstance(cause, RequestError)
    if first_error["type"] != "json_invalid" and has_field:
        kind = get_type_hints(request.scope["endpoint"])["body"]
        return refusal(field_error(kind, [{**e, "loc": e["loc"][1:]} for e in errors]))
    bound = "a JSON object, sent as `Content-Type: application/json`"
    if first_error["type"] == "value_error":
        bound = str(first_error["ctx"]["error"])
    elif first_error["type"] == "json_invalid":
        bound = f"JSON: {first_error['ctx']['error']}, at character {first_error['loc'][1]}"
    return Refusal(400, f"The body must be {bound}.", "invalid_request_error")


def field_error(kind: type[Fields], errors: Sequence[Any], place: str = "") -> RequestError:
    """The error of the first wrong field; for a union, of the member that the value fits best.

    Args:
        kind: the type that the value should have.
        errors: errors of a `ValidationError`; each `loc` begins at an object of type `kind`.
        place: name of this object in the body; empty: it is the body itself.
    """
    alternatives = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    # Prefer the error of a wrong `type` to errors about fields that another type needs.
    first_error = max(alternatives, key=lambda e: (len(e["loc"]), e["type"] == "literal_error"))
    name, fields = _field_at(kind, first_error["loc"], place)
    cause = first_error.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):  # for a field of the table `foreign`
        path = f"{name}.{cause.field}" if name else cause.field
        return RequestError(path, cause.value, cause.bound, cause.remedy)
    if first_error["type"] == "extra_forbidden":
        key = str(first_error["loc"][-1])
        name = f"{name}.{key}" if name else key
        close_names = get_close_matches(key, fields, n=1, cutoff=0.6)
        remedy = f"Did you mean `{close_names[0]}`?" if close_names else ""
    else:
        alternatives = [e for e in alternatives if _field_at(kind, e["loc"], place)[0] == name]
        remedy = ""
    bounds = [
        _BOUNDS.get(e["type"], "{msg}").format_map({**e, **e.get("ctx", {})})
        for e in (alternatives if name else [first_error])
    ]
    value = None if first_error["type"] == "missing" else first_error["input"]
    return RequestError(name, value, ", or ".join(dict.fromkeys(bounds)), remedy)


def _field_at(
    kind: type[Fields], loc: Sequence[str | int], name: str
) -> tuple[str, dict[str, Any]]:
    """The client's name of the field at a pydantic `loc`, and this field's own fields, if any.

    `name` and `kind` are the name and the type of the object at which `loc` begins. Parts of `loc`
    that are a union's members or a map's keys are no part of the client's name.
    """
    fields = dict(_fields(kind))
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part in fields:
            name += f".{part}" if name else part
            fields = dict(_fields(fields[part]))
    return name, fields


def _fields(kind: Any) -> Iterator[tuple[str, Any]]:
    """Names and types of the fields of a type; a union has the fields of all members."""
    if isinstance(kind, type) and issubclass(kind, Fields):
        for name, field in kind.model_fields.items():
            yield field.alias or name, field.annotation
    for part in get_args(kind):
        yield from _fields(part)
