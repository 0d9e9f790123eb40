"""A front over replicas in this process, without Ray: what clients read, whatever happens.

`Local` asks real replicas, as Ray's handles do; `Scripted` says what a test tells it to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretoken import __version__
from foretoken.config import EngineConfig
from foretoken.errors import StepError
from foretoken.serve.errors import UnavailableError
from foretoken.serve.fleet.call import Call, Done, Head, Started
from foretoken.serve.fleet.config import Fleet, ReplicaOptions, fleet_model
from foretoken.serve.fleet.front import START_SECONDS, Front, ReplicaDiedError
from foretoken.serve.fleet.replica import Replica, State
from foretoken.serve.options import ServeOptions
from foretoken.serve.running import Lifetime
from foretoken.serve.server import Process, bind
from tests.serve.conftest import SPECULATION, TEMPLATE
from tests.serve.running import PROMPT, Running, connect, fail_later, request
from tests.support.asynchronous import PATIENCE, Gate, until

COMPLETIONS, CHAT, RESPONSES, MESSAGES = PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
TURNS = [{"role": "user", "content": "def area(width, height):"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 24, "logprobs": 2},
    CHAT: {"messages": TURNS, "max_tokens": 24},
    RESPONSES: {"input": TURNS, "max_output_tokens": 24},
    MESSAGES: {"messages": TURNS, "max_tokens": 24},
}
LONG = {"prompt": "abc", "max_tokens": 90, "ignore_eos": True}
SMALL = ServeOptions(served_model_name=("small",), chat_template=TEMPLATE)
DIED = ReplicaDiedError("The replica that answered has died.")
STREAM = Head(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
JSON = Head(200, [(b"content-type", b"application/json"), (b"content-length", b"90")])
TAKEN = Started("fake-1")
HANG = object()
Pair = tuple[Replica, Replica]


class Local:
    """Replicas in this process.
    choose: which of them takes a call
    left: bytes of an answer after which its replica dies
    """

    def __init__(self, names: Sequence[str], *replicas: Replica) -> None:
        self.names, self.replicas = names, replicas
        self.choose, self.left = 0, 10**9
        self.calls: list[Call] = []

    async def answer(self, call: Call) -> AsyncGenerator[Any, None]:
        self.calls.append(call)
        left = self.left
        async with aclosing(self.replicas[self.choose].answer(call)) as pieces:
            async for piece in pieces:
                if isinstance(piece, bytes):
                    piece, left = piece[:left], left - len(piece)
                yield piece
                if left <= 0:
                    raise DIED

    async def call_all(self, method: str, seconds: float) -> list[Any]:
        return [await getattr(replica, method)() for replica in self.replicas]


class Scripted:
    """Yields pieces, raises errors, or hangs; `said` has the results of `call_all` by method."""

    def __init__(self, *script: Any, names: Sequence[str] = ("fake",), **said: list[Any]) -> None:
        self.names, self.script, self.said = names, script, said
        self.calls: list[Call] = []
        self.num_closed = 0

    async def answer(self, call: Call) -> AsyncGenerator[Any, None]:
        self.calls.append(call)
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if step is HANG:
                    await asyncio.Event().wait()
                yield step
        finally:
            self.num_closed += 1

    async def call_all(self, method: str, seconds: float) -> list[Any]:
        return self.said.get(method, [])


class Fronted(NamedTuple):
    url: str
    front: Front
    http: httpx.Client
    thread: threading.Thread


@contextmanager
def fronted(
    *models: Any,
    options: ServeOptions = SMALL,
    start_seconds: float = START_SECONDS,
    grace: float = 5.0,
) -> Iterator[Fronted]:
    """A front on a real socket; it has ended afterwards, and its replicas have not."""
    one = {"model": "tiny-python"}
    each = tuple(fleet_model(one, model.names, ReplicaOptions(replicas=1)) for model in models)
    life = Lifetime(options, lambda: None, grace)
    front = Front(Fleet(each, options), models, life, start_seconds)
    process = Process(front.app, life, lambda line: None, is_front=True)
    with bind(ServeOptions(port=0)) as bound:
        thread = threading.Thread(target=process.run, kwargs={"sockets": [bound]})
        thread.start()
        until(lambda: process.started)
        url = "http://{}:{}".format(*bound.getsockname())
        try:
            with httpx.Client(base_url=url, timeout=PATIENCE) as http:
                yield Fronted(url, front, http, thread)
        finally:
            process.should_exit = True
            thread.join()


@contextmanager
def replica(model: Path | str, name: str, options: ServeOptions, **engine: Any) -> Iterator[Any]:
    """A replica in this process, which keeps its own settings of garbage collection and logs."""
    config = EngineConfig.parse(model=str(model), threads=1, max_num_batched_tokens=64, **engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.serve.fleet.replica.collect_when_idle", lambda: None)
        patch.setattr("foretoken.serve.fleet.replica.configure_logging", lambda level: None)
        made = Replica(config, options, __version__, name=name)
    try:
        yield made
    finally:
        asyncio.run(made._engine.close())


@pytest.fixture(scope="module")
def tiny() -> Iterator[Fronted]:
    """The embedded model with the options of `server`, which has no front."""
    options = ServeOptions(served_model_name=("tiny", "other"), chat_template=TEMPLATE)
    speculation = {"speculative_config": SPECULATION, "max_num_seqs": 8}
    with (
        replica("tiny-python", "a", options, **speculation) as made,
        fronted(Local(options.served_model_name, made)) as found,
    ):
        yield found


@pytest.fixture
def pair(target: Path) -> Iterator[Pair]:
    with replica(target, "a", SMALL) as first, replica(target, "b", SMALL) as second:
        yield first, second


def scrubbed(value: Any) -> Any:
    """The value without names, times and counts of cached tokens, which differ between servers."""
    if isinstance(value, dict):
        told = {"id", "item_id", "created", "created_at", "completed_at", "metrics"}
        told |= {"cached_tokens", "cache_read_input_tokens"}
        return {key: scrubbed(item) for key, item in value.items() if key not in told}
    return [scrubbed(item) for item in value] if isinstance(value, list) else value


def events(text: str) -> list[Any]:
    *found, end = text.split("\n\n")
    assert end == ""
    data = [re.fullmatch(r"(?:event: (\S+)\n)?data: (.*)", event) for event in found]
    assert all(data), "an event is half"
    read = [(m[1], m[2] if m[2] == "[DONE]" else json.loads(m[2])) for m in data if m]
    assert all(name is None or name == said["type"] for name, said in read)
    return [said for _, said in read]


def text_of(event: Any) -> str:
    if event == "[DONE]":
        return ""
    delta = event.get("delta", {})
    if isinstance(delta, str):
        return delta
    said = [c.get("text") or c.get("delta", {}).get("content") for c in event.get("choices", [])]
    return delta.get("text") or "".join(filter(None, said))


def gist(read: list[Any]) -> list[Any]:
    """The content of a stream that does not depend on timing, as the ends of steps do."""
    text = "".join(map(text_of, read))
    assert text
    kinds = [event.get("type", "chunk") if event != "[DONE]" else event for event in read]
    last = scrubbed(read[-2] if read[-1] == "[DONE]" else read[-1])
    last.pop("sequence_number", None)
    reasons = [choice.get("finish_reason") for choice in last.pop("choices", ())]
    return [text, [kind for kind, _ in groupby(kinds)], last, reasons]


def counted(found: Fronted, name: str) -> dict[str | None, float]:
    """A family's samples of this name, by replica."""
    text = found.http.get("/metrics").text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {s.labels.get("replica"): s.value for s in samples if s.name == name}


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.9, "seed": 7}])
@pytest.mark.parametrize("path", PATHS)
def test_answers_are_those_of_one_server(
    tiny: Fronted, http: httpx.Client, path: str, params: dict[str, Any]
) -> None:
    body = {"model": "tiny", **BODIES[path], **params}
    one, ours = (each.post(path, json=body) for each in (http, tiny.http))
    assert scrubbed(ours.json()) == scrubbed(one.json())
    assert (ours.status_code, ours.headers["x-replica"]) == (200, "a")
    own = {"date", "x-request-id", "x-replica", "content-length"}
    kept = [{k: v for k, v in each.headers.items() if k not in own} for each in (one, ours)]
    assert kept[0] == kept[1]
    assert int(ours.headers["content-length"]) == len(ours.content)
    one, ours = (each.post(path, json={**body, "stream": True}) for each in (http, tiny.http))
    for name in ("content-type", "cache-control", "x-accel-buffering"):
        assert ours.headers[name] == one.headers[name]
    assert gist(events(ours.text)) == gist(events(one.text))


