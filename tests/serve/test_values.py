"""Harmless values change no answer, and values that are honoured show in the answer."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from foretoken import LLM, SamplingParams
from foretoken.serve.conversions import read_messages
from foretoken.serve.protocol.chat import ChatBody, CompletionBody
from foretoken.serve.protocol.messages import MessagesBody
from foretoken.serve.protocol.responses import ResponsesBody
from foretoken.serve.requests import read_chat
from tests.serve.running import post
from tests.serve.test_fields import SERVED
from tests.support.asynchronous import until

PROMPT = "def area(width, height):"
CHAT = [{"role": "user", "content": PROMPT}]
FUNCTIONS = [
    {
        "name": name,
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    for name in ("near", "far")
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
APIS: dict[str, tuple[Any, dict[str, Any]]] = {
    "completions": (CompletionBody, {"prompt": PROMPT, "max_tokens": 5}),
    "chat/completions": (ChatBody, {"messages": CHAT, "max_tokens": 5}),
    "responses": (ResponsesBody, {"input": CHAT, "max_output_tokens": 5}),
    "messages": (MessagesBody, {"messages": CHAT, "max_tokens": 5}),
}
CHAT_VALUES = [
    {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}, {"tools": []},
    {"chat_template_kwargs": {"enable_thinking": False, "nowhere": 1}},
    {"reasoning_effort": "minimal"}, {"include_reasoning": True},
    {"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}, {"add_special_tokens": False},
]  # fmt: skip
SHARED = [
    {"seed": -1}, {"request_id": "mine"}, {"cache_salt": "s" * 43}, {"detokenize": True},
    {"truncate_prompt_tokens": 1000}, {"truncate_prompt_tokens": -1},
]  # fmt: skip
COMPLETED = [
    *SHARED, {"stream_options": {}}, {"stream_options": {"include_usage": False}},
    {"stream_options": None}, {"prompt_logprobs": None}, {"return_token_ids": False},
    {"return_tokens_as_token_ids": True}, {"prompt_cache_options": {"mode": "implicit"}},
]  # fmt: skip
VALUES: dict[str, list[dict[str, Any]]] = {
    "completions": [*COMPLETED, {"add_special_tokens": True}, {"echo": False}],
    "chat/completions": [*COMPLETED, *CHAT_VALUES],
    "responses": [
        *SHARED, {"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning": {}},
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
        {"text": {"verbosity": "medium"}}, {"tool_choice": "auto", "tools": []}, {"stop": []},
    ],
    "messages": [
        *SHARED, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}},
        {"output_config": {"effort": "low"}}, {"tool_choice": {"type": "auto"}},
    ],
}  # fmt: skip


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == "completions":
        return str(answer["choices"][0]["text"])
    if path == "chat/completions":
        return str(answer["choices"][0]["message"]["content"])
    parts = answer["content"] if path == "messages" else answer["output"][0]["content"]
    return str(parts[0]["text"])


@pytest.mark.parametrize("path", APIS)
def test_what_changes_nothing_changes_no_answer(http: httpx.Client, path: str) -> None:
    kind, least = APIS[path]
    least = {**least, "temperature": 0}
    expected = text_of(path, post(http, f"/v1/{path}", **least))
    tables = [
        {name: one.harmless[i] for name, one in kind.foreign.items() if i < len(one.harmless)}
        for i in range(max(len(one.harmless) for one in kind.foreign.values()))
    ]
    assert len(tables[0]) >= 20
    for given in [*VALUES[path], *tables]:
        answer = http.post(f"/v1/{path}", json={**least, **given})
        assert answer.status_code == 200, (given, answer.text)
        assert text_of(path, answer.json()) == expected, given


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_requests_share_a_prefix_with_those_of_their_salt_alone(
    http: httpx.Client, path: str
) -> None:
    text = f"salted({path!r})\n" * 20
    is_chat = path.startswith("chat")
    least = {"messages": [{**CHAT[0], "content": text}]} if is_chat else {"prompt": text}
    cached = []
    for salt in (None, None, "a", "a", "b", "a", None):
        given = {} if salt is None else {"cache_salt": salt}
        usage = post(http, f"/v1/{path}", **least, max_tokens=1, **given)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    most = max(cached)
    assert most >= 64
    assert cached == [0, most, 0, most, 0, most, most]


def test_token_ids_are_those_that_were_drawn(http: httpx.Client, llm: LLM) -> None:
    asked = {"max_tokens": 9, "temperature": 0, "return_token_ids": True}
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9))
    expected, prompt_ids = output.outputs[0].token_ids, output.prompt_token_ids
    choice = post(http, "/v1/completions", prompt=PROMPT, **asked)["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (expected, prompt_ids)
    several = post(http, "/v1/completions", prompt=["a", PROMPT], n=2, **asked)["choices"]
    assert [one["prompt_token_ids"] == prompt_ids for one in several] == [False, False, True, True]
    whole = post(http, "/v1/chat/completions", messages=CHAT, **asked)
    for path, given in (("completions", {"prompt": PROMPT}),
                        ("chat/completions", {"messages": CHAT})):  # fmt: skip
        chunks = streamed(http, f"/v1/{path}", **given, **asked)
        ids = [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", [])]
        shown = [chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids")
                 for chunk in chunks]  # fmt: skip
        is_chat = path.startswith("chat")
        assert ids == (whole["choices"][0]["token_ids"] if is_chat else expected)
        assert shown[0] == (whole["prompt_token_ids"] if is_chat else prompt_ids)
        assert not any(shown[1:])


def streamed(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = http.post(path, json={**body, "stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_log_probabilities_may_call_tokens_by_number(http: httpx.Client) -> None:
    asked = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "echo": True,
             "logprobs": 2}  # fmt: skip
    by_id = {"return_tokens_as_token_ids": True}
    plain = post(http, "/v1/completions", prompt=PROMPT, **asked)["choices"][0]
    choice = post(http, "/v1/completions", prompt=PROMPT, **asked, **by_id)["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert choice["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert choice["logprobs"]["token_logprobs"] == plain["logprobs"]["token_logprobs"]
    for token, row in zip(ids[1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert f"token_id:{token}" in row
    asked = {"max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    chat = post(http, "/v1/chat/completions", messages=CHAT, **asked, **by_id,
                return_token_ids=True)["choices"][0]  # fmt: skip
    for token, shown in zip(chat["token_ids"], chat["logprobs"]["content"], strict=True):
        assert shown["token"] == shown["top_logprobs"][0]["token"] == f"token_id:{token}"
        assert shown["bytes"]


def test_a_prompt_is_cut_to_its_last_tokens(http: httpx.Client, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)  # type: ignore[union-attr]
    asked = {"max_tokens": 3, "temperature": 0, "truncate_prompt_tokens": 4}
    least = {"prompt": PROMPT, **asked}
    cut = post(http, "/v1/completions", **least, return_token_ids=True, echo=True, logprobs=0)
    choice = cut["choices"][0]
    assert choice["prompt_token_ids"] == ids[-4:]
    assert choice["text"].startswith(llm.get_tokenizer().decode(ids[-4:]))  # type: ignore[union-attr]
    expected = llm.generate([ids[-4:]], SamplingParams(temperature=0, max_tokens=3))[0]
    assert choice["token_ids"] == expected.outputs[0].token_ids
    chat = post(http, "/v1/chat/completions", messages=CHAT, **asked, logprobs=True)
    assert chat["usage"]["prompt_tokens"] == 4
    error = post(http, "/v1/chat/completions", messages=CHAT, truncate_prompt_tokens=-1)["error"]
    assert error["param"] == "truncate_prompt_tokens"
    assert "Give `max_tokens`" in error["message"]
    by_default = post(http, "/v1/completions", prompt=PROMPT, truncate_prompt_tokens=-1)
    assert by_default["usage"]["completion_tokens"] == 16


def test_without_text_there_is_none(http: httpx.Client, llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9))
    asked = {"max_tokens": 9, "temperature": 0, "detokenize": False, "return_token_ids": True,
             "logprobs": 1}  # fmt: skip
    choice = post(http, "/v1/completions", prompt=PROMPT, **asked)["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", output.outputs[0].token_ids)
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    asked |= {"logprobs": 3, "echo": True}
    told = post(http, "/v1/completions", prompt=PROMPT, **asked)["choices"][0]
    ids = [*told["prompt_token_ids"], *told["token_ids"]]
    assert told["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    first, *rows = told["logprobs"]["top_logprobs"]
    assert first is None
    assert {len(row) for row in rows} <= {3, 4}
    refused = post(http, "/v1/chat/completions", messages=CHAT, detokenize=False, tools=TOOLS)
    assert refused["error"]["param"] == "detokenize"


def test_an_answer_has_the_name_that_its_client_gave_it(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="foretoken")
    for path, prefix in (("completions", "cmpl-"), ("chat/completions", "chatcmpl-"),
                         ("responses", "resp_"), ("messages", "msg_")):  # fmt: skip
        least = APIS[path][1]
        assert post(http, f"/v1/{path}", **least, request_id="a.b:1")["id"] == f"{prefix}a.b:1"
        again = post(http, f"/v1/{path}", **least, request_id=f"{prefix}2")
        assert again["id"] == f"{prefix}2"
    names = {"a.b:1", "cmpl-2", "chatcmpl-2", "resp_2", "msg_2"}
    until(lambda: names <= {fields.get("answer_id") for fields in logged(caplog)})


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in [*caplog.records] if hasattr(record, "fields")]


def test_allowed_tools_are_the_only_ones(http: httpx.Client) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "far"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    asked = {"messages": CHAT, "tools": TOOLS, "max_tokens": 60}
    answer = post(http, "/v1/chat/completions", **asked, tool_choice=choice)
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"far"}
    flat = {"type": "allowed_tools", "mode": "required",
            "tools": [{"type": "function", "name": "near"}]}  # fmt: skip
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    answer = post(http, "/v1/responses", input=CHAT, tools=tools, tool_choice=flat,
                  max_output_tokens=60)  # fmt: skip
    assert {item["name"] for item in answer["output"]} == {"near"}
    flat["tools"] = [{"type": "function", "name": "nowhere"}]
    error = post(http, "/v1/responses", input=CHAT, tools=tools, tool_choice=flat)["error"]
    assert error["param"] == "tool_choice.tools"
    assert "some of near, far" in error["message"]
    error = post(http, "/v1/responses", input=CHAT, tool_choice=flat)["error"]
    assert error["param"] == "tool_choice.tools"
    assert "left out without `tools`" in error["message"]


def test_reasoning_is_left_out_where_it_is_not_wanted(http: httpx.Client) -> None:
    asked = {"messages": CHAT, "max_tokens": 6, "temperature": 0,
             "chat_template_kwargs": {"opening": "<think>"}}  # fmt: skip
    told = post(http, "/v1/chat/completions", **asked)
    assert told["choices"][0]["message"]["reasoning"]
    left = post(http, "/v1/chat/completions", **asked, include_reasoning=False)
    assert "reasoning" not in left["choices"][0]["message"]
    assert left["usage"] == told["usage"]
    chunks = streamed(http, "/v1/chat/completions", **asked, include_reasoning=False)
    assert "reasoning" not in json.dumps([chunk["choices"] for chunk in chunks])
    for thinking, kinds in (
        ({"type": "adaptive"}, ["thinking"]),
        ({"type": "disabled"}, []),
        ({"type": "adaptive", "display": "omitted"}, []),
    ):
        content = post(http, "/v1/messages", **asked, thinking=thinking)["content"]
        assert [block["type"] for block in content] == kinds
    wish = {"type": "enabled", "budget_tokens": 1024}
    told = post(http, "/v1/messages", **asked, thinking=wish)
    assert "thinking.budget_tokens" in told["error"]["message"]


def test_templates_are_told_how_much_to_reason() -> None:
    def variables(**given: Any) -> Any:
        asked = read_chat(ChatBody(messages=CHAT, **given), SERVED)
        return asked.template["chat_template_kwargs"]

    assert variables(reasoning_effort="none") == {
        "reasoning_effort": "none", "enable_thinking": False,
    }  # fmt: skip
    own = {"enable_thinking": False}
    assert variables(reasoning_effort="high", chat_template_kwargs=own) == {
        "reasoning_effort": "high", "enable_thinking": False,
    }  # fmt: skip
    body = MessagesBody.model_validate(
        {"messages": CHAT, "max_tokens": 5, "thinking": {"type": "disabled"}}
    )
    assert read_messages(body, SERVED).template["chat_template_kwargs"] == own
