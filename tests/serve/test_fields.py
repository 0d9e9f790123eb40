"""Every field of a body is honoured, inert by a documented list, or refused by its name."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from foretoken import SamplingParams
from foretoken.errors import RequestError
from foretoken.outputs import CompletionDelta, Logprob, RequestDelta
from foretoken.serve.answers.completions import CompletionForm
from foretoken.serve.answers.events import EventReader
from foretoken.serve.conversions import read_messages, read_responses
from foretoken.serve.options import ServeOptions
from foretoken.serve.parsers.formats import FORMATS, MessageFormat
from foretoken.serve.protocol.chat import ChatBody
from foretoken.serve.protocol.common import (
    Fields,
    SamplingFields,
    Speculative,
    StreamOptions,
    described,
)
from foretoken.serve.protocol.completions import CompletionBody
from foretoken.serve.protocol.faults import _BOUNDS, field_error
from foretoken.serve.protocol.messages import MessagesBody
from foretoken.serve.protocol.responses import ResponsesBody
from foretoken.serve.requests import Asked, Served, read_chat, read_completion
from foretoken.serve.running import News
from tests.project.source import ROOT
from tests.serve.running import post

OPTIONS = ServeOptions(allow_priority=True, allow_synthetic=True, trust_request_chat_template=True)
HERMES = MessageFormat(FORMATS["hermes"])
SERVED = Served(
    ("tiny",), "tiny", 2048, 5, SamplingParams(), ("prediction",), "draft_model", OPTIONS, HERMES
)
TOOLS: dict[type[Fields], list[dict[str, Any]]] = {
    ChatBody: [{"type": "function", "function": {"name": "f"}}],
    ResponsesBody: [{"type": "function", "name": "f"}],
    MessagesBody: [{"name": "f", "input_schema": {}}],
}
SCHEMA = {"type": "object"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
HONOURED: dict[str, Any] = {
    "prompt": "b", "messages": [{"role": "user", "content": "b"}], "echo": True, "logprobs": 2,
    "max_tokens": 7, "max_completion_tokens": 8, "min_tokens": 2, "temperature": 0.5, "top_p": 0.5,
    "top_k": 3, "min_p": 0.1, "n": 2, "seed": 3, "stop": "x", "stop_token_ids": [1],
    "include_stop_str_in_output": True, "skip_special_tokens": False, "ignore_eos": True,
    "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.0}, "bad_words": ["x"], "allowed_token_ids": [4], "prompt_logprobs": 1,
    "priority": -1,
    "prediction": {"type": "content", "content": "x"}, "stream": True,
    "stream_options": {"include_usage": True}, "top_logprobs": 2, "add_generation_prompt": False,
    "continue_final_message": True, "chat_template": "{{ x }}",
    "chat_template_kwargs": {"opening": "x"},
    "speculative": {"enabled": False}, "tool_choice": "required", "parallel_tool_calls": False,
    "input": "b", "instructions": "x", "max_output_tokens": 7, "system": "x",
    "text": {"format": {"type": "json_object"}}, "stop_sequences": ["x"],
}  # fmt: skip
# What turns something off that is off: a value that is allowed, and one that is not.
OFF = {"store": (False, True), "background": (False, True), "truncation": ("disabled", "auto"),
       "include": (["reasoning.encrypted_content"], ["x"])}  # fmt: skip
# What a name has to have beside it, or it is refused.
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
}
STRUCTURED = {
    "response_format": FORMAT, "structured_outputs": {"regex": "a+"}, "guided_json": SCHEMA,
    "guided_regex": "a+", "guided_choice": ["a", "b"], "guided_grammar": 'start: "a"',
}  # fmt: skip
SPECULATIVE: dict[str, Any] = {
    "enabled": False, "num_speculative_tokens": 2, "drafter": "ngram", "rule": "block",
    "trace": True,
}  # fmt: skip
PREDICTION = {"type": "content", "content": "x"}
STREAM = {"include_usage": True, "continuous_usage_stats": True, "split_tokens": True}
BODIES: list[tuple[type[Fields], Any, dict[str, Any]]] = [
    (CompletionBody, read_completion, {"prompt": "a"}),
    (ChatBody, read_chat, {"messages": [{"role": "user", "content": "a"}]}),
    (ResponsesBody, read_responses, {"input": "a"}),
    (
        MessagesBody,
        read_messages,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    ),
]
NAMES = [(body, name) for body, _, _ in BODIES for name in body.model_fields]


def read(kind: type[Fields], **given: Any) -> Asked:
    ((function, least),) = [(f, least) for body, f, least in BODIES if body is kind]
    return function(kind.model_validate({**least, **given}), SERVED)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_field_changes_something_or_is_inert_or_refused(kind: type[Fields], name: str) -> None:
    if kind is ResponsesBody and name in OFF:
        allowed, other = OFF[name]
        assert read(kind, **{name: allowed}) == read(kind)
        with pytest.raises(ValueError, match=name):
            read(kind, **{name: other})
    elif name in described(kind, "inert"):
        assert read(kind, **{name: "x"}) == read(kind)
    elif name in described(kind, "refused"):
        assert read(kind, **{name: None}) == read(kind)
        with pytest.raises(ValueError, match=name):
            read(kind, **{name: "x"})
    elif name == "model":
        assert read(kind, model="tiny") == read(kind)
        with pytest.raises(RequestError, match="`model` is 'x'"):
            read(kind, model="x")
    elif name in STRUCTURED:
        assert read(kind, **{name: STRUCTURED[name]}).params != read(kind).params
    else:
        beside = BESIDE.get(name, {})
        if name in ("tool_choice", "parallel_tool_calls"):
            beside = {"tools": TOOLS[kind]}
        value = HONOURED[name] if name != "tools" else TOOLS[kind]
        value = True if (kind, name) == (ChatBody, "logprobs") else value
        value = {"type": "any"} if (kind, name) == (MessagesBody, "tool_choice") else value
        assert read(kind, **{**beside, name: value}) != read(kind, **beside)


@pytest.mark.parametrize("name", Speculative.model_fields)
def test_speculation_of_a_request(name: str) -> None:
    assert read(CompletionBody, speculative={name: SPECULATIVE[name]}) != read(CompletionBody)


@pytest.mark.parametrize("name", sorted(STREAM))
def test_options_of_a_stream(name: str) -> None:
    assert {*StreamOptions.model_fields} - {*described(StreamOptions, "inert")} == {*STREAM}
    given = {"stream": True, "stream_options": {name: STREAM[name]}}
    assert read(CompletionBody, **given) != read(CompletionBody, stream=True)


def test_every_parameter_of_ours_can_be_asked_for() -> None:
    renamed = {"num_speculative_tokens", "drafter", "rejection_sample_method", "trace"}
    mine = {field.name for field in fields(SamplingParams)} - renamed
    assert mine <= {*CompletionBody.model_fields}
    assert mine <= {*ChatBody.model_fields}


def test_the_documented_lists_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    bodies = (CompletionBody, ChatBody)
    marked = {mark: {name for body in bodies for name in described(body, mark)}
              for mark in ("inert", "refused")}  # fmt: skip
    marked["inert"].add("stream_options.include_obfuscation")
    for mark, title in (("inert", "Inert"), ("refused", "Refused")):
        section = text.split(f"### {title} fields")[1].split("\n#")[0]
        assert set(re.findall(r"^- `([\w.]+)`", section, re.MULTILINE)) == marked[mark]
    honoured = {name for body in bodies for name in body.model_fields}
    honoured |= {f"speculative.{name}" for name in Speculative.model_fields}
    honoured |= {f"stream_options.{name}" for name in StreamOptions.model_fields}
    assert rows(text, "Parameters") == honoured - marked["inert"] - marked["refused"]


def rows(text: str, title: str) -> set[str]:
    """Fields in the first column of a section's table."""
    section = text.split(f"### {title}\n")[1].split("\n#")[0]
    return {name for row in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
            for name in re.findall(r"`([\w.]+)`", row)}  # fmt: skip


