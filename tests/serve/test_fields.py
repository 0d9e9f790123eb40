"""Every field of a body is honoured, inert by a documented list, or refused by its name."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import fields, replace
from typing import Any

import httpx
import pytest
from anthropic.types import message_count_tokens_params as count_params
from anthropic.types import message_create_params as message_params
from anthropic.types.beta import message_create_params as beta_message_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from openai.types.shared_params import Reasoning
from pydantic import ValidationError

from foretoken import SamplingParams
from foretoken.errors import RequestError
from foretoken.foreign import Foreign
from foretoken.outputs import CompletionDelta, Logprob, RequestDelta
from foretoken.serve.answers.choices import CompletionWriter
from foretoken.serve.answers.events import EventReader
from foretoken.serve.conversions import read_messages, read_responses
from foretoken.serve.errors import _BOUNDS, field_error
from foretoken.serve.options import ServeOptions
from foretoken.serve.parsers.formats import FORMATS, MessageFormat
from foretoken.serve.protocol.chat import ChatBody, CompletionBody
from foretoken.serve.protocol.common import (
    CacheOptions,
    Fields,
    SamplingFields,
    Speculative,
    StreamOptions,
)
from foretoken.serve.protocol.messages import CountBody, MessagesBody
from foretoken.serve.protocol.responses import Reasoning as ReasoningOptions
from foretoken.serve.protocol.responses import ResponsesBody
from foretoken.serve.requests import GenerationRequest, ServedModel, read_chat, read_completion
from foretoken.serve.running import PromptDelta
from tests.project.source import ROOT
from tests.serve.running import post

OPTIONS = ServeOptions(allow_priority=True, allow_synthetic=True, trust_request_chat_template=True)
HERMES = MessageFormat(FORMATS["hermes"])
SERVED = ServedModel(
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
    "text": {"format": {"type": "json_object"}}, "stop_sequences": ["x"], "detokenize": False,
    "truncate_prompt_tokens": 3, "cache_salt": "x", "request_id": "x", "add_special_tokens": False,
    "return_token_ids": True, "return_tokens_as_token_ids": True, "reasoning_effort": "low",
    "include_reasoning": False, "reasoning": {"effort": "low"}, "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"}, "output_format": {"type": "json_schema", "schema": SCHEMA},
}  # fmt: skip
# What turns something off that is off: a value that is allowed, and one that is not.
OFF = {"include": (["reasoning.encrypted_content"], ["message.output_text.logprobs"]),
       "prompt_cache_options": ({"mode": "explicit"}, {"prewarm": True})}  # fmt: skip
# Fields without which a field is refused.
NEEDED: dict[str, dict[str, Any]] = {
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
FOREIGN = [(body, name) for body, _, _ in BODIES for name in body.foreign]
VLLM_SAMPLING = (
    "use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids "
    "include_stop_str_in_output ignore_eos min_tokens skip_special_tokens truncation_side "
    "spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids bad_words seed "
    "structured_outputs priority request_id session_id cache_salt kv_transfer_params "
    "ec_transfer_params vllm_xargs repetition_detection stream_interval thinking_token_budget "
    "routed_experts_prompt_start logprob_token_ids return_token_offsets return_mm_kwargs "
    "max_repetition_pattern_size min_repetition_pattern_size repetition_min_count logits_processors"
)
VLLM: dict[type[Fields], str] = {
    CompletionBody: "echo prompt_embeds add_special_tokens response_format prompt_logprobs best_of "
    "return_tokens_as_token_ids return_token_ids guided_json guided_regex guided_choice suffix "
    "guided_grammar structural_tag guided_decoding_backend guided_whitespace_pattern",
    ChatBody: "echo add_special_tokens add_generation_prompt continue_final_message documents "
    "chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs return_token_ids "
    "return_tokens_as_token_ids return_prompt_text reasoning_effort include_reasoning "
    "prompt_logprobs guided_json guided_regex guided_choice guided_grammar structural_tag "
    "guided_decoding_backend guided_whitespace_pattern parallel_tool_calls best_of",
    ResponsesBody: "mm_processor_kwargs enable_response_messages previous_input_messages "
    "previous_response include max_tool_calls logit_bias stop top_logprobs",
    MessagesBody: "top_k chat_template_kwargs kv_transfer_params thinking output_config",
}


def described(kind: type[Fields], mark: str) -> list[str]:
    return [name for name, field in kind.model_fields.items() if mark in field.metadata]


def read(kind: type[Fields], **given: Any) -> GenerationRequest:
    ((function, least),) = [(f, least) for body, f, least in BODIES if body is kind]
    return function(kind.model_validate({**least, **given}), SERVED)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_field_changes_something_or_is_inert_or_refused(kind: type[Fields], name: str) -> None:
    if name in OFF:
        allowed, other = OFF[name]
        assert read(kind, **{name: allowed}) == read(kind)
        with pytest.raises(ValueError, match=name):
            read(kind, **{name: other})
    elif name in described(kind, "inert"):
        assert read(kind, **{name: "x"}) == read(kind)
    elif name == "model":
        assert read(kind, model="tiny") == read(kind)
        with pytest.raises(RequestError, match="`model` is 'x'"):
            read(kind, model="x")
    elif name in STRUCTURED:
        assert read(kind, **{name: STRUCTURED[name]}).params != read(kind).params
    else:
        needed = NEEDED.get(name, {})
        if name in ("tool_choice", "parallel_tool_calls"):
            needed = {"tools": TOOLS[kind]}
        value = HONOURED[name] if name != "tools" else TOOLS[kind]
        value = True if (kind, name) == (ChatBody, "logprobs") else value
        value = {"type": "any"} if (kind, name) == (MessagesBody, "tool_choice") else value
        assert read(kind, **{**needed, name: value}) != read(kind, **needed)


@pytest.mark.parametrize(("kind", "name"), FOREIGN)
def test_a_field_is_taken_where_it_changes_nothing_and_refused_elsewhere(
    kind: type[Fields], name: str
) -> None:
    assert name not in kind.model_fields
    harmless, instead, _ = kind.foreign[name]
    for value in (None, *harmless):
        assert read(kind, **{name: value}) == read(kind)
    with pytest.raises(ValidationError) as caught:
        read(kind, **{name: ["?"]})
    error = field_error(kind, caught.value.errors())
    assert (error.field, error.value, error.remedy) == (name, ["?"], instead)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_null_is_left_out(kind: type[Fields], name: str) -> None:
    if not kind.model_fields[name].is_required():
        assert read(kind, **{name: None}) == read(kind)


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        (ChatBody, chat_params.CompletionCreateParamsBase),
        (CompletionBody, completion_params.CompletionCreateParamsBase),
        (ResponsesBody, response_params.ResponseCreateParamsBase),
        (MessagesBody, message_params.MessageCreateParamsBase),
        (MessagesBody, beta_message_params.MessageCreateParamsBase),
        (CountBody, count_params.MessageCountTokensParams),
        (StreamOptions, ChatCompletionStreamOptionsParam),
        (ReasoningOptions, Reasoning),
        (CacheOptions, response_params.PromptCacheOptions),
    ],
)
def test_every_key_of_a_public_schema_is_known(kind: type[Fields], theirs: Any) -> None:
    known = kind.model_fields.keys() | kind.foreign.keys()
    assert theirs.__annotations__.keys() - known <= {"betas"}  # which travels as a header


@pytest.mark.parametrize(("kind", "names"), VLLM.items())
def test_every_key_of_vllms_is_known(kind: type[Fields], names: str) -> None:
    both = "" if kind is MessagesBody else VLLM_SAMPLING
    known = kind.model_fields.keys() | kind.foreign.keys()
    assert {*names.split(), *both.split()} - known == set()


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
    inert = {name for body in bodies for name in described(body, "inert")}
    inert.add("stream_options.include_obfuscation")
    section = text.split("### Inert fields")[1].split("\n#")[0]
    assert set(re.findall(r"^- `([\w.]+)`", section, re.MULTILINE)) == inert
    foreign = CompletionBody.foreign | ChatBody.foreign
    section = text.split("### Fields taken at some values\n")[1].split("\n#")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    assert table == [
        f"| `{name}` | {taken(one)} | {one.instead} |" for name, one in foreign.items()
    ]
    honoured = {name for body in bodies for name in body.model_fields}
    honoured |= {f"speculative.{name}" for name in Speculative.model_fields}
    honoured |= {f"stream_options.{name}" for name in StreamOptions.model_fields}
    assert rows(text, "Parameters") == honoured - inert


def taken(foreign: Foreign) -> str:
    """The values that a field may have, as JSON."""
    values = dict.fromkeys(json.dumps(value) for value in foreign.harmless if value is not None)
    return ", ".join(f"`{value}`" for value in values) or "null alone"


def rows(text: str, title: str) -> set[str]:
    section = text.split(f"### {title}\n")[1].split("\n#")[0]
    return {name for row in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
            for name in re.findall(r"`([\w.]+)`", row)}  # fmt: skip


@pytest.mark.parametrize("kind", [ResponsesBody, MessagesBody])
def test_the_lists_of_other_apis_are_those_of_the_code(kind: type[Fields]) -> None:
    text, title = (ROOT / "docs" / "server.md").read_text(encoding="utf-8"), kind.__name__[:-4]
    section = text.split(f"### {title}\n")[1].split("\n#")[0]
    own = {*kind.model_fields} - {*SamplingFields.model_fields}
    listed = section.split("- inert:")[1].split("\n- ")[0]
    inert = own & set(re.findall(r"`(\w+)`", listed))
    assert inert == set(described(kind, "inert"))
    assert rows(text, title) == own - inert
    listed = section.split("- taken at some values:")[1].split("\n\n")[0].replace("\n ", "")
    of_all = SamplingFields.foreign.keys()
    for name, foreign in kind.foreign.items():
        values = taken(foreign).replace("`", "")
        assert (f"`{name}` ({values})" in listed) == (name not in of_all)


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
        ({"prompt": []}, "prompt", "at least one prompt"),
        ({"prompt": ["a", ""]}, "prompt", "at least one token"),
        ({"prompt": [5000]}, "prompt", "[0, 4096)"),
        ({"store": 1, "best_of": 2}, "best_of", "left out, or 1. Ask for `n` samples"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "with `stream`"),
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
        ({"priority": 1}, "priority", "0 or left out"),
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
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "with `guided_regex`"),
        ({"suffix": "x"}, "suffix", "left out, or ''. Write the prompt"),
        ({"logprobs": -1}, "logprobs", "whole vocabulary"),
        ({"cache_salt": ""}, "cache_salt", "1 to 1024"),
        ({"request_id": "a b"}, "request_id", "matches"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ({"detokenize": False, "stop": "x"}, "stop", "`stop_token_ids`"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "`max_tok"),
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
def test_white_space_is_requested_next_to_a_schema(name: str) -> None:
    """As in vLLM, keys about white space join the schema; a second schema is refused."""
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
def test_a_structure_next_to_tools_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(RequestError, match="a JSON schema: with `tools`") as caught:
        read(ChatBody, tools=TOOLS[ChatBody], **{name: STRUCTURED[name]})
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["response_format", "guided_json"])
def test_json_next_to_tools_is_one_of_two_ways_to_answer(name: str) -> None:
    asked = read(ChatBody, tools=TOOLS[ChatBody], **{name: STRUCTURED[name]})
    grammar = dict(asked.params.structured_outputs or {})["grammar"]  # type: ignore[arg-type]
    assert grammar.startswith('start: call ("\\n" call)* | answer')
    assert asked.parsing is not None
    assert (asked.parsing.calls_or_text, asked.parsing.only_calls) == (True, False)


def test_what_is_asked_of_speculation_shows_in_the_answers_of_every_api(http: httpx.Client) -> None:
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
        reader, form = EventReader(asked), CompletionWriter(asked, "m")
        events = [event for delta in deltas for event in reader.read(PromptDelta(0, delta))]
        by_choice = [[event for event in events if event.choice == i] for i in range(3)]
        told = [form.whole_choice(some).get("prompt_logprobs") for some in by_choice]
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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "a JSON object"),
        (b"{", "JSON: Expecting property name enclosed in double quotes, at character"),
        (b"[1]", "a JSON object"),
        (b'"x"', "a JSON object"),
        (b'{"prompt": "\xff"}', r"JSON in UTF-8, not b'\xff'"),
        (b'{"seed": 1e400}', "JSON with finite numbers, not 1e400"),
        (b'{"seed": %b}' % (b"1" * 5000), "JSON: Exceeds the limit (4300 digits)"),
    ],
)
def test_a_body_that_is_none(http: httpx.Client, content: bytes, reason: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"The body must be {reason}")


def test_a_body_that_is_compressed(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = http.post("/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert answer.status_code == 415
    assert "without `Content-Encoding: gzip`" in answer.json()["error"]["message"]


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
    served = ServedModel(
        ("t",), "t", 9, 0, SamplingParams(top_k=7, max_tokens=5), (), "", ServeOptions()
    )
    asked = read_completion(CompletionBody(prompt="a", top_p=0.5), served)
    assert (asked.params.top_k, asked.params.top_p, asked.params.max_tokens) == (7, 0.5, 5)
