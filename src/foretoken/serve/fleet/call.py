"""The messages between a front and a replica, and the fields of a body that a front reads.

Only the replica judges a request: a body that cannot be read here is sent on, and refused there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import from_json
from starlette.types import Scope

from foretoken.serve.fleet.prefixes import MAX_CHARS

_FIELDS_BEFORE_PROMPT = ("cache_salt", "tools", "instructions", "system")
_PROMPT_FIELDS = ("prompt", "messages", "input")
MESSAGE_BYTES = 2**20
"""The longest message. Ray accepts 4 MiB by gRPC, but a long message would block a front."""
_SECRET_HEADERS = {b"authorization", b"x-api-key", b"cookie", b"proxy-authorization"}
_SCOPE_KEYS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string")


@dataclass(frozen=True, slots=True)
class Call:
    """A request over HTTP, for a replica.

    Attributes:
        prompt: the beginning of the prompt, by which routers choose a replica; empty: any replica
            may answer. Ray Serve's own prefix router reads an attribute of this name.
        name: the request's name, in logs and for its client.
        scope: the part of ASGI's scope that describes the request, not its connection.
    """

    prompt: str
    name: str
    scope: dict[str, Any]
    body: bytes

    @classmethod
    def from_scope(cls, scope: Scope, body: bytes, prompt: str, name: str) -> Call:
        """The call for a request with this ASGI scope, without headers that hold secrets."""
        sent_scope = {key: scope[key] for key in _SCOPE_KEYS if key in scope}
        headers = [each for each in scope["headers"] if each[0].lower() not in _SECRET_HEADERS]
        sent_scope |= {"root_path": scope.get("root_path", ""), "headers": headers}
        return cls(prompt, name, sent_scope, body)


class Started(NamedTuple):
    """The first message for a call: this replica has begun with it."""

    replica: str


class Head(NamedTuple):
    """Status and headers of an answer; its body follows as pieces of bytes."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Done(NamedTuple):
    """The last message for a call: its answer is complete. The fields are for the log."""

    fields: dict[str, Any]


class Routing(NamedTuple):
    """The fields by which a request is routed: the model's name, and the prompt's beginning."""

    model: str | None
    prompt: str


def read_routing(body: bytes) -> Routing:
    """The routing fields of a body; None and "" if the body is no JSON object."""
    try:
        fields = _parse(body)
    except (ValueError, RecursionError):
        return Routing(None, "")
    if not isinstance(fields, dict):
        return Routing(None, "")
    model = fields.get("model")
    parts, length = list[str](), 0
    for part in _texts([fields.get(name) for name in (*_FIELDS_BEFORE_PROMPT, *_PROMPT_FIELDS)]):
        parts.append(part)
        length += len(part) + 1
        if length > MAX_CHARS:
            break
    return Routing(model if isinstance(model, str) else None, "\n".join(parts)[:MAX_CHARS])


def _parse(body: bytes) -> Any:
    """Parse JSON as replicas do; only Python's parser accepts half a surrogate pair."""
    try:
        return from_json(body)
    except ValueError:
        return json.loads(body)


def _texts(value: Any) -> Iterator[str]:
    """All texts and numbers within a value, in order, without the keys of objects."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, list):
            stack.extend(reversed(item))
        elif isinstance(item, str):
            yield item
        elif isinstance(item, (int, float)):
            yield str(item)
