"""Answers of `/v1/responses`: items, and the events of a stream that builds them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from foretoken.serve.answers.events import Event
from foretoken.serve.answers.named import NamedEvents
from foretoken.serve.answers.usage import Usage
from foretoken.serve.errors import Refusal
from foretoken.serve.parsers.parts import Content, Part, ToolCall
from foretoken.serve.pieces import pieces
from foretoken.serve.protocol.common import Fields
from foretoken.serve.protocol.responses import ResponsesBody
from foretoken.serve.requests import Asked


class ResponsesWriter(NamedEvents):
    """One answer, whole or as events."""

    def __init__(self, asked: Asked, body: ResponsesBody, model: str) -> None:
        super().__init__()
        self._number = 0
        self._item: dict[str, Any] = {}  # that is open; {} if none is
        self._reason: str | None = None
        self._stop: str | int | None = None
        params = asked.params
        self._response: dict[str, Any] = {
            "id": asked.answer_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": _plain(body.text) or {"format": {"type": "text"}},
            "tool_choice": _plain(body.tool_choice) or "auto",
            "tools": [_plain(tool) for tool in body.tools or ()],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def body(self, choices: dict[int, list[Event]], usage: Usage) -> Iterator[bytes]:
        """The whole answer."""
        for event in choices[0]:
            self._take(event)
        self._events = []  # which a stream would tell
        self._end(usage)
        yield from pieces(self._response)

    def write(self, events: Sequence[Event], usage: Usage) -> Iterator[bytes]:
        """Events of what is new."""
        if not self._number:
            for name in ("created", "in_progress"):
                self._tell(f"response.{name}", response={**self._response, "output": []})
        for event in events:
            self._take(event)
        return self._written()

    def last(self, usage: Usage) -> Iterator[bytes]:
        """What closes the answer."""
        self._end(usage)
        self._tell(f"response.{self._response['status']}", response=self._response)
        return self._written()

    def failed(self, refused: Refusal) -> Iterator[bytes]:
        """An error after the beginning."""
        told = {"code": refused.code, "message": refused.message, "param": refused.param}
        self._tell("error", **told)
        return self._written()

    def _take(self, event: Event) -> None:
        self._note(event)
        for part in event.parts:
            self._say(part)
        if event.sample.finish_reason is not None:
            self._reason, self._stop = event.sample.finish_reason, event.sample.stop_reason

    def _end(self, usage: Usage) -> None:
        """Close what is open, and count."""
        status = "completed" if self._reason == "stop" and not self._is_cut else "incomplete"
        self._close(status)
        counts = usage.body()
        self._response |= {
            "status": status,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
                "total_tokens": counts["total_tokens"],
            },
            **self._extras(usage),
        }
        if status == "incomplete":
            why = "max_output_tokens" if self._reason == "length" else self._reason
            cut = {} if self._stop is None else {"cut_by": self._stop}
            self._response["incomplete_details"] = {"reason": why, **cut}

    def _say(self, part: Part) -> None:
        if isinstance(part, ToolCall):
            self._close()
            made = {"call_id": part.id, "name": part.name, "arguments": ""}
            self._begin("function_call", "fc_", made)
            self._continue("response.function_call_arguments", part.arguments)
            if part.is_whole:  # else the end of the answer closes it, as incomplete
                self._close()
            return
        kind = "message" if isinstance(part, Content) else "reasoning"
        if self._item.get("type") != kind:
            self._close()
            if kind == "message":
                self._begin(kind, "msg_", {"role": "assistant", "content": []})
                text: dict[str, Any] = {"type": "output_text", "annotations": [], "logprobs": []}
            else:
                self._begin(kind, "rs_", {"summary": [], "content": []})
                text = {"type": "reasoning_text"}
            self._tell_part("response.content_part.added", part={**text, "text": ""})
            self._item["content"].append(text | {"text": ""})
        self._continue(f"response.{self._item['content'][0]['type']}", part.text)

    def _begin(self, kind: str, prefix: str, fields: dict[str, Any]) -> None:
        made = {"id": prefix + uuid.uuid4().hex, "type": kind, "status": "in_progress"}
        self._item = {**made, **fields}
        shown = {key: [] if key == "content" else value for key, value in self._item.items()}
        self._tell("response.output_item.added", output_index=self._index, item=shown)

    def _continue(self, name: str, text: str) -> None:
        """More of the text or of the arguments that are open."""
        if self._item["type"] == "function_call":
            self._item["arguments"] += text
            self._tell(f"{name}.delta", item_id=self._item["id"], output_index=self._index,
                       delta=text)  # fmt: skip
            return
        self._item["content"][0]["text"] += text
        self._tell_part(f"{name}.delta", delta=text, **self._logprobs)

    def _close(self, status: str = "completed") -> None:
        """Finish what is open, if anything is."""
        if not self._item:
            return
        item, self._item["status"] = self._item, status
        if item["type"] == "function_call":
            self._tell("response.function_call_arguments.done", item_id=item["id"],
                       output_index=self._index, name=item["name"],
                       arguments=item["arguments"])  # fmt: skip
        else:
            (text,) = item["content"]
            self._tell_part(f"response.{text['type']}.done", text=text["text"], **self._logprobs)
            self._tell_part("response.content_part.done", part=text)
        self._tell("response.output_item.done", output_index=self._index, item=item)
        self._response["output"].append(item)
        self._item = {}

    @property
    def _index(self) -> int:
        return len(self._response["output"])

    @property
    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._item["type"] == "message" else {}

    def _tell_part(self, kind: str, **fields: Any) -> None:
        place = {"item_id": self._item["id"], "output_index": self._index, "content_index": 0}
        self._tell(kind, **place, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        super()._tell(kind, sequence_number=self._number, **fields)
        self._number += 1


def _plain(value: Any) -> Any:
    """A part of the request as its answer repeats it."""
    is_model = isinstance(value, Fields)
    return value.model_dump(by_alias=True, exclude_none=True) if is_model else value
