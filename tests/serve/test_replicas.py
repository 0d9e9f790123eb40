"""Replicas on Ray Serve, through the command and through its proxies: the extra `ray`.

One fleet of two serves all tests of a fleet that is well; the last of them kills it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import replicas
from benchmarks.served import Served
from tests.project.source import ROOT
from tests.support.asynchronous import PATIENCE, until

pytestmark = pytest.mark.ray
pytest.importorskip("ray", reason="needs the extra: pip install 'foretoken[ray]'")
BODY = {"prompt": "def fibonacci(n):\n", "max_tokens": 16}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Served]:
    with replicas.fleet(2, "--drain-timeout", "1") as server:
        yield server


def ask(server: Served, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=BODY | body, timeout=PATIENCE)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )


def test_a_seed_has_one_text_on_every_replica_and_none_has_many(fleet: Served) -> None:
    found = replicas.seeds(fleet).values
    assert found["replicas"] == 2
    assert found["texts_with_a_seed"] == 1
    assert found["texts_without"] == 40


def test_prompts_with_one_beginning_go_to_one_replica(fleet: Served) -> None:
    beginnings = [f"# {topic} " * 40 for topic in ("sorting", "parsing", "caching", "routing")]
    homes = {}
    for number in range(5):
        for start in beginnings:
            answer = ask(fleet, prompt=f"{start}\n# {number}\n", max_tokens=2)
            homes.setdefault(start, Counter())[answer.headers["x-replica"]] += 1
    assert [len(found) for found in homes.values()] == [1, 1, 1, 1]


def test_metrics_of_all_replicas_have_their_names(fleet: Served) -> None:
    names = replicas.up(fleet)
    text = fleet.metrics()
    assert len(names) == 2
    running = re.findall(r'^vllm:num_requests_running\{.*replica="(\w+)"\}', text, re.MULTILINE)
    assert set(running) == names
    assert 'foretoken:replicas{model_name="tiny-python"} 2.0' in text


def test_a_client_that_leaves_ends_its_request_on_the_replica(fleet: Served) -> None:
    body = BODY | {"max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        next(lines)
        until(lambda: fleet.num_held() > 0)
    until(lambda: fleet.num_held() == 0)


def test_what_is_larger_than_a_message_of_grpc_arrives(fleet: Served) -> None:
    refused = ask(fleet, prompt="x " * (3 * 2**20))
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = ask(fleet, n=16, max_tokens=600, logprobs=20, ignore_eos=True)
    assert answer.status_code == 200
    assert len(answer.content) > 2**22
    found = [len(choice["logprobs"]["tokens"]) for choice in answer.json()["choices"]]
    assert found == [600] * 16


def test_a_replica_that_stands_still_hides_no_other(fleet: Served) -> None:
    stopped = replicas.replica_pids()[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert httpx.get(f"{fleet.url}/health", timeout=PATIENCE).status_code == 200
        assert len(replicas.up(fleet)) == 1
    finally:
        os.kill(stopped, signal.SIGCONT)
    until(lambda: len(replicas.up(fleet)) == 2)


def test_every_request_is_answered_or_refused_when_a_replica_is_killed(fleet: Served) -> None:
    found = replicas.death(fleet, 150).values
    assert found["lost"] == found["computed_twice"] == 0
    assert found["answered"] + found["refused"] + found["broken"] == 150
    assert found["broken"] + found["refused"] <= replicas.AT_ONCE
    assert found["seconds_to_fail"] < replicas.MOST_SECONDS
    assert found["replicas_after"] == 2


def test_sigterm_lets_streams_end_with_a_reason(fleet: Served) -> None:
    body = BODY | {"max_tokens": 1900, "n": 8, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        next(lines)
        fleet.process.terminate()
        text = "\n".join(lines)
    assert text.count('"stop_reason":"shutdown"') == 8  # which takes longer than the drain has
    assert text.rstrip().endswith("data: [DONE]")
    assert fleet.process.wait(PATIENCE) == 0
    until(lambda: not replicas.replica_pids())


def test_more_replicas_run_while_there_are_requests_for_them() -> None:
    with replicas.fleet(1, "--max-replicas", "2", "--target-requests", "2") as server:
        assert len(replicas.up(server)) == 1
        is_over = threading.Event()

        def load() -> None:
            while not is_over.is_set():
                ask(server, max_tokens=400, ignore_eos=True)

        with ThreadPoolExecutor(8) as clients:
            work = [clients.submit(load) for _ in range(8)]
            try:
                until(lambda: len(replicas.up(server)) == 2)
            finally:
                is_over.set()
        assert [each.exception() for each in work] == [None] * 8


def test_a_replica_that_cannot_start_ends_the_command_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ended = command("foretoken", "serve", str(tmp_path), "--replicas", "1", "--port", "0")
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert "failed 3 times when they started" in last
    assert "safetensors" in last
    until(lambda: not replicas.replica_pids())


def test_a_cluster_without_the_resources_is_named_before_anything_starts() -> None:
    begun = time.monotonic()
    words = ("serve", "tiny-python", "--replicas", "2", "--replica-gpus", "1", "--port", "0")
    ended = command("foretoken", *words)
    assert ended.returncode == 2
    assert "too little GPU" in ended.stderr
    assert "must be at most 0" in ended.stderr
    assert "1 GPU" in ended.stderr
    assert time.monotonic() - begun < PATIENCE / 2


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_cluster_that_is_not_there_is_named(address: str) -> None:
    words = ("serve", "tiny-python", "--replicas", "2", "--ray-address", address, "--port", "0")
    ended = command("foretoken", *words)
    assert ended.returncode == 2
    assert "ray_address" in ended.stderr
    assert "ray start --head" in ended.stderr


def test_two_versions_in_a_cluster_are_named() -> None:
    ended = command("tests.serve.ray_child", "other_version")
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert "0.0.1, the version that deploys the replica" in last
    assert "Install one version" in last


def test_several_models_through_the_proxies_of_ray_serve() -> None:
    small = {"engine": {"model": "tiny-python-draft"}, "served_model_name": "small"}
    models = [{"engine": {"model": "tiny-python"}}, small]
    models = [each | {"replica_cpus": 0.5} for each in models]
    args = {"models": models, "server": {"api_key": ["secret"]}}
    ended = command("tests.serve.ray_child", "deploy", json.dumps(args))
    assert ended.returncode == 0, ended.stderr[-2000:]
    answers = json.loads(ended.stdout.strip().splitlines()[-1])
    first, second, unknown, stream, metrics, models_, keyless = answers
    assert (first[0], first[1]["model"]) == (200, "tiny-python")
    assert (second[0], second[1]["model"]) == (200, "small")
    assert (unknown[0], unknown[1]["error"]["code"]) == (404, "model_not_found")
    assert stream[1].endswith("data: [DONE]\n\n")
    assert second[1]["choices"][0]["text"] == "".join(
        json.loads(line[6:])["choices"][0]["text"]
        for line in stream[1].splitlines()
        if line.startswith("data: {")
    )
    assert len(re.findall(r"^foretoken:replicas\{", metrics[1], re.MULTILINE)) == 2
    assert [card["id"] for card in models_[1]["data"]] == ["tiny-python", "small"]
    assert keyless[0] == 401
