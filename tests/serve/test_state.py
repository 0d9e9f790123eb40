"""Health, models, tokens, metrics, keys; requests that have lost their client or engine."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest
from typer.testing import CliRunner

from foretoken import AsyncEngine, __version__
from foretoken.cli.actions import Actions
from foretoken.cli.app import app
from foretoken.engine.worker import EngineStatus
from foretoken.errors import (
    CapacityError,
    ConfigError,
    EngineBrokenError,
    NonFiniteLogitsError,
    OverloadedError,
)
from foretoken.outputs import CompletionDelta, EngineMetrics, RequestDelta, RequestMetrics
from foretoken.serve.app import build_app
from foretoken.serve.errors import refusal
from foretoken.serve.metrics import Counts, EngineCollector, Histogram, RequestRecord, exposition
from foretoken.serve.options import ServeOptions
from foretoken.serve.running import PromptDelta
from tests.project.source import ROOT
from tests.serve.running import PROMPT, Running, connect, fail_later, post, request, running
from tests.support.asynchronous import PATIENCE, Gate, idle, until

LONG = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}


def test_health_version_and_documents(http: httpx.Client) -> None:
    for path in ("/health", "/health/ready", "/docs"):
        assert http.get(path).status_code == 200
    assert http.get("/version").json() == {"version": __version__}
    document = http.get("/openapi.json").json()
    paths = document["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/metrics"} <= paths.keys()
    page = http.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"(src|href)=\"?(https?:)?//", page.text)
    assert all(f"POST {path}<" in page.text for path in paths if "post" in paths[path])
    kinds = document["components"]["schemas"]
    for kind in ("ChatBody", "Speculative", "Tool", "MessagesBody"):
        assert f'id="{kind}"' in page.text
        assert all(f"<code>{name}</code>" in page.text for name in kinds[kind]["properties"])
    # What errors are said to be is what they are.
    assert "HTTPValidationError" not in kinds
    for path in ("/v1/completions", "/v1/messages", "/v1/models/{name}"):
        (method,) = paths[path].values()
        assert "422" not in method["responses"]
        schema = method["responses"]["4XX"]["content"]["application/json"]["schema"]
        answer = http.request("get" if "name" in path else "post", path, json={}).json()
        jsonschema_rs.validate(schema, answer)
        assert answer.keys() == schema["properties"].keys()


def test_models(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "other"]
    assert http.get("/v1/models/other").json()["max_model_len"] == 2048
    assert http.get("/v1/models/none").status_code == 404


def test_tokens_and_back(http: httpx.Client) -> None:
    found = post(http, "/tokenize", prompt=PROMPT)
    assert found["count"] == len(found["tokens"]) > 2
    assert post(http, "/detokenize", tokens=found["tokens"]) == {"prompt": PROMPT}
    messages = [{"role": "user", "content": "x"}]
    plain = post(http, "/tokenize", messages=messages)["tokens"]
    assert post(http, "/detokenize", tokens=plain) == {"prompt": "# x\n"}
    more = post(http, "/tokenize", messages=messages, chat_template_kwargs={"opening": "y"})
    assert post(http, "/detokenize", tokens=more["tokens"]) == {"prompt": "# x\ny"}
    same = post(http, "/tokenize", messages=messages, add_special_tokens=False)["tokens"]
    assert same == plain
    wrong: list[dict[str, Any]] = [
        {},
        {"prompt": "a", "messages": messages},
        {"prompt": "a", "return_token_strs": 1},
        {"prompt": "a", "continue_final_message": True},
        {"messages": messages, "add_special_tokens": 0},
    ]
    assert all("error" in post(http, "/tokenize", **body) for body in wrong)
    assert "[0, 4096)" in post(http, "/detokenize", tokens=[-1])["error"]["message"]


def test_load_balancers_and_tools_find_what_they_ask_for(
    server: Running, http: httpx.Client
) -> None:
    for method in ("GET", "POST"):
        assert http.request(method, "/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}
    with ThreadPoolExecutor(1) as pool, closing(Gate(server.engine)):
        answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "a"})
        until(lambda: server.engine.status.num_open == 1)
        assert http.get("/load").json() == {"server_load": 1}
    assert answer.result().status_code == 200
    info = http.get("/server_info").json()
    assert info["version"] == __version__
    assert info["served_model_names"] == ["tiny", "other"]
    assert info["foretoken_config"]["speculative_config"]["num_speculative_tokens"] == 5
    facts = http.get("/tokenizer_info").json()
    tokenizer = server.engine.engine.tokenizer
    assert facts["eos_token"] == tokenizer.eos_token
    assert facts["vocab_size"] == len(tokenizer)
    assert facts["chat_template"] == tokenizer.chat_template, "not that of --chat-template"


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/score", "/v1/score", "/pooling", "/rerank", "/v1/rerank", "/v2/rerank",
     "/classify", "/v1/audio/transcriptions", "/v1/images/generations", "/invocations",
     "/v1/files", "/nowhere"],
)  # fmt: skip
def test_what_this_server_does_not_do_is_said(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"model": "tiny", "input": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert error["message"].startswith(f"POST {path} is not here. This server generates text")
    assert "/v1/chat/completions" in error["message"]


def values(http: httpx.Client) -> dict[str, float]:
    lines = http.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.replace('model_name="tiny"', ""): float(value) for name, value in pairs}


def test_metrics_count(http: httpx.Client) -> None:
    before = values(http)
    for stream in (False, True):
        http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 30, "temperature": 0,
                                           "ignore_eos": True, "stream": stream})  # fmt: skip
    after = values(http)
    more = {name: after[name] - before.get(name, 0) for name in after}
    assert more["vllm:generation_tokens_total{}"] == 60
    assert more['vllm:request_success_total{finished_reason="length",}'] == 2
    assert more["vllm:prompt_tokens_total{}"] == more["vllm:prefix_cache_queries_total{}"] > 0
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert more[f"vllm:{name}_seconds_count{{}}"] == 2
    assert (
        more["vllm:time_per_output_token_seconds_count{}"]
        == (more["vllm:inter_token_latency_seconds_count{}"])
    )
    assert more["vllm:request_generation_tokens_sum{}"] == 60
    assert more['vllm:request_generation_tokens_bucket{le="50",}'] == 2
    assert more['vllm:request_generation_tokens_bucket{le="20",}'] == 0
    assert more["vllm:request_prompt_tokens_sum{}"] == more["vllm:prompt_tokens_total{}"]
    assert 0 < more["vllm:inter_token_latency_seconds_count{}"] < 60
    drafted = more["vllm:spec_decode_num_draft_tokens_total{}"]
    by_position = [v for k, v in more.items() if "num_draft_tokens_per_pos" in k]
    assert sum(by_position) == drafted > more["vllm:spec_decode_num_accepted_tokens_total{}"] > 0
    accepted = [v for k, v in more.items() if "num_accepted_tokens_per_pos" in k]
    assert sum(accepted) == more["vllm:spec_decode_num_accepted_tokens_total{}"]
    assert after["vllm:num_requests_running{}"] == after["vllm:kv_cache_usage_perc{}"] == 0


def test_phases_of_a_request_are_those_its_engine_tells() -> None:
    """One sample of 5 tokens: 0.5 s in the queue, a first token after 2 s, the last after 4 s."""
    counts = Counts()
    times = RequestMetrics(queue_time=0.5, time_to_first_token=2.0, tokens_per_second=5 / 4)
    sample = CompletionDelta(0, [1, 2, 3, 4, 5], "", "length")
    RequestRecord(counts).observe(
        PromptDelta(0, RequestDelta("r", [sample], True, None, [7] * 9, metrics=times))
    )
    found = {
        "queue_time_seconds": 0.5, "prefill_time_seconds": 1.5, "decode_time_seconds": 2.0,
        "inference_time_seconds": 3.5, "time_per_output_token_seconds": 0.5,
        "prompt_tokens": 9.0, "generation_tokens": 5.0,
    }  # fmt: skip
    for name, value in found.items():
        histogram = counts.histograms[f"request_{name}"]
        assert (histogram.sum, sum(histogram.counts)) == (value, 1), name
    left = CompletionDelta(0, [], "", "abort")
    delta = RequestDelta("r", [left], True, metrics=RequestMetrics())
    RequestRecord(counts).observe(PromptDelta(0, delta))
    assert sum(counts.histograms["request_queue_time_seconds"].counts) == 1, "it never had a slot"


def test_phases_of_a_request_add_up_to_its_time(http: httpx.Client) -> None:
    before = values(http)
    http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True})
    after = values(http)
    spent = {
        name: after[f"vllm:{name}_seconds_sum{{}}"] - before[f"vllm:{name}_seconds_sum{{}}"]
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time",
                     "request_inference_time", "e2e_request_latency",
                     "request_time_per_output_token")
    }  # fmt: skip
    assert min(spent.values()) > 0
    inference = spent["request_prefill_time"] + spent["request_decode_time"]
    assert spent["request_inference_time"] == pytest.approx(inference)
    assert spent["request_queue_time"] + inference <= spent["e2e_request_latency"]
    assert spent["request_time_per_output_token"] == pytest.approx(
        spent["request_decode_time"] / 39
    )


def test_the_cache_and_the_process_are_described(server: Running, http: httpx.Client) -> None:
    text = http.get("/metrics").text
    (line,) = (line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    pool = server.engine.engine.scheduler.pool
    assert f'block_size="{pool.block_size}"' in line
    assert f'num_gpu_blocks="{pool.num_blocks}"' in line
    found = values(http)
    assert found["process_resident_memory_bytes"] > 10**7
    assert found["process_cpu_seconds_total"] > 0


def test_the_metrics_documented_are_those_there_are(server: Running) -> None:
    families = EngineCollector(server.engine, Counts(), "x").collect()
    names = {family.name for family in families}
    same = {name: getattr(server.engine, name) for name in ("engine", "config")}
    adapting: Any = SimpleNamespace(**same, status=EngineStatus(), metrics=EngineMetrics(
        controlled_seconds=2, estimated_plain_seconds=3, realised_plain_seconds=4))  # fmt: skip
    more = [*EngineCollector(adapting, Counts(), "x").collect()]
    speedups = {family.name: family.samples[0].value for family in more[-2:]}
    assert speedups == {"foretoken:estimated_speedup": 1.5, "foretoken:realised_speedup": 2.0}
    assert not speedups.keys() & names, "K is fixed there"
    names |= speedups.keys()
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    section = text.split("## Metrics")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([\w:]+)` \|", section, re.MULTILINE)) == names
    # A scrape has counters and histograms by their samples' names.
    board = (ROOT / "docs" / "grafana.json").read_text(encoding="utf-8")
    drawn = set(re.findall(r"(?:vllm|foretoken):\w+", board))
    scraped = {
        re.match(r"[\w:]+", line)[0]  # type: ignore[index]
        for text in (exposition(EngineCollector(server.engine, Counts(), "x")).decode(),)
        for line in text.splitlines()
        if not line.startswith(("#", "process_"))
    }
    scraped |= {"vllm:request_success_total", *speedups}  # no request has ended in `Counts()`
    assert drawn <= scraped
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in drawn} == names


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram()
    for value, times in ((0.001, 1), (0.0011, 2), (1e6, 1)):
        histogram.observe(value, times)
    buckets = dict(histogram.buckets)
    assert (buckets["0.001"], buckets["0.0025"], buckets["300"], buckets["+Inf"]) == (1, 3, 3, 4)


def test_gauges_while_requests_run_and_after_their_clients_left(server: Running) -> None:
    """Streamed or not, waiting or running: nothing is left of requests without a reader."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool, closing(Gate(server.engine)) as gate:
        readers = []  # one that is collected closes its stream
        for number in (1, 2, 3):
            http = stack.enter_context(httpx.Client(base_url=server.url, timeout=PATIENCE))
            stream = http.stream("POST", "/v1/completions", json={**LONG, "stream": True})
            reader = pool.submit(lambda s=stream: stack.enter_context(s).iter_raw())
            until(lambda n=number: server.engine.status.num_open == n)
            gate.open(2)  # the first may have begun without it
            readers.append(reader.result())
            next(readers[-1])
        until(lambda: server.engine.status.num_running == 3)
        assert 0 < server.engine.status.kv_cache_usage < 1
        assert server.engine.status.num_open == 3
        with closing(connect(server)) as leaving:
            leaving.sendall(request({**LONG, "n": 4}))
            until(lambda: server.engine.status.num_open == 4)
    until(lambda: server.engine.status.num_open == 0)
    asyncio.run(idle(server.engine))
    status = server.engine.status
    assert (status.num_running, status.num_waiting, status.kv_cache_usage) == (0, 0, 0)


