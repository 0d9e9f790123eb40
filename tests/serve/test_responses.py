"""`/v1/responses`: a chat by other names, and OpenAI's events in their order."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from foretoken import SamplingParams
from foretoken.outputs import CompletionDelta
from foretoken.serve.answers.events import Event, Usage
from foretoken.serve.answers.named import MessagesWriter, ResponsesWriter
from foretoken.serve.parsers.message import Content, Reasoning, ToolCall
from foretoken.serve.protocol.responses import ResponsesBody
from foretoken.serve.requests import GenerationRequest
from tests.serve.running import post
from tests.serve.test_tools import AREA, Area

PATH = "/v1/responses"
TEXT = "def area(width, height):"
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 30}
TOOL: Any = {"type": "function", "name": "area", "parameters": AREA, "strict": True}
FORCED: dict[str, Any] = {
    "tools": [TOOL], "tool_choice": {"type": "function", "name": "area"}, "max_output_tokens": 120,
    "extra_body": {"seed": 3},
}  # fmt: skip


def test_the_text_is_that_of_a_chat(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": TEXT}]
    chat = post(http, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=30)
    answer = post(http, PATH, input=TEXT, instructions="x", store=False, **GREEDY)
    (item,) = answer["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (answer["status"], item["status"]) == ("incomplete", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == 30
    assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] == 5


def test_events_come_in_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="tiny", input=TEXT, stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    last: Any = events[-1]
    assert last.response.output_text == "".join(deltas)
    assert last.response.usage.output_tokens == 30
    first: Any = events[0]
    assert (first.response.status, first.response.output) == ("in_progress", [])


def test_calls_and_their_results(client: openai.OpenAI, http: httpx.Client) -> None:
    done = client.responses.create(model="tiny", input=TEXT, **FORCED)
    (call,) = done.output
    assert call.type == "function_call"
    assert done.status == "completed"
    events = list(client.responses.create(model="tiny", input=TEXT, stream=True, **FORCED))
    assert [e.type.removeprefix("response.") for e in events[2:]] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    ended: Any = events[-1]
    assert ended.response.output[0].arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    items: Any = [{"role": "user", "content": TEXT}, *(item.model_dump() for item in done.output)]
    again = client.responses.create(model="tiny", input=[*items, result], **GREEDY)
    echoed = [*items, result, *(item.model_dump() for item in again.output), *items[:1]]
    longer = client.responses.create(model="tiny", input=echoed, **GREEDY)
    assert again.usage
    assert longer.usage
    assert longer.usage.input_tokens >= again.usage.input_tokens + 30


def test_reasoning_is_an_item(http: httpx.Client, client: openai.OpenAI) -> None:
    opened = {"chat_template_kwargs": {"opening": "<think>"}}
    answer = post(http, PATH, input=TEXT, **GREEDY, **opened)
    (item,) = answer["output"]
    assert item["type"] == "reasoning"
    stream: Any = client.responses.create(
        model="tiny", input=TEXT, stream=True, extra_body=opened, **GREEDY
    )
    said = "".join(e.delta for e in stream if e.type == "response.reasoning_text.delta")
    assert said == item["content"][0]["text"]
    assert post(http, PATH, input=[item, {"role": "assistant", "content": "x"}], **GREEDY)["output"]


def test_structured_output(client: openai.OpenAI) -> None:
    done = client.responses.parse(
        model="tiny", input=TEXT, text_format=Area, max_output_tokens=150, extra_body={"seed": 4}
    )
    assert isinstance(done.output_parsed, Area)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
        ({"max_output_tokens": 4000}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
         "text.format.schema"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(http: httpx.Client, given: dict[str, Any], param: str) -> None:
    answer = http.post(PATH, json={"input": "a", **given})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_all_of_an_answer_in_one_delta_has_the_same_events() -> None:
    """Events of the beginning do not contain later parts."""
    body = ResponsesBody(input="a", chat_template_kwargs={})
    writer = ResponsesWriter(GenerationRequest(SamplingParams(), messages=()), body, "m")
    usage = Usage(GenerationRequest(SamplingParams()))
    parts = (Reasoning("r"), ToolCall(0, "c", "f", "{}"), Content("x"), Content("y"))
    sample = CompletionDelta(0, [1], "", "stop")
    pieces = [*writer.write([Event(0, parts, sample)], usage), *writer.end(usage)]
    text = b"".join(pieces).decode()
    data = [json.loads(event.split("\ndata: ")[1]) for event in text.split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in data] == [*range(len(data))]
    assert [e["response"]["output"] for e in data[:2]] == [[], []]
    added = [e["item"] for e in data if e["type"] == "response.output_item.added"]
    assert [(item["type"], item.get("content")) for item in added] == [
        ("reasoning", []), ("function_call", None), ("message", []),
    ]  # fmt: skip
    assert added[1]["arguments"] == ""
    done = [e["item"] for e in data if e["type"] == "response.output_item.done"]
    assert done == data[-1]["response"]["output"]
    assert done[2]["content"][0]["text"] == "xy"
    assert data[-1]["type"] == "response.completed"


def test_an_answer_that_the_server_cut_says_so() -> None:
    """In Responses and Messages: at the server's end, before a first token, and by a deadline."""
    asked, body = GenerationRequest(SamplingParams()), ResponsesBody(input="a")
    for text, why in (("", "shutdown"), ("so", "timeout")):
        parts = (Content(text),) if text else ()
        event = Event(0, parts, CompletionDelta(0, [], text, "length", why))
        choices, usage = {0: [event]}, Usage(asked)
        written = ResponsesWriter(asked, body, "tiny").body(choices, usage)
        answer = json.loads(b"".join(written))
        assert answer["incomplete_details"] == {"reason": "max_output_tokens", "cut_by": why}
        assert len(answer["output"]) == len(parts)
        message = json.loads(b"".join(MessagesWriter(asked, "tiny").body(choices, usage)))
        assert (message["stop_reason"], message["cut_by"]) == ("max_tokens", why)
        writer = MessagesWriter(asked, "tiny")
        streamed = [*writer.write([event], usage), *writer.end(usage)]
        assert f'"cut_by":"{why}"'.encode() in b"".join(streamed)
