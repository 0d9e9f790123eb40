"""The embedded model by its own template, through every API; histories as clients echo them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from foretoken import AsyncEngine
from foretoken.serve.options import ServeOptions
from tests.long.documented import Documented, commands
from tests.serve.running import post, running
from tests.serve.test_tools import AREA
from tests.support.asynchronous import PATIENCE

TEXT = "def area(width, height):"
USER: Any = {"role": "user", "content": TEXT}
FUNCTION: Any = {"name": "area", "description": "x", "parameters": AREA}
TOOL: Any = {"type": "function", "function": FUNCTION}
FORCED: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
SHORT: Any = {"model": "tiny-python", "max_tokens": 60, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = AsyncEngine("tiny-python", {"method": "draft_model"}, threads=1, num_blocks=512)
    with running(engine, ServeOptions()) as server:
        yield server.url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as client:
        yield client


def prompt(http: httpx.Client, *messages: Any) -> str:
    answer = post(http, "/tokenize", messages=[USER, *messages])
    assert "tokens" in answer, answer
    return str(post(http, "/detokenize", tokens=answer["tokens"])["prompt"])


def test_every_api_answers_from_the_clone(
    http: httpx.Client, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    chat = client.chat.completions.create(messages=[USER], **SHORT)
    said = chat.choices[0].message.content
    asked: Any = {"model": "tiny-python", "temperature": 0}
    assert client.responses.create(input=TEXT, max_output_tokens=60, **asked).output_text == said
    (block,) = claude.messages.create(
        messages=[USER], model="tiny-python", max_tokens=60, extra_body={"temperature": 0}
    ).content
    assert block.type == "text"
    assert block.text == said
    (call,) = (
        client.chat.completions.create(messages=[USER], **FORCED, **SHORT)
        .choices[0]
        .message.tool_calls
        or ()
    )
    assert call.type == "function"
    assert json.loads(call.function.arguments).keys() == {"w", "of"}


LOCAL = "http://127.0.0.1:8000"  # another one is of TLS, or of a proxy: tests/serve/test_deploy.py
EXAMPLES = [c for c in commands() if c.words[0] == "curl" and c.words[1].startswith(LOCAL)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.words[1][-16:])
def test_an_example_of_the_documents_is_answered(http: httpx.Client, example: Documented) -> None:
    words = example.words
    path = words[1].removeprefix(LOCAL)
    answer = http.post(path, json=json.loads(words[words.index("-d") + 1]))
    assert answer.status_code == 200, answer.text


def test_the_template_shows_all_of_a_conversation(http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "area", "arguments": '{"w": 1}'}}
    text = prompt(
        http, {"role": "assistant", "content": "    return 1\n", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "12\n13"},
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "area("},
    )  # fmt: skip
    assert text == (
        f"{TEXT}\n    return 1\n"
        '<tool_call>\n{"name": "area", "arguments": {"w": 1}}\n</tool_call>\n'
        "# 12\n# 13\n# Be brief.\narea(\n"
    )
    usage = post(http, "/v1/chat/completions", messages=[USER], tools=[TOOL], max_tokens=1)["usage"]
    assert usage["prompt_tokens"] > 60, "functions are shown"


ANSWER: dict[str, Any] = {"role": "assistant", "content": "x = 1"}
CALL = {"id": "c1", "type": "function", "function": {"name": "area", "arguments": '{"w": 1}'}}
NULLS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls", "name",
                       "reasoning_content", "reasoning"))  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "plain"),
    [
        ({**ANSWER, **NULLS}, ANSWER),
        ({**ANSWER, "annotations": [], "tool_calls": [], "id": "m1", "status": "completed",
          "phase": "final_answer", "type": "message", "parsed": {"x": 1},
          "provider_specific_fields": {}}, ANSWER),
        ({**ANSWER, "content": [{"type": "output_text", "text": "x = 1", "annotations": []}]},
         ANSWER),
        ({"role": "assistant", "content": None, "refusal": "x = 1"}, ANSWER),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "x = 1"}]}, ANSWER),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": "why"},
         {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None, "function_call": CALL["function"]},
         {"role": "assistant", "content": None, "tool_calls": [CALL]}),
        ({"role": "function", "name": "area", "content": "12"},
         {"role": "tool", "tool_call_id": "c1", "content": "12"}),
        ({"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
         {"role": "system", "content": "a"}),
    ],
)  # fmt: skip
def test_what_says_nothing_changes_nothing(http: httpx.Client, sent: Any, plain: Any) -> None:
    assert prompt(http, sent) == prompt(http, plain)


class Area(BaseModel):
    """Of something."""

    w: int


WAYS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda given: given,
    "model_dump": lambda given: given.model_dump(warnings=False),  # of `parsed`, by the SDK
    "to_dict": lambda given: given.to_dict(warnings=False),
    "json": lambda given: json.loads(given.model_dump_json(warnings=False)),
}


@pytest.fixture(scope="module")
def answers(client: openai.OpenAI) -> list[Any]:
    """Messages of chats: a text, a call, and both as `parse` returns them."""
    asked: Any = {**SHORT, "messages": [USER], "max_tokens": 40}
    tools = [openai.pydantic_function_tool(Area, name="area")]
    forced: Any = {**asked, **FORCED, "tools": tools}
    done: list[Any] = [
        client.chat.completions.create(**asked),
        client.chat.completions.create(**forced),
        client.chat.completions.parse(**forced),
        client.chat.completions.parse(**asked, response_format=Area),
    ]
    return [one.choices[0].message for one in done]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of `parsed`, in the SDK
@pytest.mark.parametrize("way", WAYS)
def test_answers_of_chats_are_sent_back(
    http: httpx.Client, client: openai.OpenAI, answers: list[Any], way: str
) -> None:
    for message in answers:
        calls = [
            {"id": one.id, "type": "function", "function": {
                "name": one.function.name, "arguments": one.function.arguments}}
            for one in message.tool_calls or ()
        ]  # fmt: skip
        plain: Any = {"role": "assistant", "content": message.content}
        plain |= {"tool_calls": calls} if calls else {}
        more: Any = [{"role": "tool", "tool_call_id": one["id"], "content": "2"} for one in calls]
        back: Any = [USER, WAYS[way](message), *more, USER]
        done = client.chat.completions.create(model="tiny-python", messages=back, max_tokens=1)
        assert done.usage
        wanted = post(http, "/tokenize", messages=[USER, plain, *more, USER])["count"]
        assert done.usage.prompt_tokens == wanted


@pytest.fixture(scope="module")
def responses(client: openai.OpenAI) -> list[Any]:
    """Outputs of responses: a text, and a call."""
    asked: Any = {"model": "tiny-python", "input": TEXT, "temperature": 0, "max_output_tokens": 40}
    tool: Any = {"type": "function", **FUNCTION, "strict": True}
    called = client.responses.create(**asked, tools=[tool], tool_choice="required")
    return [client.responses.create(**asked).output, called.output[:1]]


@pytest.mark.parametrize("way", WAYS)
def test_items_of_responses_are_sent_back(
    client: openai.OpenAI, responses: list[Any], way: str
) -> None:
    refusal: Any = {"type": "refusal", "refusal": "no"}
    for output in responses:
        history: Any = [USER, *map(WAYS[way], output)]
        if output[0].type == "function_call":
            result = {"type": "function_call_output", "output": "2", "id": None, "status": None}
            history.append({**result, "call_id": output[0].call_id, "name": None})
        history.append({"type": "message", "role": "assistant", "content": [refusal], "id": "m"})
        done = client.responses.create(input=history, model="tiny-python", max_output_tokens=2)
        assert done.usage
        assert done.usage.input_tokens > 30


@pytest.fixture(scope="module")
def messages(claude: anthropic.Anthropic) -> list[anthropic.types.Message]:
    """Messages of Anthropic's API: a text, and a call."""
    asked: Any = {"model": "tiny-python", "messages": [USER], "max_tokens": 40}
    tool: Any = {"name": "area", "input_schema": AREA}
    forced: Any = {"tools": [tool], "tool_choice": {"type": "tool", "name": "area"}}
    return [claude.messages.create(**asked), claude.messages.create(**asked, **forced)]


@pytest.mark.parametrize("way", WAYS)
def test_blocks_of_messages_are_sent_back(
    claude: anthropic.Anthropic, messages: list[anthropic.types.Message], way: str
) -> None:
    for done in messages:
        back: Any = [WAYS[way](block) for block in done.content]
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "2", "is_error": False}
            for block in done.content
            if block.type == "tool_use"
        ]
        system: Any = {"role": "system", "content": "Be brief."}
        for turn in ({"role": "assistant", "content": back}, done.to_param()):
            history: Any = [USER, turn, {"role": "user", "content": results or TEXT}, system]
            counted = claude.messages.count_tokens(model="tiny-python", messages=history)
            assert counted.input_tokens > 30