@pytest.mark.parametrize("kind", [ResponsesBody, MessagesBody])
def test_the_lists_of_other_apis_are_those_of_the_code(kind: type[Fields]) -> None:
    text, title = (ROOT / "docs" / "server.md").read_text(encoding="utf-8"), kind.__name__[:-4]
    section = text.split(f"### {title}\n")[1].split("\n#")[0]
    own = {*kind.model_fields} - {*SamplingFields.model_fields}
    for mark in ("inert", "refused"):
        listed = section.split(f"- {mark}:")[1].split("\n- ")[0]
        known = {*kind.model_fields} & set(re.findall(r"`(\w+)`", listed))
        assert known == set(described(kind, mark))
        own -= known
    assert rows(text, title) == own


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"top_q": 1}, "top_q", "Did you mean `top_p`"),
        ({"n": "2"}, "n", "an integer."),
        ({"n": True}, "n", "an integer."),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"prompt": {"a": 1}}, "prompt", "a text, or a list."),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "an integer."),
        ({"prompt": []}, "prompt", "at least one"),
        ({"prompt": ["a", ""]}, "prompt", "at least one token"),
        ({"prompt": [5000]}, "prompt", "[0, 4096)"),
        ({"stream_options": {}}, "stream_options", "without `stream`"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streamed"),
        *(
            ({"logit_bias": {key: 1}}, "logit_bias", "token ids in decimal")
            for key in ("a", " 5", "1_0", "+5", "05", "٣")
        ),
        ({"messages": 1}, "messages", "no such field."),
        ({"stream_option": {}}, "stream_option", "`stream_options`?"),
        ({"speculative": {"drafters": 1}}, "speculative.drafters", "`drafter`?"),
        ({"trace": True}, "trace", "no such field."),
        ({"guided_regex": "("}, "guided_regex", "that can be served"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "non-empty"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "can be served"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format.json_schema.schema",
            "Invalid type",
        ),
        ({"logprobs": 21}, "logprobs", "[0, 20]"),
        ({"priority": -1}, "priority", "See --allow-priority."),
        ({"priority": 1}, "priority", "0, or left out"),
        ({"speculative": {"rule": "synthetic"}}, "speculative.rule", "does not allow"),
        ({"speculative": {"rule": "x"}}, "speculative.rule", "one of standard, block, coupled."),
        ({"prompt": ""}, "prompt", "`prompt` is ''"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "{'include_usage': True}"),
        ({"speculative": {"num_speculative_tokens": 6}}, "speculative.num_speculative_tokens", "5"),
        ({"speculative": {"drafter": "x"}}, "speculative.drafter", "one of"),
        ({"speculative": {"k": 1}}, "speculative.k", "no such field"),
        *(
            ({"speculative": {**off, "drafter": "draft_model"}}, "speculative.drafter", "K is 0")
            for off in ({"enabled": False}, {"num_speculative_tokens": 0})
        ),
        ({"prediction": PREDICTION, "speculative": {"enabled": False}}, "prediction", "K is 0"),
        (
            {"prediction": PREDICTION, "speculative": {"drafter": "draft_model"}},
            "speculative.drafter",
            "reads `prediction`",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "beside `guided_regex`"),
        ({"suffix": "x"}, "suffix", "not implemented"),
        ({"max_tokens": 4000}, "max_tokens", "context"),
        ({"stream": True, "max_tokens": 4000}, "max_tokens", "context"),
    ],
)
def test_what_is_refused_is_named(
    http: httpx.Client, given: dict[str, Any], param: str, said: str
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", **given})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert f"`{param}`" in error["message"]
    assert said in error["message"]


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat/completions", {"max_completion_tokens": 4000}, "max_completion_tokens"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"prompt": "x"}, "prompt"),
        ("responses", {"max_output_tokens": 4000}, "max_output_tokens"),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
         "text.format.schema"),
        ("responses", {"input": "x" * 140_000}, "input"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "text"}]}]},
         "input[0].content[0].text"),
        ("responses", {"max_tokens": 5}, "max_tokens"),
    ],
)  # fmt: skip
def test_fields_are_named_as_they_were_sent(
    http: httpx.Client, path: str, given: dict[str, Any], param: str
) -> None:
    kind = ResponsesBody if path == "responses" else ChatBody
    least = next(least for body, _, least in BODIES if body is kind)
    answer = http.post(f"/v1/{path}", json={**least, **given})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert f"`{param}` is" in error["message"]
    assert {*re.findall("Did you mean `(.*)`", error["message"])} <= kind.model_fields.keys()


