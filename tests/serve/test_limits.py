"""Bodies, prompts, templates, origins and logs: what is refused, and what is never shown."""

from __future__ import annotations

import json
import logging
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken import AsyncEngine
from foretoken.errors import ConfigError, ProcessingError, StepError
from foretoken.serve.command import start, with_defaults
from foretoken.serve.errors import refusal
from foretoken.serve.limits import json_depth
from foretoken.serve.options import ServeOptions
from tests.project.source import ROOT
from tests.serve.running import Running, running
from tests.support.asynchronous import PATIENCE

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def small(target: Path) -> Iterator[Running]:
    options = ServeOptions(
        max_body_bytes=5000, max_header_bytes=2000, max_json_depth=5, max_json_values=1000,
        max_prompt_chars=300, max_samples=4, max_answer_logprobs=600,
        trust_request_chat_template=True, allowed_origins=("http://a.example",), api_key="k3y",
    )  # fmt: skip
    with running(AsyncEngine(str(target)), options) as server:
        yield server


@pytest.fixture
def client(small: Running) -> Iterator[httpx.Client]:
    key = {"Authorization": "Bearer k3y"}
    with httpx.Client(base_url=small.url, headers=key, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "a" * 300, "max_tokens": 1}, 400, "context"),  # of 256 tokens: not our limit
        ({"prompt": "a" * 301}, 400, "at most 300, for a context"),
        ({"prompt": [5] * 301}, 400, "at most 300, for a context"),
        ({"prompt": ["a"] * 5}, 400, "at most 4: `n` for every prompt"),
        ({"prompt": ["a", "b", "c"], "n": 2}, 400, "at most 4: `n` for every prompt"),
        ({"prompt": "a", "stop": ["x"] * 65}, 400, "at most 64"),
        ({"prompt": "a", "metadata": [[[[1]]]]}, 200, ""),
        ({"prompt": "a", "metadata": [[[[[1]]]]]}, 400, "more than 5 deep"),
        ({"prompt": "a" * 5000}, 413, "at most 5000 bytes"),
        ({f"k{i}": 0 for i in range(300)}, 400, "256 keys"),
        ({"prompt": "a", "user": [[]] * 498}, 200, ""),
        ({"prompt": "a", "user": [[]] * 501}, 400, "at most 1000 commas"),
        ({"prompt": "a" + 1000 * ","}, 400, "at most 1000 commas"),
        ({"prompt": "[" * 200, "max_tokens": 1}, 200, ""),
    ],
)
def test_sizes(client: httpx.Client, body: dict[str, Any], status: int, said: str) -> None:
    answer = client.post(PATH, json={"max_tokens": 1, **body})
    assert answer.status_code == status
    assert said in answer.text


def test_conversations_and_texts_to_encode_are_bounded_too(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "a" * 301}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages, "chat_template": "{{ messages }}"}),
        ("/tokenize", {"messages": messages, "chat_template": "{{ messages }}"}),
        ("/tokenize", {"prompt": "a" * 301}),
        ("/detokenize", {"tokens": [5] * 301}),
    ):
        answer = client.post(path, json=body)
        assert (answer.status_code, "at most 300" in answer.text) == (400, True)


def test_a_body_of_unknown_length_is_bounded(client: httpx.Client) -> None:
    answer = client.post(PATH, content=iter([b"x" * 4000, b"x" * 4000]))
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("asked", "fits", "more"),
    [
        ({"logprobs": 2, "n": 2, "max_tokens": 100}, {}, {"max_tokens": 101}),
        ({"prompt_logprobs": 9, "n": 4}, {"prompt": "a" * 60}, {"prompt": "a" * 61}),
        ({"logprobs": 5, "n": 4, "echo": True}, {"prompt": "a" * 24}, {"prompt": "a" * 25}),
        ({"prompt": ["a", "b"], "logprobs": 9}, {"max_tokens": 30}, {"max_tokens": 31}),
        ({"speculative": {"trace": True}, "n": 4}, {"max_tokens": 150}, {"max_tokens": 151}),
        ({"prompt": [5] * 300, "logprobs": 1, "max_tokens": None}, None, {}),  # of the context
    ],
)
def test_logprobs_of_one_answer_are_bounded(
    client: httpx.Client, asked: dict[str, Any], fits: dict[str, Any] | None, more: dict[str, Any]
) -> None:
    body = {"prompt": "a", "max_tokens": 1, "ignore_eos": True, **asked}
    if fits is not None:
        assert client.post(PATH, json={**body, **fits}).status_code == 200
    answer = client.post(PATH, json={**body, **more})
    assert answer.status_code == 400
    told = "at most 600 in one answer (--max-answer-logprobs)" if fits is not None else "context"
    assert told in answer.json()["error"]["message"]
    names = ("logprobs", "prompt_logprobs", "speculative.trace", "prompt")
    assert answer.json()["error"]["param"] in names


