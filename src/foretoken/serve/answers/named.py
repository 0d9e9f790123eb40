"""Answers of `/v1/responses` and `/v1/messages`, which are streamed as events with names."""

from __future__ import annotations

import json
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from foretoken.outputs import CompletionDelta, TokenTrace
from foretoken.serve.answers.choices import trace_dicts
from foretoken.serve.answers.events import Event, Usage
from foretoken.serve.errors import Refusal
from foretoken.serve.parsers.message import Content, Part, Reasoning, ToolCall
from foretoken.serve.protocol.common import Fields
from foretoken.serve.protocol.responses import ResponsesBody
from foretoken.serve.requests import GenerationRequest
from foretoken.serve.sse import Choices, LazyList, pieces


class NamedEvents(ABC):
    """Builds an answer by events, so that the events of a stream add up to the whole answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer, self._has_begun = answer, False
        self._unsent_events: list[dict[str, Any]] = []
        self._trace: list[TokenTrace] | None = None
        self._is_cut = False  # the answer ended within a call
        self._last_sample: CompletionDelta | None = None  # with the reason why the model stopped

    def body(self, choices: Choices, usage: Usage) -> Iterator[bytes]:
        for event in choices[0]:
            self._add_event(event)
        self._unsent_events = []  # only a stream sends them
        self._finish(usage)
        yield from pieces(self._answer | self._extras(usage))

    def write(self, events: Sequence[Event], usage: Usage) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            self._start(usage)
        for event in events:
            self._add_event(event)
        return self._send_events()

    def _add_event(self, event: Event) -> None:
        if event.sample.trace is not None:
            self._trace = self._trace or []
            self._trace += event.sample.trace
        calls = [part for part in event.parts if isinstance(part, ToolCall)]
        self._is_cut = self._is_cut or not all(call.is_whole for call in calls)
        for part in event.parts:
            self._add_part(part)
        if event.sample.finish_reason is not None:
            self._last_sample = event.sample

    @abstractmethod
    def _start(self, usage: Usage) -> None: ...

    @abstractmethod
    def _add_part(self, part: Part) -> None: ...

    @abstractmethod
    def _finish(self, usage: Usage) -> None: ...

    def _extras(self, usage: Usage) -> dict[str, Any]:
        """The keys of the answer that the API itself does not have."""
        trace = {} if self._trace is None else {"trace": LazyList(trace_dicts(self._trace))}
        return {"metrics": usage.speculation(), **trace}

    def _emit(self, kind: str, **fields: Any) -> None:
        self._unsent_events.append({"type": kind, **fields})

    def _send_events(self) -> Iterator[bytes]:
        events, self._unsent_events = self._unsent_events, []
        for event in events:
            yield from named_event(event["type"], event)


def named_event(name: str, data: dict[str, Any]) -> Iterator[bytes]:
    """A server-sent event with a name."""
    yield f"event: {name}\ndata: ".encode()
    yield from pieces(data)
    yield b"\n\n"


def error_event(refused: Refusal, num_events: int) -> Iterator[bytes]:
    """The event that ends a failed stream of the Responses API, after `num_events` events."""
    fields = {"code": refused.code, "message": refused.message, "param": refused.param}
    return named_event("error", {"type": "error", "sequence_number": num_events, **fields})


class ResponsesWriter(NamedEvents):
    """Writes an answer of `/v1/responses`: items, and the events that build them."""

    def __init__(self, generation: GenerationRequest, body: ResponsesBody, model: str) -> None:
        self._num_events = 0
        self._item: dict[str, Any] = {}  # the item that is being written; {}: no item
        params = generation.params
        answer: dict[str, Any] = {
            "id": generation.answer_id("resp_"), "object": "response",
            "created_at": int(time.time()), "status": "in_progress", "background": False,
            "error": None, "incomplete_details": None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": {}, "model": model,
            "output": [], "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "store": False, "temperature": params.temperature,
            "text": _request_field(body.text) or {"format": {"type": "text"}},
            "tool_choice": _request_field(body.tool_choice) or "auto",
            "tools": [_request_field(tool) for tool in body.tools or ()],
            "top_p": params.top_p, "truncation": "disabled", "usage": None,
        }  # fmt: skip
        super().__init__(answer)

    def _start(self, usage: Usage) -> None:
        for name in ("created", "in_progress"):
            self._emit(f"response.{name}", response={**self._answer, "output": []})

    def end(self, usage: Usage) -> Iterator[bytes]:
        self._finish(usage)
        answer = self._answer | self._extras(usage)
        self._emit(f"response.{answer['status']}", response=answer)
        return self._send_events()

    def failure(self, refused: Refusal) -> Iterator[bytes]:
        yield from self._send_events()
        yield from error_event(refused, self._num_events)

    def _finish(self, usage: Usage) -> None:
        reason = self._last_sample and self._last_sample.finish_reason
        stop_reason = self._last_sample and self._last_sample.stop_reason
        status = "completed" if reason == "stop" and not self._is_cut else "incomplete"
        self._close(status)
        counts = usage.body()
        self._answer |= {
            "status": status,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
                "total_tokens": counts["total_tokens"],
            },
        }
        if status == "incomplete":
            reason = "max_output_tokens" if reason == "length" else reason
            cut_by = {} if stop_reason is None else {"cut_by": stop_reason}
            self._answer["incomplete_details"] = {"reason": reason, **cut_by}

    def _add_part(self, part: Part) -> None:
        """Add a call as a new item, and text to the open item of its kind or to a new item."""
        if isinstance(part, ToolCall):
            self._close()
            call_fields = {"call_id": part.id, "name": part.name, "arguments": ""}
            self._open("function_call", "fc_", call_fields)
            self._append("response.function_call_arguments", part.arguments)
            if part.is_whole:  # otherwise `_finish` closes it as incomplete
                self._close()
            return
        kind = "message" if isinstance(part, Content) else "reasoning"
        if self._item.get("type") != kind:
            self._close()
            if kind == "message":
                self._open(kind, "msg_", {"role": "assistant", "content": []})
                empty: dict[str, Any] = {"type": "output_text", "annotations": [], "logprobs": []}
            else:
                self._open(kind, "rs_", {"summary": [], "content": []})
                empty = {"type": "reasoning_text"}
            self._emit_item("response.content_part.added", part={**empty, "text": ""})
            self._item["content"].append(empty | {"text": ""})
        self._append(f"response.{self._item['content'][0]['type']}", part.text)

    def _open(self, kind: str, prefix: str, fields: dict[str, Any]) -> None:
        """Begin an item; the event has the item without content, which the next events bring."""
        head = {"id": prefix + uuid.uuid4().hex, "type": kind, "status": "in_progress"}
        self._item = {**head, **fields}
        sent_item = {key: [] if key == "content" else value for key, value in self._item.items()}
        self._emit("response.output_item.added", output_index=self._output_index, item=sent_item)

    def _append(self, name: str, text: str) -> None:
        """Append text to the open item, with an event `NAME.delta`."""
        if self._item["type"] == "function_call":
            self._item["arguments"] += text
        else:
            self._item["content"][0]["text"] += text
        self._emit_item(f"{name}.delta", delta=text, **self._logprobs)

    def _close(self, status: str = "completed") -> None:
        if not self._item:
            return
        item, self._item["status"] = self._item, status
        if item["type"] == "function_call":
            call_fields = {name: item[name] for name in ("name", "arguments")}
            self._emit_item("response.function_call_arguments.done", **call_fields)
        else:
            (part,) = item["content"]
            self._emit_item(f"response.{part['type']}.done", text=part["text"], **self._logprobs)
            self._emit_item("response.content_part.done", part=part)
        self._emit("response.output_item.done", output_index=self._output_index, item=item)
        self._answer["output"].append(item)
        self._item = {}

    @property
    def _output_index(self) -> int:
        return len(self._answer["output"])

    @property
    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._item["type"] == "message" else {}

    def _emit_item(self, kind: str, **fields: Any) -> None:
        place = {"item_id": self._item["id"], "output_index": self._output_index}
        if self._item["type"] != "function_call":
            place["content_index"] = 0
        self._emit(kind, **place, **fields)

    def _emit(self, kind: str, **fields: Any) -> None:
        super()._emit(kind, sequence_number=self._num_events, **fields)
        self._num_events += 1


def _request_field(value: Any) -> Any:
    """The value of a field of the request, as the answer repeats it."""
    is_model = isinstance(value, Fields)
    return value.model_dump(by_alias=True, exclude_none=True) if is_model else value


_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessagesWriter(NamedEvents):
    """Writes an answer of `/v1/messages`: blocks, and the events that build them."""

    def __init__(self, generation: GenerationRequest, model: str) -> None:
        self._is_open = False
        self._shows_reasoning = generation.include_reasoning
        answer: dict[str, Any] = {
            "id": generation.answer_id("msg_"), "type": "message", "role": "assistant",
            "model": model, "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }  # fmt: skip
        super().__init__(answer)

    def _start(self, usage: Usage) -> None:
        message = self._answer | {"content": [], "usage": _usage(usage)}
        self._emit("message_start", message=message)

    def end(self, usage: Usage) -> Iterator[bytes]:
        self._finish(usage)
        names = {"stop_reason", "stop_sequence", "cut_by"} & self._answer.keys()
        stop = {name: self._answer[name] for name in sorted(names)}
        extras = self._extras(usage)
        self._emit("message_delta", delta=stop, usage=self._answer["usage"], **extras)
        self._emit("message_stop")
        return self._send_events()

    def failure(self, refused: Refusal) -> Iterator[bytes]:
        return named_event("error", refused.anthropic)

    def _finish(self, usage: Usage) -> None:
        self._close()
        self._answer["usage"] = _usage(usage)
        if (sample := self._last_sample) is None:
            return
        reason = str(sample.finish_reason)
        is_stop_text = isinstance(sample.stop_reason, str) and reason == "stop"
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        if reason == "length" and sample.stop_reason is not None:
            self._answer["cut_by"] = sample.stop_reason
        if reason == "stop" and has_calls and not self._is_cut:
            reason = "tool_use"
        reason = "stop_sequence" if is_stop_text else _STOP_REASONS.get(reason, reason)
        self._answer["stop_reason"] = reason
        self._answer["stop_sequence"] = sample.stop_reason if is_stop_text else None

    @property
    def _blocks(self) -> list[dict[str, Any]]:
        return self._answer["content"]  # type: ignore[no-any-return]

    def _add_part(self, part: Part) -> None:
        """Add a call as a new block, and text to the open block of its kind or to a new block."""
        if isinstance(part, Reasoning) and not self._shows_reasoning:
            return
        if isinstance(part, ToolCall):
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            self._open(block)
            self._delta("input_json_delta", "partial_json", part.arguments)
            self._close()
            block["input"] = _parsed_arguments(part)
            return
        kind = "text" if isinstance(part, Content) else "thinking"
        if not self._is_open or self._blocks[-1]["type"] != kind:
            signature = {} if kind == "text" else {"signature": ""}
            self._open({"type": kind, kind: "", **signature})
        self._blocks[-1][kind] += part.text
        self._delta(f"{kind}_delta", kind, part.text)

    def _open(self, block: dict[str, Any]) -> None:
        self._close()
        self._blocks.append(block)
        self._is_open = True
        self._emit("content_block_start", index=len(self._blocks) - 1, content_block={**block})

    def _delta(self, kind: str, name: str, text: str) -> None:
        index = len(self._blocks) - 1
        self._emit("content_block_delta", index=index, delta={"type": kind, name: text})

    def _close(self) -> None:
        if self._is_open:
            self._emit("content_block_stop", index=len(self._blocks) - 1)
            self._is_open = False


def _parsed_arguments(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call; if the answer ended within them, they are completed to JSON."""
    text = call.arguments
    if not call.is_whole:
        try:
            text = json.dumps(from_json(text or "{}", allow_partial=True))
        except ValueError:  # the text ends within a character
            text = "{}"
    arguments: dict[str, Any] = json.loads(text, parse_float=_finite, parse_constant=_finite)
    return arguments


def _finite(text: str) -> float:
    # JSON cannot hold an infinity: 1e999 becomes the largest finite float.
    largest = sys.float_info.max
    return max(-largest, min(float(text), largest))


def _usage(usage: Usage) -> dict[str, int]:
    counts = usage.body()
    return {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"]}
