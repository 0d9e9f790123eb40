"""Answers of `/v1/messages`: blocks, and the events of a stream that builds them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from foretoken.serve.answers.events import Event
from foretoken.serve.answers.named import NamedEvents, named_event
from foretoken.serve.answers.usage import Usage
from foretoken.serve.errors import Refusal
from foretoken.serve.parsers.parts import Content, Part, Reasoning, ToolCall
from foretoken.serve.pieces import pieces
from foretoken.serve.requests import Asked

_ENDS = {"length": "max_tokens", "stop": "end_turn"}


class MessagesWriter(NamedEvents):
    """One answer, whole or as events."""

    def __init__(self, asked: Asked, model: str) -> None:
        super().__init__()
        self._has_begun = self._is_open = False
        self._shows_reasoning = asked.include_reasoning
        self._message: dict[str, Any] = {
            "id": asked.answer_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }

    def body(self, choices: dict[int, list[Event]], usage: Usage) -> Iterator[bytes]:
        """The whole answer."""
        for event in choices[0]:
            self._take(event)
        self._end(usage)
        yield from pieces(self._message | self._extras(usage))

    def write(self, events: Sequence[Event], usage: Usage) -> Iterator[bytes]:
        """Events of what is new."""
        if not self._has_begun:
            self._has_begun = True
            began = self._message | {"content": [], "usage": _usage(usage)}
            self._tell("message_start", message=began)
        for event in events:
            self._take(event)
        return self._written()

    def last(self, usage: Usage) -> Iterator[bytes]:
        """What closes the answer."""
        self._end(usage)
        names = {"stop_reason", "stop_sequence", "cut_by"} & self._message.keys()
        ended = {name: self._message[name] for name in sorted(names)}
        self._tell("message_delta", delta=ended, usage=self._message["usage"],
                   **self._extras(usage))  # fmt: skip
        self._tell("message_stop")
        return self._written()

    def failed(self, refused: Refusal) -> Iterator[bytes]:
        """An error after the beginning."""
        return named_event("error", refused.anthropic)

    def _take(self, event: Event) -> None:
        self._note(event)
        for part in event.parts:
            self._say(part)
        sample = event.sample
        if sample.finish_reason is not None:
            by_text = isinstance(sample.stop_reason, str) and sample.finish_reason == "stop"
            has_calls = any(block["type"] == "tool_use" for block in self._blocks)
            called = has_calls and not self._is_cut
            reason = _ENDS.get(sample.finish_reason, sample.finish_reason)
            if sample.finish_reason == "stop":
                reason = "stop_sequence" if by_text else "tool_use" if called else reason
            self._message["stop_reason"] = reason
            self._message["stop_sequence"] = sample.stop_reason if by_text else None
            if sample.finish_reason == "length" and sample.stop_reason is not None:
                self._message["cut_by"] = sample.stop_reason

    @property
    def _blocks(self) -> list[dict[str, Any]]:
        return self._message["content"]  # type: ignore[no-any-return]

    def _say(self, part: Part) -> None:
        if isinstance(part, Reasoning) and not self._shows_reasoning:
            return
        if isinstance(part, ToolCall):
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            self._begin(block)
            self._delta("input_json_delta", "partial_json", part.arguments)
            self._close()
            block["input"] = _object(part)
            return
        kind = "text" if isinstance(part, Content) else "thinking"
        if not self._is_open or self._blocks[-1]["type"] != kind:
            signed = {} if kind == "text" else {"signature": ""}
            self._begin({"type": kind, kind: "", **signed})
        self._blocks[-1][kind] += part.text
        self._delta(f"{kind}_delta", kind, part.text)

    def _begin(self, block: dict[str, Any]) -> None:
        self._close()
        self._blocks.append(block)
        self._is_open = True
        self._tell("content_block_start", index=len(self._blocks) - 1, content_block={**block})

    def _delta(self, kind: str, name: str, text: str) -> None:
        index = len(self._blocks) - 1
        self._tell("content_block_delta", index=index, delta={"type": kind, name: text})

    def _close(self) -> None:
        if self._is_open:
            self._tell("content_block_stop", index=len(self._blocks) - 1)
            self._is_open = False

    def _end(self, usage: Usage) -> None:
        self._close()
        self._message["usage"] = _usage(usage)


def _object(call: ToolCall) -> dict[str, Any]:
    """The arguments; what was cut is what Anthropic's client makes of it in a stream."""
    text = call.arguments
    if not call.is_whole:
        try:
            text = json.dumps(from_json(text or "{}", allow_partial=True))
        except ValueError:  # half a character
            text = "{}"
    found: dict[str, Any] = json.loads(text, parse_float=_finite, parse_constant=_finite)
    return found


def _finite(text: str) -> float:
    """A number as a float that JSON can hold: 1e999 is the largest there is."""
    most = sys.float_info.max
    return max(-most, min(float(text), most))


def _usage(usage: Usage) -> dict[str, int]:
    counts = usage.body()
    return {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"]}