def test_an_answer_of_any_length_ends_where_its_logprobs_do(client: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ messages }}"}
    body = {**asked, "ignore_eos": True, "logprobs": True, "top_logprobs": 9}
    for n in (1, 2):
        answer = client.post("/v1/chat/completions", json={**body, "n": n}).json()
        assert [len(c["logprobs"]["content"]) for c in answer["choices"]] == [60 // n] * n
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["prediction", "bad_words", "stop"])
def test_texts_other_than_the_prompt_are_bounded(client: httpx.Client, name: str) -> None:
    text: Any = "ab" * 200
    asked = {"type": "content", "content": text} if name == "prediction" else [text]
    answer = client.post(PATH, json={"prompt": "a", name: asked})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("responses", '"input": "a", "text": {"format": {"type": "text", "name": VALUE}}'),
        ("responses", '"input": "a", "tools": [{"name": "f", "parameters": {"a": VALUE}}]'),
        ("completions", '"prompt": "a", "user": VALUE'),
        ("completions", '"prompt": "a", "temperature": VALUE'),
    ],
)
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_has_not_are_refused_wherever_they_stand(
    http: httpx.Client, path: str, body: str, value: str
) -> None:
    headers = {"Content-Type": "application/json"}
    content = "{" + body.replace("VALUE", value) + "}"
    answer = http.post(f"/v1/{path}", content=content, headers=headers)
    assert (answer.status_code, f"not {value}" in answer.text) == (400, True)


def test_what_takes_long_to_read_is_refused_at_once(http: httpx.Client) -> None:
    many = 1_300_000
    for path, name, value in (
        ("/detokenize", "tokens", "1"),
        (PATH, "stop_token_ids", "1"),
        (PATH, "user", "[]"),
    ):
        content = f'{{"prompt": "a", "{name}": [{value}{f",{value}" * many}]}}'
        begun = time.process_time()  # of this process: the server's, too
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, "at most 131072 commas" in answer.text) == (400, True)
        assert time.process_time() - begun < 0.3, "it took seconds"
    listed = {"stop_token_ids": [1] * 1025, "logit_bias": {str(i): 0 for i in range(2**15 + 1)}}
    for name, given in listed.items():
        answer = http.post(PATH, json={"prompt": "a", name: given})
        assert answer.json()["error"]["param"] == name


def test_brackets_hide_in_no_other_encoding_and_errors_have_their_apis_shape(
    client: httpx.Client,
) -> None:
    deep = '{"prompt": "\u2200", "user": ' + "[" * 9 + "]" * 9 + "}"
    for encoding, said in (("utf-8", "nested"), ("utf-16-le", "UTF-8"), ("utf-32", "UTF-8")):
        answer = client.post("/v1/messages", content=deep.encode(encoding))
        assert answer.status_code == 400
        assert answer.json()["type"] == "error", "Anthropic's shape"
        assert said in answer.json()["error"]["message"]


def test_a_long_head_is_refused(client: httpx.Client) -> None:
    assert client.get("/v1/models", headers={"X": "y" * 1500}).status_code == 200
    answer = client.get("/v1/models", headers={"X": "y" * 2000})
    assert (answer.status_code, "at most 2000" in answer.text) == (431, True)


