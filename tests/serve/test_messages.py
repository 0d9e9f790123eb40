"""`/v1/messages`: a chat by Anthropic's names, events and errors, read by Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema_rs
import pytest

from foretoken import AsyncEngine
from foretoken.serve.options import ServeOptions
from tests.serve.running import Running, fail_later, post, running
from tests.serve.test_tools import AREA
from tests.support.asynchronous import PATIENCE

PATH = "/v1/messages"
TEXT = "def area(width, height):"
MESSAGES: Any = [{"role": "user", "content": TEXT}]
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 30, "extra_body": {"temperature": 0}}
FORCED: Any = {
    "tools": [{"name": "area", "input_schema": AREA}],
    "tool_choice": {"type": "tool", "name": "area"}, "model": "tiny", "max_tokens": 120,
    "extra_body": {"seed": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        yield client


def test_the_text_is_that_of_a_chat(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "x\ny"}, *MESSAGES]
    chat = post(http, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=30)
    text = chat["choices"][0]["message"]["content"]
    system: Any = [
        {"type": "text", "text": t, "cache_control": {"type": "ephemeral"}} for t in "xy"
    ]
    done = claude.messages.create(messages=MESSAGES, system=system, **GREEDY)
    assert [block.type == "text" and block.text for block in done.content] == [text]
    assert (done.stop_reason, done.stop_sequence) == ("max_tokens", None)
    assert done.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert done.usage.output_tokens == 30
    with claude.messages.stream(messages=MESSAGES, system=system, **GREEDY) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage.output_tokens == 30
    stop = text[9:14]
    done = claude.messages.create(messages=MESSAGES, stop_sequences=[stop], system="x\ny", **GREEDY)
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", stop)


def test_a_schema_binds_the_text(http: httpx.Client) -> None:
    form = {"type": "json_schema", "schema": {**AREA, "additionalProperties": False}}
    body = {"messages": MESSAGES, "max_tokens": 120, "temperature": 0.8, "seed": 3}
    texts = []
    for given in ({"output_config": {"format": form}}, {"output_format": form}):
        (block,) = post(http, PATH, **body, **given)["content"]
        assert jsonschema_rs.is_valid(form["schema"], json.loads(block["text"]))
        texts.append(block["text"])
    assert len({*texts}) == 1
    other = {"type": "json_schema", "schema": {"type": "null"}}
    refused = post(http, PATH, **body, output_format=form, output_config={"format": other})
    assert "`output_format`" in refused["error"]["message"]
    refused = post(http, PATH, **body, output_format={"type": "json_schema", "schema": {"type": 1}})
    assert "`output_config.format.schema`" in refused["error"]["message"]


def test_events_come_in_order(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "stream": True}
    *events, rest = http.post(PATH, json=body).text.split("\n\n")
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    data = [json.loads(event.split("\ndata: ")[1]) for event in events]
    assert rest == ""
    assert [one["type"] for one in data] == names
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * (len(names) - 5),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert data[0]["message"]["content"] == []
    assert data[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_calls_and_their_results(claude: anthropic.Anthropic) -> None:
    done = claude.messages.create(messages=MESSAGES, **FORCED)
    asked = {name: FORCED[name] for name in ("model", "tools", "tool_choice")}
    counted = claude.messages.count_tokens(messages=MESSAGES, system="x", **asked)
    assert counted.input_tokens > done.usage.input_tokens > 50
    counted = claude.messages.count_tokens(messages=MESSAGES, **asked)
    assert counted.input_tokens == done.usage.input_tokens
    (block,) = done.content
    assert block.type == "tool_use"
    assert done.stop_reason == "tool_use"
    with claude.messages.stream(messages=MESSAGES, **FORCED) as stream:
        (same,) = stream.get_final_message().content
    assert same.type == "tool_use"
    assert same.input == block.input
    said: Any = [{"type": "text", "text": "See:"}, block.model_dump(exclude_none=True)]
    result: Any = {"type": "tool_result", "tool_use_id": block.id}
    results = [{**result, "content": "12"}, {**result, "content": [{"type": "text", "text": "3"}]}]
    turns: Any = [*MESSAGES, {"role": "assistant", "content": said}]
    for content in (results, [*results, {"type": "text", "text": "So?"}]):
        again = claude.messages.create(
            messages=[*turns, {"role": "user", "content": content}], **GREEDY
        )
        assert again.content


def test_a_call_that_is_cut(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    asked: Any = {**FORCED, "messages": MESSAGES, "max_tokens": 30}
    done = claude.messages.create(**asked)
    (block,) = done.content
    assert block.type == "tool_use"
    assert done.stop_reason == "max_tokens"
    with claude.messages.stream(**asked) as stream:
        (same,) = stream.get_final_message().content
    assert same.type == "tool_use"
    assert same.input == block.input
    tool = {"type": "function", "name": "area", "parameters": AREA}
    body = {"input": TEXT, "tools": [tool], "tool_choice": "required", "seed": 3}
    answer = post(http, "/v1/responses", **body, max_output_tokens=30)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = answer["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    assert item["arguments"].startswith("{")


def test_reasoning_is_a_block(claude: anthropic.Anthropic) -> None:
    body = {"temperature": 0, "chat_template_kwargs": {"opening": "<think>"}}
    asked: Any = {**GREEDY, "messages": MESSAGES, "extra_body": body}
    (block,) = claude.messages.create(**asked).content
    assert block.type == "thinking"
    with claude.messages.stream(**asked) as stream:
        (same,) = stream.get_final_message().content
    assert same.type == "thinking"
    assert same.thinking == block.thinking
    turns: Any = [*MESSAGES, {"role": "assistant", "content": [block.model_dump()]}]
    assert claude.messages.create(messages=turns, **GREEDY).content


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"max_tokens": None}, 400, "`max_tokens`"),
        ({"model": "x"}, 404, "`model`"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "`thinking.budget_tokens`"),
        ({"tool_choice": {"type": "any"}}, 400, "`tool_choice`"),
        ({"tool_choice": {"type": "tool"}}, 400, "`tool_choice.name`"),
        ({"stop_sequences": [""]}, 400, "`stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
         "`messages[0].content[0].type`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "`messages[0].role`"),
        ({"max_tokens": 4000}, 400, "`max_tokens`"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_shape(
    http: httpx.Client, given: dict[str, Any], status: int, said: str
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, **given}
    answer = http.post(PATH, json=body)
    if given.keys() <= {"model", "thinking", "tool_choice", "messages"}:
        counted = http.post(f"{PATH}/count_tokens", json={"messages": MESSAGES, **given})
        assert (counted.status_code, counted.json()) == (status, answer.json())
    assert answer.status_code == status
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == (
        "not_found_error" if status == 404 else "invalid_request_error"
    )
    assert said in error["error"]["message"]


def test_a_key_and_an_error_within_a_stream(target: Path) -> None:
    engine = AsyncEngine(str(target))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    options = ServeOptions(api_key="secret", chat_template=template)
    with running(engine, options) as server:
        for key, status in (("secret", 200), ("x", 401)):
            with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
                asked: Any = {"model": str(target), "messages": MESSAGES, "max_tokens": 3}
                if status == 200:
                    assert client.messages.create(**asked).usage.output_tokens == 3
                else:
                    with pytest.raises(anthropic.AuthenticationError):
                        client.messages.create(**asked)
        fail_later(engine.engine, "step", "the step is broken")
        body = {"messages": MESSAGES, "max_tokens": 30, "ignore_eos": True, "stream": True}
        headers = {"x-api-key": "secret"}
        text = httpx.post(server.url + PATH, json=body, headers=headers, timeout=PATIENCE).text
        assert "event: error" in text
        assert "overloaded_error" in text or "api_error" in text
