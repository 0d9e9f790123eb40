"""A request on its way to a replica, and those of its fields that a front reads. No Ray, no torch.

Charter: the messages between a front and a replica. Only the replica judges a request: a body that
cannot be read here is sent on, and refused there with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import from_json
from starlette.types import Scope

from foretoken.serve.fleet.prefixes import MOST_CHARS

_FIELDS_BEFORE_PROMPT = ("cache_salt", "tools", "instructions", "system")
_PROMPT_FIELDS = ("prompt", "messages", "input")
MESSAGE_BYTES = 2**20
"""Bytes of one message. Ray takes 4 MiB by gRPC; between messages a front serves other requests."""
_SECRET_HEADERS = {b"authorization", b"x-api-key", b"cookie", b"proxy-authorization"}
"""Headers that are not sent on: the front has checked them, and no replica needs a secret."""
_SCOPE_KEYS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string")


@dataclass(frozen=True, slots=True)
class Call:
    """A request over HTTP, for a replica.

    Attributes:
        prompt: the beginning of its prompt, by which routers choose a replica; empty: any replica
            may answer. Ray Serve's own prefix router reads it by this name.
        name: the request's name, in logs and for its client.
        scope: the part of ASGI's scope that describes the request, not its connection.
        body: the whole body.
    """

    prompt: str
    name: str
    scope: dict[str, Any]
    body: bytes

    @classmethod
    def from_scope(cls, scope: Scope, body: bytes, prompt: str, name: str) -> Call:
        """The call for a request with this ASGI scope."""
        sent_scope = {key: scope[key] for key in _SCOPE_KEYS if key in scope}
        headers = [each for each in scope["headers"] if each[0].lower() not in _SECRET_HEADERS]
        sent_scope |= {"root_path": scope.get("root_path", ""), "headers": headers}
        return cls(prompt, name, sent_scope, body)


class Taken(NamedTuple):
    """A replica has begun with a call; this is its first message."""

    replica: str


class Head(NamedTuple):
    """Status and headers of an answer; pieces of its body follow, as bytes."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Done(NamedTuple):
    """An answer is complete; `fields` are for the log."""

    fields: dict[str, Any]


class Wanted(NamedTuple):
    """What a front reads of a body: the name of the wanted model, and the prompt's beginning."""

    model: str | None
    prompt: str


def read_wanted(body: bytes) -> Wanted:
    """The model's name and the prompt's beginning; None and "" if the body is no JSON object."""
    try:
        fields = _parse(body)
    except (ValueError, RecursionError):
        return Wanted(None, "")
    if not isinstance(fields, dict):
        return Wanted(None, "")
    model = fields.get("model")
    parts, length = list[str](), 0
    for part in _texts([fields.get(name) for name in (*_FIELDS_BEFORE_PROMPT, *_PROMPT_FIELDS)]):
        parts.append(part)
        length += len(part) + 1
        if length > MOST_CHARS:
            break
    return Wanted(model if isinstance(model, str) else None, "\n".join(parts)[:MOST_CHARS])


def _parse(body: bytes) -> Any:
    """Parse JSON as replicas do; only Python's parser accepts half a surrogate pair."""
    try:
        return from_json(body)
    except ValueError:
        return json.loads(body)


def _texts(value: Any) -> Iterator[str]:
    """All texts and numbers within a value, in order. Keys of objects are left out."""
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
