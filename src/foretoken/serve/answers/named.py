"""Answers as named events, of which `/v1/responses` and `/v1/messages` make theirs.

Charter: a whole answer is what its stream leaves: both are written by the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foretoken.outputs import TokenTrace
from foretoken.serve.answers.events import Event
from foretoken.serve.answers.logprobs import traced
from foretoken.serve.answers.usage import Usage
from foretoken.serve.parsers.parts import ToolCall
from foretoken.serve.pieces import Rows, pieces


class NamedEvents:
    """Events that are not sent yet, and what is said at the root of an answer beyond its API."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._trace: list[TokenTrace] | None = None
        self._is_cut = False  # a forced call, by the answer's end

    def _note(self, event: Event) -> None:
        if event.sample.trace is not None:
            self._trace = self._trace or []
            self._trace += event.sample.trace
        calls = [part for part in event.parts if isinstance(part, ToolCall)]
        self._is_cut = self._is_cut or not all(call.is_whole for call in calls)

    def _extras(self, usage: Usage) -> dict[str, Any]:
        trace = {} if self._trace is None else {"trace": Rows(traced(self._trace))}
        return {"metrics": usage.speculation(), **trace}

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, **fields})

    def _written(self) -> Iterator[bytes]:
        events, self._events = self._events, []
        for event in events:
            yield from named_event(event["type"], event)


def named_event(name: str, data: dict[str, Any]) -> Iterator[bytes]:
    """A server-sent event with a name."""
    yield f"event: {name}\ndata: ".encode()
    yield from pieces(data)
    yield b"\n\n"
