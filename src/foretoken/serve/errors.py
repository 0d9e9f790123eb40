"""Every error as OpenAI's body and a status.

Charter: what a client may do about it decides the status: 4xx is theirs to mend, 429 and 503 pass,
500 is a bug. A message names a field as the client wrote it.
"""

from __future__ import annotations

import difflib
import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

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
from foretoken.serve.protocol.common import FIELD_NAMES

_log = logging.getLogger(__name__)
_WRITTEN = {
    "num_speculative_tokens": "speculative.num_speculative_tokens",
    "drafter": "speculative.drafter",
    "rejection_sample_method": "speculative.rule",
    "trace": "speculative.trace",
}
_PASSING = (EngineBrokenError, EngineMemoryError, StepError, UsageError)
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_RETRY_AFTER = {"Retry-After": "1"}


class Refusal(NamedTuple):
    """An error as the client gets it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}

    @property
    def anthropic(self) -> dict[str, Any]:
        """Anthropic's shape."""
        kind = _ANTHROPIC.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> Response:
        """The same as an answer, in the shape that clients of this path read."""
        headers = _RETRY_AFTER if self.status in (429, 503) else None
        body = self.anthropic if path.startswith("/v1/messages") else self.body
        # ASCII: what is quoted may be no Unicode.
        text = json.dumps(body, separators=(",", ":"))
        return Response(text, self.status, headers, "application/json")


class UnavailableError(ForetokenError):
    """The server cannot answer now: it ends, or has too much to do."""


class UnknownModelError(RequestError):
    """A model of another name than those that are served."""


def refusal(error: BaseException) -> Refusal:
    """What a client is told of an error; one that is a bug of ours is logged here."""
    if isinstance(error, OverloadedError):
        return Refusal(429, str(error), "rate_limit_error", code="overloaded")
    if isinstance(error, UnknownModelError):
        return Refusal(404, str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, CapacityError) else None
        error = as_written(error)
        return Refusal(400, str(error), "invalid_request_error", error.field, code)
    if isinstance(error, UnavailableError):
        return Refusal(503, str(error), "server_error", code="unavailable")
    if isinstance(error, _PASSING):
        _log.error("not served: %s", error)
        return Refusal(503, str(error), "server_error", code="unavailable")
    # What was raised may quote a prompt: by default a log says where, and not what.
    where = traceback.extract_tb(error.__traceback__)[-1:]
    places = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in where)
    _log.error("a request failed by %s in %s", type(error).__name__, places)
    _log.debug("what it failed by", exc_info=error)
    told = str(error) if isinstance(error, ForetokenError) else "This is a bug in Foretoken."
    return Refusal(500, told, "server_error", code="internal_error")


def as_written(error: RequestError, names: Mapping[str, str] = _WRITTEN) -> RequestError:
    """The same, about the field that the client wrote."""
    name = names.get(error.field, error.field)
    return type(error)(name, error.value, error.bound, error.remedy)


def install(app: FastAPI) -> None:
    """Have the application answer with these bodies; `limits.py` does for what is a bug."""

    async def invalid(request: Request, error: Exception) -> Response:
        listed = error.errors() if isinstance(error, RequestValidationError) else []
        return _invalid(listed).response(request.url.path)

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        told = f"{request.method} {request.url.path}: {getattr(error, 'detail', '')}"
        answer = Refusal(status, told, "invalid_request_error").response(request.url.path)
        answer.headers.update(getattr(error, "headers", None) or {})
        return answer

    async def raised(request: Request, error: Exception) -> Response:
        return refusal(error).response(request.url.path)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(ForetokenError, raised)


def _invalid(errors: Sequence[dict[str, Any]]) -> Refusal:
    """A body that is not of the schema: of several fields the first."""
    first = errors[0]
    kind, (root, *_) = first["type"], first["loc"][1:] or ("",)
    if not root and kind == "value_error":
        told = f"The body must be {_bound(first['msg'])}."
        return Refusal(400, told, "invalid_request_error")
    if not isinstance(root, str) or not root or kind == "json_invalid":
        told = "The body must be a JSON object, sent as `Content-Type: application/json`."
        return Refusal(400, told, "invalid_request_error")
    name = _place(first["loc"], is_unknown=kind == "extra_forbidden")
    if kind == "missing":
        return Refusal(400, f"`{name}` is missing.", "invalid_request_error", name)
    # One error for each type that a field may have.
    same = [e for e in errors if e["loc"][1] == root and _place(e["loc"]) == name]
    bound, remedy = ", or ".join(dict.fromkeys(_bound(e["msg"]) for e in same)), ""
    if kind == "none_required":
        bound, remedy = "left out, or null", "It is not implemented here."
    if kind == "extra_forbidden":
        bound = "left out: there is no such field"
        near = difflib.get_close_matches(name.rpartition(".")[2], FIELD_NAMES, n=1, cutoff=0.6)
        remedy = f"Did you mean `{near[0]}`?" if near else ""
    told = str(RequestError(name, first["input"], bound, remedy))
    return Refusal(400, told, "invalid_request_error", name)


def _bound(said: str) -> str:
    return said.removeprefix("Input should be ").removeprefix("Value error, ")


def _place(loc: Sequence[str | int], *, is_unknown: bool = False) -> str:
    """Names of fields on the way to an error, without those of a union's members."""
    *way, last = loc[1:]
    name = ""
    for part in way if is_unknown else [*way, last]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part in FIELD_NAMES:
            name += f".{part}" if name else part
        else:
            break
    return ".".join(filter(None, (name, str(last)))) if is_unknown else name