@pytest.mark.parametrize(
    ("given", "is_of_length"),
    [
        ({"prompt": "x" * 140_000}, True),
        ({"prompt": "x " * 3000}, True),
        ({"max_tokens": 4000}, True),
        ({"stop": ["x"] * 65}, False),
        ({"bad_words": ["x" * 140_000]}, False),
        ({"n": 200}, False),
    ],
)
def test_only_what_is_too_long_for_the_context_is_said_to_be(
    http: httpx.Client, given: dict[str, Any], is_of_length: bool
) -> None:
    error = post(http, "/v1/completions", **{"prompt": "a", **given})["error"]
    assert (error["code"] == "context_length_exceeded") == is_of_length


@pytest.mark.parametrize("name", ["response_format", "guided_json"])
def test_white_space_is_asked_for_beside_a_schema(name: str) -> None:
    """As vLLM merges them; other keys say what the text must be once more."""
    for given, told in (
        ({"disable_any_whitespace": False}, '"whitespace_flexible": true'),
        ({"whitespace_pattern": " ?"}, '"whitespace_pattern": " ?"'),
    ):
        asked = read(ChatBody, **{name: STRUCTURED[name], "structured_outputs": given})
        assert told in dict(asked.params.structured_outputs or {})["json"]  # type: ignore[arg-type]
    for wrong, field in (
        ({"regex": "a"}, "structured_outputs"),
        ({}, "structured_outputs"),
        ({"whitespace_pattern": 5}, "structured_outputs.whitespace_pattern"),
    ):
        with pytest.raises(RequestError) as caught:
            read(ChatBody, **{name: STRUCTURED[name], "structured_outputs": wrong})
        assert caught.value.field.startswith((field, name))


