"""Calls of tools: forced calls are valid, streamed or not, also by OpenAI's client."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.serve.running import choices, chunks, post

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "def area(width, height):"}]
AREA = {
    "type": "object",
    "properties": {
        "w": {"type": "integer", "minimum": 0, "maximum": 99}, "of": {"$ref": "#/$defs/Of"},
    },
    "required": ["w", "of"],
    "additionalProperties": False,
    "$defs": {"Of": {"enum": ["é\"", "circle"]}},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "area", "description": "x", "parameters": AREA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "area"}}
ASKED: Any = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 120}


def check(call: Any) -> None:
    """A call of `area` that its schema allows."""
    assert call["type"] == "function"
    assert call["function"]["name"] == "area"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"w", "of"}
    assert 0 <= arguments["w"] <= 99
    assert arguments["of"] in ('é"', "circle")


@pytest.mark.parametrize("speculative", [{"enabled": False}, {"num_speculative_tokens": 5}])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_named_function_is_called(http: httpx.Client, speculative: Any, seed: int) -> None:
    asked = {**ASKED, "tool_choice": NAMED, "seed": seed, "speculative": speculative}
    (choice,) = post(http, CHAT, **asked)["choices"]
    message = choice["message"]
    (call,) = message.pop("tool_calls")
    check(call)
    assert message == {"role": "assistant", "content": None, "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    for options in ({}, {"split_tokens": True}):
        found = choices(chunks(http, CHAT, stream_options=options, **asked))
        (first,), (then,) = (c["delta"]["tool_calls"] for c in found if "tool_calls" in c["delta"])
        assert first["id"].startswith("call_")
        assert first["function"] == {"name": "area", "arguments": ""}
        assert then == {"index": 0, "function": {"arguments": call["function"]["arguments"]}}
        assert not any(c["delta"].get("content") for c in found)
        assert [c["finish_reason"] for c in found if c["finish_reason"]] == ["tool_calls"]


def test_required_calls_may_be_several_or_one(http: httpx.Client) -> None:
    tools = TOOLS[:1]
    asked = {**ASKED, "tools": tools, "tool_choice": "required", "n": 3, "seed": 5}
    answer = post(http, CHAT, **asked)
    calls = [c["message"]["tool_calls"] for c in answer["choices"]]
    assert max(map(len, calls)) > 1
    for some, choice in zip(calls, answer["choices"], strict=True):
        for call in some[:-1] if choice["finish_reason"] == "length" else some:
            check(call)
    alone = post(http, CHAT, **asked, parallel_tool_calls=False)["choices"]
    assert {c["finish_reason"] for c in alone} == {"tool_calls"}
    assert {len(c["message"]["tool_calls"]) for c in alone} == {1}


def test_a_forced_call_that_is_cut_is_a_call_as_far_as_it_goes(http: httpx.Client) -> None:
    asked = {**ASKED, "tool_choice": NAMED, "temperature": 0}
    whole = post(http, CHAT, **asked)
    arguments = whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    found = set()
    for size in range(1, whole["usage"]["completion_tokens"] - 1):
        (choice,) = post(http, CHAT, **{**asked, "max_tokens": size})["choices"]
        message = choice["message"]
        assert (choice["finish_reason"], message["content"] or "") == ("length", "")
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert all(one["name"] == "area" for one in calls)
        said = [one["arguments"] for one in calls]
        assert arguments.startswith("".join(said))
        found |= {*said}
        deltas = choices(chunks(http, CHAT, **{**asked, "max_tokens": size}))
        parts = [d["delta"]["tool_calls"][0] for d in deltas if "tool_calls" in d["delta"]]
        assert [p["function"]["arguments"] for p in parts] == (["", *said] if said else [])
        assert deltas[-1]["finish_reason"] == "length"
    assert "" in found
    assert len(found) > 8


def test_the_template_sees_tools_calls_and_results(http: httpx.Client) -> None:
    call = {"id": "call_1", **NAMED, "function": {"name": "area", "arguments": '{"w": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "why"},
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
    ]
    asked = {
        "messages": messages,
        "max_tokens": 4,
        "temperature": 0,
        "speculative": {"trace": True},
    }
    with_tools, none, plain = (
        post(http, CHAT, **asked, **more)
        for more in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {})
    )
    num_tokens = [a["usage"]["prompt_tokens"] for a in (with_tools, none, plain)]
    assert num_tokens[0] > num_tokens[1] + 50
    assert num_tokens[1] == num_tokens[2]
    ids = post(http, "/tokenize", messages=messages)["tokens"]
    text = post(http, "/detokenize", tokens=ids)["prompt"]
    assert "<think>why</think>" in text
    assert '<tool_call>area {"w": 1}</tool_call>\n# 12\n' in text


def test_reasoning_that_the_prompt_opens(http: httpx.Client) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    opened = {**asked, "chat_template_kwargs": {"opening": "<think>\n"}}
    (choice,) = post(http, CHAT, **opened)["choices"]
    message = choice["message"]
    assert message["content"] == ""
    assert message["reasoning"] == message["reasoning_content"] != ""
    found = [c["delta"] for c in choices(chunks(http, CHAT, **opened))]
    assert "".join(d.get("reasoning_content", "") for d in found) == message["reasoning"]
    assert "reasoning" not in post(http, CHAT, **asked)["choices"][0]["message"]
    # A grammar leaves no room for it.
    forced = post(http, CHAT, **opened, guided_choice=["yes"])["choices"][0]["message"]
    assert forced == {"role": "assistant", "content": "yes", "refusal": None}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": {**NAMED, "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_choice": ["a"], "tool_choice": "auto"}, "guided_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
         "response_format, tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tools.f.not"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
          "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(http: httpx.Client, given: dict[str, Any], param: str) -> None:
    answer = http.post(CHAT, json={**ASKED, **given})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


ANSWER = {
    "type": "object",
    "properties": {"name": {"enum": ["area", "é"]}, "parameters": {"$ref": "#/$defs/P"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"P": {"type": "object", "properties": {"ok": {"type": "boolean"}},
                    "required": ["ok"], "additionalProperties": False}},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}


@pytest.mark.parametrize("speculative", [{"enabled": False}, {"num_speculative_tokens": 5}])
@pytest.mark.parametrize("parallel", [True, False])
def test_an_answer_is_a_call_or_the_format(
    http: httpx.Client, speculative: Any, parallel: bool
) -> None:
    """Never both; only `length` cuts either of them; a stream says the same."""
    seen = set()
    asked = {**ASKED, "tools": TOOLS[:1], "response_format": FORMAT, "seed": 1, "n": 10,
             "speculative": speculative, "parallel_tool_calls": parallel}  # fmt: skip
    streamed = chunks(http, CHAT, **asked)
    for choice in post(http, CHAT, **asked)["choices"]:
        message, reason = choice["message"], choice["finish_reason"]
        calls = message.get("tool_calls", [])
        seen.add((bool(calls), reason))
        if calls:
            assert message["content"] is None
            assert parallel or len(calls) == 1
            for call in calls[:-1] if reason == "length" else calls:
                check(call)
        elif reason == "stop":
            check_answer(message["content"])
        found = [c["delta"] for c in choices(streamed, choice["index"])]
        said = "".join(delta.get("content") or "" for delta in found)
        parts = [part["function"] for d in found for part in d.get("tool_calls", ())]
        assert said == (message["content"] or "")
        assert "".join(part["arguments"] for part in parts) == "".join(
            call["function"]["arguments"] for call in calls
        )
    assert {has_calls for has_calls, _ in seen} == {True, False}
    assert (False, "stop") in seen
    assert parallel or (True, "tool_calls") in seen


def check_answer(text: str) -> None:
    """JSON that the format allows, without white space."""
    told = json.loads(text)
    assert told["name"] in ("area", "é")
    assert set(told) <= {"name", "parameters"}
    assert told.get("parameters", {"ok": True})["ok"] in (True, False)
    assert " " not in text


def test_a_call_or_the_format_in_every_api(http: httpx.Client, client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Area)
    seen: dict[str, set[bool]] = {"chat": set(), "responses": set()}
    for seed in range(5):
        done = client.chat.completions.parse(
            model="tiny", messages=MESSAGES, tools=[tool], response_format=Area, max_tokens=200,
            seed=seed, parallel_tool_calls=False,
        )  # fmt: skip
        message = done.choices[0].message
        calls = [call.function.parsed_arguments for call in message.tool_calls or ()]
        assert isinstance([*calls, message.parsed][0], Area)
        answer = client.responses.parse(
            model="tiny", input=MESSAGES, text_format=Area, max_output_tokens=200,
            parallel_tool_calls=False, extra_body={"seed": seed},
            tools=[{"type": "function", "name": "Area", "parameters": Area.model_json_schema(),
                    "strict": True}],
        )  # fmt: skip
        (item,) = answer.output
        assert answer.status == "completed"
        assert item.type == "function_call" or isinstance(answer.output_parsed, Area)
        seen["chat"].add(bool(calls))
        seen["responses"].add(item.type == "function_call")
    assert seen == {api: {True, False} for api in seen}


def test_calls_that_are_required_leave_the_format_out(http: httpx.Client) -> None:
    asked = {**ASKED, "response_format": FORMAT, "seed": 1}
    for choice in ("required", NAMED):
        forced = {**asked, "tool_choice": choice, "parallel_tool_calls": False}
        message = post(http, CHAT, **forced)["choices"][0]["message"]
        assert message["content"] is None
        assert len(message["tool_calls"]) == 1
    message = post(http, CHAT, **asked, tool_choice="none")["choices"][0]["message"]
    check_answer(message["content"])


class Area(BaseModel):
    """Of something."""

    w: int
    of: Literal["circle", "square"]


def test_the_official_client(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Area)
    done = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, tools=[tool], max_tokens=150, seed=4,
        tool_choice={"type": "function", "function": {"name": "Area"}},
    )  # fmt: skip
    (call,) = done.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Area)
    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Area, max_tokens=150, seed=4
    )
    assert isinstance(parsed.choices[0].message.parsed, Area)
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[tool], max_tokens=150, seed=4,
        tool_choice={"type": "function", "function": {"name": "Area"}},
    ) as stream:  # fmt: skip
        final = stream.get_final_completion().choices[0].message
    assert final.tool_calls
    assert final.tool_calls[0].function.arguments == call.function.arguments


def test_a_forced_call_that_a_stop_string_cuts_is_a_call_so_far(http: httpx.Client) -> None:
    asked = {**ASKED, "tool_choice": NAMED, "seed": 1, "stop": ['"w']}
    (choice,) = post(http, CHAT, **asked)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"w')
    assert (choice["message"]["content"], call["function"]["arguments"]) == (None, "{")
    found = choices(chunks(http, CHAT, **asked))
    assert found[-1]["finish_reason"] == "stop"
    assert not any(c["delta"].get("content") for c in found)
    answer = post(
        http, "/v1/messages", messages=MESSAGES, max_tokens=120, seed=1, stop_sequences=['"w'],
        tools=[{"name": "area", "input_schema": AREA}], tool_choice={"type": "any"},
    )  # fmt: skip
    assert answer["stop_reason"] == "stop_sequence"
    assert [(block["type"], block["input"]) for block in answer["content"]] == [("tool_use", {})]


def test_reasoning_is_counted(http: httpx.Client) -> None:
    opened = {"temperature": 0, "chat_template_kwargs": {"opening": "<think>"}}
    usage = post(http, CHAT, messages=MESSAGES, max_tokens=9, **opened)["usage"]
    details = usage["completion_tokens_details"]
    assert details["reasoning_tokens"] == usage["completion_tokens"] == 9
    usage = post(http, "/v1/responses", input=MESSAGES, max_output_tokens=9, **opened)["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 9}
    usage = post(http, CHAT, messages=MESSAGES, max_tokens=9, temperature=0)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
