"""Logs: lines of JSON, with one line for each request, without texts, keys and query strings."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.access import KEYLESS_PATHS
from foretoken.serve.answers.events import Usage
from foretoken.serve.errors import path_without_root, request_id
from foretoken.serve.protocol.common import REQUEST_ID

_log = logging.getLogger(__name__)
_ID = re.compile(REQUEST_ID)


class JsonLines(logging.Formatter):
    """A record as one line of JSON, with the name of the request during which it was logged."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if name := request_id.get():
            fields["request_id"] = name
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, separators=(",", ":"))


def configure_logging(level: str) -> None:
    """Have this process log to standard error; `level` is that of Foretoken's loggers."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("foretoken").setLevel(level.upper())


class RequestLog:
    """Names each request, by a valid `X-Request-Id` or at random, and logs how it ended.

    Requests that need no key, such as probes, are logged at level `debug`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_name = Headers(scope=scope).get("x-request-id", "")
        name = client_name if _ID.fullmatch(client_name) else uuid.uuid4().hex
        start, status, is_complete = time.perf_counter(), 0, False

        async def send_named(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            is_complete = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        token = request_id.set(name)
        try:
            await self._app(scope, receive, send_named)
        finally:
            fields: dict[str, Any] = {
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "seconds": round(time.perf_counter() - start, 4),
                "complete": is_complete and status != 499,
            }
            fields |= log_fields(scope.get("state", {}))
            level = logging.DEBUG if path_without_root(scope) in KEYLESS_PATHS else logging.INFO
            _log.log(level, "request", extra={"fields": fields})
            request_id.reset(token)


def log_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    """Fields for a request's line in the log; a front's `state` has the replica's fields."""
    fields: dict[str, Any] = {**state.get("log_fields", {})}
    if answer_id := state.get("answer_id"):
        fields["answer_id"] = answer_id
    usage: Usage | None = state.get("usage")
    if usage is not None:
        counts = usage.body()
        fields |= {name: counts[name] for name in ("prompt_tokens", "completion_tokens")}
    return fields