@pytest.mark.parametrize("name", ["guided_regex", "guided_choice", "structured_outputs"])
def test_a_structure_beside_tools_is_refused_by_the_name_it_has(name: str) -> None:
    with pytest.raises(RequestError, match="JSON beside `tools`") as caught:
        read(ChatBody, tools=TOOLS[ChatBody], **{name: STRUCTURED[name]})
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["response_format", "guided_json"])
def test_json_beside_tools_is_one_of_two_ways_to_answer(name: str) -> None:
    asked = read(ChatBody, tools=TOOLS[ChatBody], **{name: STRUCTURED[name]})
    grammar = dict(asked.params.structured_outputs or {})["grammar"]  # type: ignore[arg-type]
    assert grammar.startswith('start: call ("\\n" call)* | answer')
    assert asked.parsing is not None
    assert (asked.parsing.is_either, asked.parsing.is_forced) == (True, False)


def test_what_is_asked_of_speculation_shows_in_the_answers_of_every_api(
    http: httpx.Client,
) -> None:
    conversation = [{"role": "user", "content": "def area(width, height):"}]
    limit = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    asked: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "def area(width, height):", **limit},
        "chat/completions": {"messages": conversation, **limit},
        "messages": {"messages": conversation, **limit},
        "responses": {"input": conversation, **limit},
    }
    asked["responses"]["max_output_tokens"] = asked["responses"].pop("max_tokens")
    for path, body in asked.items():
        for drafter, rule, others in (("draft_model", "coupled", {"prediction"}),
                                      ("prediction", "block", {"draft_model"})):  # fmt: skip
            given = {"trace": True, "drafter": drafter, "rule": rule}
            answer = post(http, f"/v1/{path}", **body, speculative=given)
            trace = answer.get("trace") or answer["choices"][0]["trace"]
            assert len(trace) == 24
            assert {token["rule"] for token in trace} == {rule}
            assert others.isdisjoint(token["drafter"] for token in trace)
            asked_so = {**body, "speculative": given, "stream": True}
            assert '"trace":[' in http.post(f"/v1/{path}", json=asked_so).text
            plain = post(http, f"/v1/{path}", **body)
            assert "trace" not in json.dumps(plain)
        drafted = post(http, f"/v1/{path}", **body)["metrics"]["speculative_decoding"]
        assert drafted["num_draft_tokens"] > 0
        none = post(http, f"/v1/{path}", **body, speculative={"num_speculative_tokens": 0})
        assert none["metrics"] == {"speculative_decoding": None}
        few = post(http, f"/v1/{path}", **body, speculative={"num_speculative_tokens": 2})
        assert few["metrics"]["speculative_decoding"]["num_spec_tokens"] == 2