def test_a_key_is_asked_for_and_probes_need_none(target: Path) -> None:
    with running(AsyncEngine(str(target)), ServeOptions(api_key="secret")) as server:
        for key, status in (("secret", 200), ("secre", 401), ("geheim ü", 401)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            answer = httpx.get(f"{server.url}/v1/models", headers=headers)
            assert answer.status_code == status
            assert "secret" not in answer.text
        for path in ("/health", "/metrics", "/docs", "/openapi.json"):
            assert httpx.get(server.url + path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0).models.list()


def test_an_engine_that_fails_answers_everybody(target: Path, caplog: Any) -> None:
    engine = AsyncEngine(str(target))
    with running(engine, ServeOptions()) as server:
        fail_later(engine.engine, "step", "the step is broken", steps=0)
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            for path in ("/v1/completions", "/v1/completions", "/tokenize"):
                answer = http.post(path, json={"prompt": "abc"})
                assert answer.status_code == 503
                assert answer.json()["error"]["type"] == "server_error"
            assert http.get("/health").status_code == 503
            assert http.get("/metrics").status_code == 200


def test_an_error_within_a_stream_is_its_last_event(target: Path, caplog: Any) -> None:
    engine = AsyncEngine(str(target))
    with running(engine, ServeOptions()) as server:
        fail_later(engine.engine, "step", "the step is broken")
        body = {"prompt": "abc", "max_tokens": 30, "ignore_eos": True, "stream": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        assert '"error"' in answer.text
        assert f"request_id {answer.headers['x-request-id']} there" in answer.text
        assert "the step is broken" not in answer.text, "which may quote another client's request"
        assert "RuntimeError in " in caplog.text
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        with client, pytest.raises(openai.APIError):
            list(client.completions.create(model=str(target), prompt="a", stream=True))


def test_synthetic_texts_are_served_only_if_that_is_allowed(target: Path) -> None:
    speculation = {
        "method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rate": 0.5,
    }  # fmt: skip
    engine = AsyncEngine(str(target), speculation)
    with pytest.raises(ConfigError, match="--allow-synthetic"):
        build_app(engine, ServeOptions())
    with running(engine, ServeOptions(allow_synthetic=True)) as server:
        body = {"prompt": "abcabc" * 9, "max_tokens": 90, "ignore_eos": True}
        with httpx.Client(base_url=server.url) as http:
            metrics = post(http, "/v1/completions", **body)["metrics"]["speculative_decoding"]
        assert metrics["synthetic_acceptance"] is True


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (CapacityError("max_tokens", 9, "less"), 400, "invalid_request_error"),
        (OverloadedError("max_num_waiting", 9, "less"), 429, "rate_limit_error"),
        (EngineBrokenError("x"), 503, "server_error"),
        (NonFiniteLogitsError("x"), 500, "server_error"),
        (ValueError("a secret"), 500, "server_error"),
    ],
)
def test_what_a_client_may_do_decides_the_status(error: Exception, status: int, kind: str) -> None:
    answer = refusal(error).response()
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert f'"type":"{kind}"'.encode() in answer.body
    assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "--model", "b"], "beside MODEL"),
        (["--port", "70000"], "`port` is 70000"),
        (["--served-model-name", ""], "`served_model_name`"),
        (["no-such-model", "--local-files-only"], "no-such-model"),
        (["--chat-template", "no/such.jinja"], "chat-template"),
    ],
)
def test_what_cannot_be_served_is_one_line(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["serve", "--port", "0", *words])
    assert done.exit_code == 2
    assert said in done.output


def test_an_address_is_tried_before_a_model_is_loaded(server: Running) -> None:
    port = server.url.rpartition(":")[2]
    for words in (["--port", port], ["--host", "192.0.2.1"], ["--host", "x" * 70]):
        done = CliRunner().invoke(app, ["serve", "no-such-model", "--local-files-only", *words])
        assert done.exit_code == 2
        assert "`host, port` is '" in done.output
        assert "no-such-model" not in done.output


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, ...]] = []

    class Keys(Actions):
        def serve(self, engine: Any, options: ServeOptions, say: Any) -> None:
            found.append(options.keys)

    for name, words in (("key", []), ("key", ["--api-key", "other"]), ("", [])):
        monkeypatch.setenv("FORETOKEN_API_KEY", name)
        done = CliRunner().invoke(app, ["serve", *words], obj=Keys())
        assert done.exit_code == (0 if name else 2)
    assert found == [("key",), ("other",)]