def test_openai_s_client_reads_a_stream(tiny: Fronted) -> None:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="-", max_retries=0) as client:
        given: Any = {"model": "other", "temperature": 0, **BODIES[CHAT]}
        whole = client.chat.completions.create(**given)
        stream = client.chat.completions.create(**given, stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert said == whole.choices[0].message.content != ""
        assert [model.id for model in client.models.list()] == ["tiny", "other"]


@pytest.mark.parametrize(
    ("method", "path", "given"),
    [
        ("POST", CHAT, {"json": {"messages": TURNS, "temperature": -1}}),
        ("POST", MESSAGES, {"json": {"messages": TURNS, "max_tokens": 0}}),
        ("POST", COMPLETIONS, {"json": {"prompt": "a", "model": "nope"}}),
        ("POST", MESSAGES, {"json": {"messages": TURNS, "model": "nope", "max_tokens": 9}}),
        ("POST", COMPLETIONS, {"content": b"{", "headers": {"content-type": "application/json"}}),
        ("POST", COMPLETIONS, {"content": b"\xff", "headers": {"content-type": "text/plain"}}),
        ("POST", COMPLETIONS, {}),
        ("POST", COMPLETIONS, {"content": b"x" * (8 * 2**20 + 1)}),
        ("GET", COMPLETIONS, {}),
        ("POST", "/health", {}),
        ("GET", "/v1/models/nope", {}),
        ("GET", "/v1/models/other", {}),
        ("POST", "/nowhere", {"json": {}}),
        ("GET", "/health", {"headers": {"host": "example.org"}}),
        ("POST", "/tokenize", {"json": {"prompt": "a b"}}),
    ],
)  # fmt: skip
def test_errors_and_all_else_are_those_of_one_server(
    tiny: Fronted, http: httpx.Client, method: str, path: str, given: dict[str, Any]
) -> None:
    one, ours = (each.request(method, path, **given) for each in (http, tiny.http))
    assert (ours.status_code, scrubbed(ours.json())) == (one.status_code, scrubbed(one.json()))
    assert ours.headers["content-type"] == one.headers["content-type"]
    assert ours.headers.get("allow") == one.headers.get("allow")


def test_a_request_has_one_name_everywhere(pair: Pair, caplog: Any) -> None:
    local = Local(["small"], *pair)
    local.choose = 1
    with fronted(local) as found, caplog.at_level(logging.INFO, "foretoken"):
        answer = found.http.post(COMPLETIONS, json=LONG, headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert local.calls[-1].name == "mine"
        until(lambda: "request" in caplog.messages)
        fields = caplog.records[caplog.messages.index("request")].fields
    assert (fields["replica"], fields["status"], fields["complete"]) == ("b", 200, True)
    assert fields["completion_tokens"] == answer.json()["usage"]["completion_tokens"] == 90


def test_a_key_a_path_and_the_length_of_a_body_are_the_front_s(target: Path) -> None:
    options = replace(SMALL, api_key="k", root_path="/llm", max_body_bytes=500)
    key = {"authorization": "Bearer k"}
    with replica(target, "a", options) as made:
        local = Local(["small"], made)
        with fronted(local, Scripted(names=["second"]), options=options) as found:
            for root in ("", "/llm"):
                path, body = root + COMPLETIONS, {**LONG, "max_tokens": 2}
                assert found.http.post(path, json=body).status_code == 401
                assert found.http.post(path, json=body, headers=key).status_code == 200
                assert found.http.post(path, content=b"x" * 501, headers=key).status_code == 413
                named = found.http.get(f"{root}/v1/models/small", headers=key)
                assert named.json()["id"] == "small"
                wrong = found.http.post(f"{root}{MESSAGES}", json={"model": 5}, headers=key)
                assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
                assert found.http.get(f"{root}/load").json()["server_load"] == 0
            # Of requests that have no body none is kept, however long it is.
            answer = found.http.request("GET", "/version", content=b"x" * 5000, headers=key)
            assert answer.status_code in (200, 413)
            assert all(len(call.body) <= 500 for call in local.calls)


def test_models_are_told_apart_by_name(pair: Pair, target: Path) -> None:
    second = ServeOptions(served_model_name=("second", "org/2"))
    with replica(target, "c", second) as made:
        others = Local(second.served_model_name, made)
        with fronted(Local(["small"], *pair), others, Scripted(DIED, names=["down"])) as found:
            http = found.http
            listed = http.get("/v1/models").json()["data"]
            assert [card["id"] for card in listed] == ["small", "second", "org/2"]
            for card in listed:
                assert http.get(f"/v1/models/{card['id']}").json() == card
            for name, by in (("second", "c"), ("org/2", "c"), ("small", "a"), (None, "a")):
                answer = http.post(COMPLETIONS, json={**LONG, "model": name})
                assert (answer.status_code, answer.headers["x-replica"]) == (200, by)
            for path in (COMPLETIONS, MESSAGES):
                wrong = http.post(path, json={"model": "nope", **BODIES[path]})
                error = wrong.json()["error"]
                assert wrong.status_code == 404
                assert "one of small, second, org/2, down" in error["message"]
                assert ("code" in error) == (path == COMPLETIONS)
            wrong = http.get("/v1/models/nope")
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
            assert http.get("/health").status_code == 503, "nobody serves the third model"
            assert "down" in http.get("/health").json()["error"]["message"]


def test_metrics_are_those_of_all_replicas(pair: Pair) -> None:
    local = Local(["small"], *pair)
    with fronted(local) as found:
        for local.choose, size in ((0, 5), (0, 6), (1, 20)):
            found.http.post(COMPLETIONS, json={**LONG, "max_tokens": size})
        answer = found.http.get("/metrics")
        kinds = Counter(re.findall(r"^# TYPE (\S+)", answer.text, re.MULTILINE))
        assert set(kinds.values()) == {1}
        own = {"foretoken:replicas", "foretoken:replica_failures_total"}
        families = list(text_string_to_metric_families(answer.text))
        samples = [s for family in families for s in family.samples]
        assert {s.name for s in samples if "replica" not in s.labels} == own
        assert {s.labels["replica"] for s in samples if "replica" in s.labels} == {"a", "b"}
        assert len({(s.name, *sorted(s.labels.items())) for s in samples}) == len(samples)
        assert counted(found, "vllm:generation_tokens_total") == {"a": 11, "b": 20}
        assert counted(found, "vllm:request_generation_tokens_count") == {"a": 2, "b": 1}
        assert counted(found, "foretoken:replicas") == {None: 2}
        assert counted(found, "foretoken:replica_failures_total") == {None: 0}
        for one in pair:
            _, theirs = asyncio.run(one.metrics())
            assert {family.name for family in theirs} <= {family.name for family in families}


def test_health_while_one_replica_serves(pair: Pair) -> None:
    local = Local(["small"], *pair)
    with fronted(local) as found:
        for local.choose, status in ((0, 200), (1, 503)):
            failing = pair[local.choose]
            fail_later(failing._engine.engine, "step", "the step is broken", steps=0)
            for _ in range(2):
                answer = found.http.post(COMPLETIONS, json=LONG)
                assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
            for path in ("/health", "/health/ready", "/ping"):
                assert found.http.get(path).status_code == status
            with pytest.raises(StepError):
                asyncio.run(failing.check_health())
        told = found.http.get("/health").json()["error"]["message"]
        assert told.startswith("No replica of small is up. a: ")
        assert " b: " in told
        assert found.http.post("/ping").status_code == 503


def test_without_replicas_no_model_is_up() -> None:
    with fronted(Scripted(UnavailableError("none"))) as found:
        answer = found.http.get("/health")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "No replica of fake is up."
        assert found.http.get("/v1/models").json() == {"object": "list", "data": []}
        assert found.http.get("/load").json() == {"server_load": 0, "replicas": {}}
        assert counted(found, "foretoken:replicas") == {None: 0}
    with fronted(Scripted(state=[State("x", 1, "", 3), State("y", 2, "lost", 0)])) as found:
        assert found.http.get("/health").status_code == 200
        assert found.http.get("/load").json()["server_load"] == 3


@pytest.mark.parametrize("when", ["before the first token", "streaming", "whole"])
def test_a_client_that_leaves_ends_its_request(pair: Pair, when: str) -> None:
    engine = pair[0]._engine
    with fronted(Local(["small"], *pair)) as found, closing(Gate(engine)) as gate:
        with closing(connect(Running(found.url, engine))) as leaving:
            leaving.sendall(request({**LONG, "stream": when != "whole"}))
            until(lambda: engine.status.num_open == 1)
            if when == "streaming":
                gate.open(2)
                assert leaving.recv(10)
        until(lambda: engine.status.num_open == 0)
        until(lambda: not (found.front.life.open_requests or pair[0]._life.open_requests))
        gate.close()
        assert found.http.post(COMPLETIONS, json=LONG).status_code == 200


@pytest.mark.parametrize("script", [[HANG], [TAKEN, HANG], [TAKEN, STREAM, b"data: 1\n\n", HANG]])
def test_a_client_that_leaves_closes_the_answer(script: list[Any]) -> None:
    fake = Scripted(*script)
    with fronted(fake, start_seconds=PATIENCE) as found:
        with closing(connect(Running(found.url, Any))) as leaving:
            leaving.sendall(request(LONG))
            until(lambda: fake.calls)
        until(lambda: fake.num_closed == 1 and not found.front.life.open_requests)


@pytest.mark.parametrize(
    "script",
    [[DIED], [TAKEN, DIED], [TAKEN, JSON, DIED], [TAKEN, JSON, b'{"id": 1,\n\n "cho', DIED]],
)
@pytest.mark.parametrize("path", PATHS)
def test_what_dies_before_its_answer_is_503(path: str, script: list[Any]) -> None:
    with fronted(Scripted(*script)) as found:
        answer = found.http.post(path, json=BODIES[path])
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["content-length"]) == len(answer.content)
        error = answer.json()["error"]
        kind = "overloaded_error" if path == MESSAGES else "server_error"
        assert (error["message"], error["type"]) == (str(DIED), kind)
        assert ("code" in error) == (path != MESSAGES)
        assert counted(found, "foretoken:replica_failures_total") == {None: 1}


@pytest.mark.parametrize("script", [[], [TAKEN], [TAKEN, Done({})], [UnavailableError("busy")]])
def test_what_ends_without_an_answer_is_503_and_no_death(script: list[Any]) -> None:
    with fronted(Scripted(*script)) as found:
        assert found.http.post(COMPLETIONS, json=LONG).status_code == 503
        assert counted(found, "foretoken:replica_failures_total") == {None: 0}


def check_error(path: str, read: list[Any], num_before: int) -> None:
    """After `num_before` events comes the error event of the API, which ends the stream."""
    error, *end = read[num_before:]
    assert end == (["[DONE]"] if path in (COMPLETIONS, CHAT) else [])
    told = {"message": str(DIED), "param": None, "code": "unavailable"}
    theirs = {"type": "overloaded_error", "message": str(DIED)}
    assert error == {
        RESPONSES: {"type": "error", "sequence_number": num_before, **told},
        MESSAGES: {"type": "error", "error": theirs},
    }.get(path, {"error": {"type": "server_error", **told}})


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_is_cut_ends_by_an_event_after_whole_ones(path: str) -> None:
    three = [b'event: x\ndata: {"type":"x","n":"%d\xc3\xa9"}\n\n' % number for number in range(3)]
    stream, ends = b"".join(three), [0, *(len(b"".join(three[: n + 1])) for n in range(3))]
    cuts = sorted({end + by for end in ends for by in (-11, -2, -1, 0, 1, 9)} & {*range(999)})
    fake = Scripted()
    with fronted(fake) as found:
        for cut in (cut for cut in cuts if cut <= len(stream)):
            for size in (1, 7, 1000):
                parts = [stream[i : min(i + size, cut)] for i in range(0, cut, size)]
                fake.script = (TAKEN, STREAM, *parts, DIED)
                answer = found.http.post(path, json={**BODIES[path], "stream": True})
                num_whole = sum(0 < end <= cut for end in ends)
                assert (answer.status_code, answer.headers["x-replica"]) == (200, "fake-1")
                read = events(answer.text)
                assert [event["n"] for event in read[:num_whole]] == ["0é", "1é", "2é"][:num_whole]
                check_error(path, read, num_whole)
        assert counted(found, "foretoken:replica_failures_total") == {None: len(fake.calls)}


@pytest.mark.parametrize("path", PATHS)
def test_a_real_stream_is_cut_where_its_replica_dies(pair: Pair, path: str) -> None:
    local = Local(["small"], *pair)
    body = {**BODIES[path], "temperature": 0, "stream": True}
    with fronted(local) as found:
        said = "".join(map(text_of, events(found.http.post(path, json=body).text)))
        for local.left in (1, 150, 300, 450):  # the shortest stream has three events of 240
            read = events(found.http.post(path, json=body).text)
            num_before = next(i for i, e in enumerate(read) if "died" in str(e))
            check_error(path, read, num_before)
            assert said.startswith("".join(map(text_of, read[:num_before])))
            if path == RESPONSES:
                assert [e["sequence_number"] for e in read] == [*range(len(read))]
            until(lambda: pair[0]._engine.status.num_open == 0)
        assert counted(found, "foretoken:replica_failures_total") == {None: 4}


def test_clients_raise_what_a_stream_ends_by(pair: Pair) -> None:
    local = Local(["small"], *pair)
    local.left = 400
    given: Any = {"model": "small", "messages": TURNS, "stream": True, "max_tokens": 40}
    with fronted(local) as found:
        theirs = openai.OpenAI(base_url=f"{found.url}/v1", api_key="-", max_retries=0)
        with theirs, pytest.raises(openai.APIError, match="has died"):
            list(theirs.chat.completions.create(**given))
        claude = anthropic.Anthropic(base_url=found.url, api_key="-", max_retries=0)
        with claude, pytest.raises(anthropic.APIError, match="has died"):
            list(claude.messages.create(**given))


def test_what_no_replica_takes_is_refused_in_time() -> None:
    fake = Scripted(HANG)
    with fronted(fake, start_seconds=0.05) as found:
        answer = found.http.post(CHAT, json={**BODIES[CHAT], "stream": True})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "No replica took the request within 0.05 s" in answer.json()["error"]["message"]
        assert fake.num_closed == 1, "or somebody would take it yet"
        assert counted(found, "foretoken:replica_failures_total") == {None: 0}


def test_a_front_that_drains_answers_what_is_under_way(pair: Pair) -> None:
    local, body = Local(["small"], *pair), {**LONG, "stream": True}
    with (
        fronted(local) as found,
        ThreadPoolExecutor(1) as pool,
        closing(Gate(pair[0]._engine)) as gate,
    ):
        asked = pool.submit(httpx.post, found.url + COMPLETIONS, json=body, timeout=PATIENCE)
        until(lambda: pair[0]._engine.status.num_open == 1)
        assert found.http.get("/health/ready").status_code == 200
        found.front.life.drain()
        until(lambda: all(each._life.is_draining for each in pair))
        for path in PATHS:
            refused = found.http.post(path, json=BODIES[path])
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            error = refused.json()["error"]
            assert error["message"] == "The server ends and takes no more requests."
            assert ("code" in error) == (path != MESSAGES)
        assert len(local.calls) == 1, "replicas were not asked"
        assert found.http.get("/health/ready").status_code == 503
        assert found.http.get("/health").status_code == 200, "it lives"
        load = found.http.get("/load").json()
        assert load == {"server_load": 1, "replicas": {"a": 1, "b": 0}}
        gate.open()
        read = events(asked.result().text)
        assert read[-2]["choices"][0].get("stop_reason") is None
        assert read[-2]["choices"][0]["finish_reason"] == "length"
        until(lambda: not found.thread.is_alive())  # nothing is left to answer
        assert found.front.life.num_cut == 0


def test_what_takes_too_long_then_ends_with_what_there_is(target: Path) -> None:
    options = replace(SMALL, drain_timeout=0.2)
    with (
        replica(target, "a", options) as made,
        fronted(Local(["small"], made)) as found,
        closing(Gate(made._engine)) as gate,
        ThreadPoolExecutor(1) as pool,
    ):
        body = {**LONG, "stream": True}
        asked = pool.submit(httpx.post, found.url + COMPLETIONS, json=body, timeout=PATIENCE)
        until(lambda: made._engine.status.num_open == 1)
        gate.open(3)
        until(lambda: gate.asked == 4)
        found.front.life.drain()
        until(lambda: made._life.num_cut == 1)
        until(lambda: len(made._engine._worker._commands) >= 1)
        gate.open()
        last = events(asked.result().text)[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("length", "shutdown")


@pytest.mark.parametrize("begun", [[], [STREAM, b'data: {"n":1}\n\ndata: {"n']])
def test_what_a_replica_does_not_let_go_of_is_ended(begun: list[Any]) -> None:
    fake = Scripted(TAKEN, *begun, HANG)
    with (
        fronted(fake, options=ServeOptions(drain_timeout=0), grace=0.05) as found,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(httpx.post, found.url + CHAT, json=BODIES[CHAT], timeout=PATIENCE)
        until(lambda: fake.calls)
        found.front.life.drain()
        answer = asked.result()
        assert answer.status_code == (200 if begun else 503)
        read = events(answer.text) if begun else [{"n": 1}, answer.json(), "[DONE]"]
        assert (read[0], read[2]) == ({"n": 1}, "[DONE]")
        assert "did not end this request" in read[1]["error"]["message"]
        found.thread.join(PATIENCE)
        assert (found.front.life.num_cut, fake.num_closed) == (1, 1)