def test_only_a_server_that_allows_it_lets_clients_pass_others() -> None:
    strict = replace(SERVED, options=ServeOptions())
    for kind, reader, least in BODIES:
        for priority in (0, None):
            assert reader(kind(**least, priority=priority), strict).params.priority == 0
        assert reader(kind(**least, priority=-3), SERVED).params.priority == -3
        with pytest.raises(RequestError, match="--allow-priority") as caught:
            reader(kind(**least, priority=-3), strict)
        assert caught.value.field == "priority"


def test_the_first_sample_of_a_prompt_has_its_logprobs_whenever_they_come() -> None:
    asked = read(CompletionBody, n=3, prompt_logprobs=0)
    rows: Any = [None, {5: Logprob(-1.0, 1, "x")}]
    samples = [CompletionDelta(index=i, token_ids=[7], text="y") for i in range(3)]
    for at in range(3):
        deltas = [RequestDelta("1", samples[1:], prompt="ax", prompt_token_ids=[4, 5])]
        deltas += [RequestDelta("1", samples[:2]), RequestDelta("1", samples)]
        deltas[at] = replace(deltas[at], prompt_logprobs=rows)
        reader, form = EventReader(asked), CompletionForm(asked)
        events = [event for delta in deltas for event in reader.read(News(0, delta))]
        by_choice = [[event for event in events if event.choice == i] for i in range(3)]
        told = [form.whole(some).get("prompt_logprobs") for some in by_choice]
        assert [rows and [*rows] for rows in told] == [
            [None, {"5": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}], None, None,
        ]  # fmt: skip


def test_every_type_that_is_wrong_is_told_in_our_words() -> None:
    odd: list[Any] = [True, 1, 1.5, float("nan"), "x", "\ud800", [], [1], [[]], {}, {"type": "x"},
                      [{"type": "function"}], {str(i): 1.0 for i in range(300)}]  # fmt: skip
    found = set()
    for kind, _, least in BODIES:
        for name in kind.model_fields:
            for value in odd:
                try:
                    kind.model_validate({**least, name: value})
                except ValidationError as error:
                    found |= {one["type"] for one in error.errors()}
                    told = str(field_error(kind, error.errors()))
                    assert f"`{name}" in told
                    assert "should" not in told
                    assert "valid" not in told
    assert found <= _BOUNDS.keys()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b"\xff"])
def test_a_body_that_is_none(http: httpx.Client, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert "body" in told
    assert ("at character" in told) == (content == b"{")


def test_a_name_that_is_not_served(http: httpx.Client) -> None:
    for path in ("/v1/completions", "/tokenize"):
        answer = http.post(path, json={"prompt": "a", "model": "gpt-4"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
    assert "error" in post(http, "/nowhere")


def test_both_names_of_one_limit() -> None:
    same = read(ChatBody, max_tokens=3, max_completion_tokens=3)
    assert same.params.max_tokens == 3
    with pytest.raises(RequestError, match="max_completion_tokens"):
        read(ChatBody, max_tokens=3, max_completion_tokens=4)


def test_defaults_are_the_checkpoints() -> None:
    served = Served(
        ("t",), "t", 9, 0, SamplingParams(top_k=7, max_tokens=5), (), "", ServeOptions()
    )
    asked = read_completion(CompletionBody(prompt="a", top_p=0.5), served)
    assert (asked.params.top_k, asked.params.top_p, asked.params.max_tokens) == (7, 0.5, 5)
