"""Answers as named events, of which `/v1/responses` and `/v1/messages` make theirs.

Charter: a whole answer is what its stream leaves: both are written by the same steps.
"""

from __future__ import annotations

import json
from typing import Any

from foretoken.serve.answers.events import Event
from foretoken.serve.answers.logprobs import traced
from foretoken.serve.answers.usage import Usage
from foretoken.serve.parsers.parts import ToolCall


class NamedEvents:
    """Events that are not sent yet, and what is said at the root of an answer beyond its API."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._trace: list[dict[str, Any]] | None = None
        self._is_cut = False  # a forced call, by the answer's end

    def _note(self, event: Event) -> None:
        if event.sample.trace is not None:
            self._trace = [*(self._trace or ()), *traced(event.sample.trace)]
        calls = [part for part in event.parts if isinstance(part, ToolCall)]
        self._is_cut = self._is_cut or not all(call.is_whole for call in calls)

    def _extras(self, usage: Usage) -> dict[str, Any]:
        trace = {} if self._trace is None else {"trace": self._trace}
        return {"metrics": usage.speculation(), **trace}

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, **fields})

    def _written(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(named_event(event["type"], event) for event in events)


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """A server-sent event with a name."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n".encode()