def test_depth_is_that_of_lists_and_objects_and_not_of_texts() -> None:
    draw = random.Random(3)

    def made(depth: int) -> Any:
        if not depth:
            return "".join(draw.choices('[]{}"\\' + string.ascii_letters, k=20))
        inner = made(depth - 1)
        return [made(0), inner] if draw.random() < 0.5 else {made(0): 1, "k": inner}

    for depth in range(30):
        assert json_depth(json.dumps(made(depth)).encode()) == depth
    assert json_depth(b"[" * 10_000_000) == 10_000_000
    assert json_depth(b'"' * 1_000_001 + b"[") == 0, "it is within a text"
    assert json_depth(b'"' * 1_000_000 + b"[") == 1
    assert json_depth(rb'["\\", ["\"[", "\\\"["]]') == 2
    begun = time.process_time()  # for the fewest bytes a text has two
    assert json_depth(b"[" * 90 + b'""' * 4 * 2**20) == 90
    assert time.process_time() - begun < 1, "it took seconds"


def test_a_template_comes_from_a_request_only_where_that_is_allowed(
    client: httpx.Client, http: httpx.Client
) -> None:
    body = {"messages": [{"role": "user", "content": "{{ 7 * 7 }}"}]}
    template = {"chat_template": "{{ messages[0].content }}"}
    ids = client.post("/tokenize", json={**body, **template}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "{{ 7 * 7 }}"
    hidden = {"chat_template_kwargs": template}
    for path in ("/tokenize", "/v1/chat/completions"):
        for given in (template, hidden):
            answer = http.post(path, json={**body, **given})
            assert (answer.status_code, "chat_template" in answer.text) == (400, True)


def test_pages_of_other_origins_call_only_where_that_is_allowed(
    client: httpx.Client, http: httpx.Client
) -> None:
    asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    for caller, allowed in ((client, "http://a.example"), (http, None)):
        for method, path in (("OPTIONS", PATH), ("GET", "/health")):
            answer = caller.request(method, path, headers=asked)
            assert answer.headers.get("access-control-allow-origin") == allowed
    asked["Origin"] = "http://b.example"
    assert "access-control-allow-origin" not in client.get("/health", headers=asked).headers


def test_a_key_is_never_shown(small: Running) -> None:
    options = ServeOptions(api_key="k3y")
    assert "k3y" not in repr(options)
    for headers in ({}, {"Authorization": "Bearer k3"}, {"Authorization": "k3y"}):
        answer = httpx.post(small.url + PATH, headers=headers, content=b"x" * 9000)
        assert (answer.status_code, "k3y" in answer.text) == (401, False)


@pytest.mark.parametrize(
    ("host", "key", "exposed"),
    [
        ("127.0.0.1", None, False),
        ("::1", None, False),
        ("localhost", None, False),
        ("0.0.0.0", None, True),
        ("10.1.2.3", None, True),
        ("a.example", None, True),
        ("0.0.0.0", "key", False),
    ],
)
def test_who_can_be_reached_without_a_key_is_warned(
    host: str, key: str | None, exposed: bool
) -> None:
    assert ServeOptions(host=host, api_key=key).is_exposed == exposed


@pytest.mark.parametrize("wrapped", [None, StepError, ProcessingError])
def test_logs_hold_no_text_of_requests(caplog: pytest.LogCaptureFixture, wrapped: Any) -> None:
    with caplog.at_level(logging.INFO):
        try:
            raise ValueError("the prompt is: my secret")
        except ValueError as error:
            told = wrapped(f"it says: {error}") if wrapped else error
            told.__cause__ = error if wrapped else None
            refusal(told)
    assert "ValueError" in caplog.text
    assert "test_limits.py" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("given", "waiting", "seconds"),
    [({}, 1024, 0.15), ({"max_num_waiting": 5}, 5, 0.15), ({"max_step_seconds": 2.0}, 1024, 2.0)],
)
def test_the_queue_and_the_steps_of_a_server_are_bounded(
    given: dict[str, Any], waiting: int, seconds: float
) -> None:
    """On a GPU no step has a longest time."""
    loaded: dict[str, Any] = {}

    def load(**options: Any) -> Any:
        loaded.update(options)
        raise ConfigError("model", "x", "not loaded")

    engine = {"model": "tiny-python", "device": "cpu", **given}
    with pytest.raises(ConfigError, match="not loaded"):
        start(engine, ServeOptions(port=0), lambda line: None, load)
    assert (loaded["max_num_waiting"], loaded["max_step_seconds"]) == (waiting, seconds)
    assert with_defaults(given, "cuda") == {"max_num_waiting": waiting, **given}


def test_the_limits_documented_are_the_options() -> None:
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    for name in ServeOptions.__dataclass_fields__:
        assert f"`--{name.replace('_', '-')}`" in text
