"""What the tokens of an answer may say, whatever API it is written for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from foretoken.outputs import CompletionDelta

REASONING_PARSERS = ("think", "qwen3", "deepseek_r1")
"""Names of the one format of reasoning that is read: `<think>` and `</think>`."""


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning before it."""

    text: str


class ToolCall(NamedTuple):
    """A call.

    Attributes:
        number: of the calls of its choice, from 0.
        arguments: the JSON text of an object.
        is_whole: False: the answer's end cut it, and this is the beginning of that text.
    """

    number: int
    id: str
    name: str
    arguments: str
    is_whole: bool = True


def call_fields(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as messages of a chat have it, in requests and in answers."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


Part = Content | Reasoning | ToolCall


class Plain:
    """A `MessageParser` for which all text is the answer's."""

    num_reasoning = 0

    def feed(self, sample: CompletionDelta) -> Sequence[Part]:
        return (Content(sample.text),) if sample.text else ()


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same with texts of one kind that follow each other as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        else:
            found.append(part)
    return found
