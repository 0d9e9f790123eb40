"""Queues, deadlines, clients that leave, the end of the server and that of its engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPResponse
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken import AsyncEngine
from foretoken.serve.options import ServeOptions
from tests.project.source import ROOT
from tests.serve.child import LAST_CALL, TIME_IS_UP, Child, child
from tests.serve.running import PATH, PROMPT, Deadlines, Running, connect, post, request, running
from tests.support.asynchronous import PATIENCE, Gate, idle, until

LONG = {"prompt": "abc", "max_tokens": 90, "ignore_eos": True}


def nothing_is_held(server: Running) -> bool:
    status = server.engine.status
    return (status.num_open, status.num_running, status.num_waiting) == (0, 0, 0)


def post_later(pool: ThreadPoolExecutor, url: str, **body: Any) -> Any:
    return pool.submit(httpx.post, url + PATH, json=body, timeout=PATIENCE)


def test_a_queue_that_is_full_says_when_to_come_again(target: Path) -> None:
    engine = AsyncEngine(str(target), max_num_seqs=1, max_num_waiting=2)
    gate = Gate(engine)
    with running(engine, ServeOptions()) as server, ThreadPoolExecutor(4) as pool:
        first = post_later(pool, server.url, **LONG)
        until(lambda: server.engine.status.num_open == 1)
        gate.open(1)
        until(lambda: server.engine.status.num_running == 1)
        taken = [first, *(post_later(pool, server.url, **LONG) for _ in range(2))]
        until(lambda: server.engine.status.num_open == 3)
        gate.open(1)
        until(lambda: server.engine.status.num_waiting == 2)
        refused = post_later(pool, server.url, **LONG)
        until(lambda: server.engine.status.num_open == 4)
        gate.open()
        answer = refused.result()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "overloaded"
        assert [f.result().status_code for f in taken] == [200] * 3


def test_what_takes_too_long_ends_with_what_there_is(target: Path) -> None:
    """The tenth step takes until both requests, a stream and a whole answer, have been aborted."""
    engine, options = AsyncEngine(str(target)), ServeOptions(queue_timeout=1, request_timeout=2)
    gate, deadlines = Gate(engine), Deadlines(options)
    with running(engine, options, deadlines) as server, ThreadPoolExecutor(2) as pool:
        both = [post_later(pool, server.url, **LONG, stream=stream) for stream in (False, True)]
        until(lambda: engine.status.num_open == 2)
        gate.open(9)
        until(lambda: gate.asked == 10)
        until(lambda: not deadlines.left(1))  # both have got their first tokens
        until(lambda: not any(box._unread for box in engine._worker._open.values()))
        deadlines.come(2)
        # What was on its way to a client then is cut off once more.
        until(lambda: len(engine._worker._commands) >= 2)
        gate.open()
        answers = [asked.result() for asked in both]
        assert [answer.status_code for answer in answers] == [200, 200]
        whole, streamed = answers
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert 0 < whole.json()["usage"]["completion_tokens"] <= 10
        for [choice] in (whole.json()["choices"], json.loads(events[-1])["choices"]):
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
        until(lambda: nothing_is_held(server))


def test_what_waits_too_long_is_refused(target: Path) -> None:
    engine, options = AsyncEngine(str(target), max_num_seqs=1), ServeOptions(queue_timeout=1)
    gate, deadlines = Gate(engine), Deadlines(options)
    with running(engine, options, deadlines) as server, ThreadPoolExecutor(2) as pool:
        waiting = [post_later(pool, server.url, **LONG, stream=stream) for stream in (False, True)]
        until(lambda: engine.status.num_open == 2)
        deadlines.come(1)
        for asked in waiting:
            answer = asked.result()
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "queue_timeout" in answer.json()["error"]["message"]
        gate.open()
        until(lambda: nothing_is_held(server))
        begun = post_later(pool, server.url, **LONG)
        assert begun.result().status_code == 200


@pytest.mark.parametrize("when", ["queued", "before the first token", "streaming", "whole"])
def test_a_client_that_leaves_costs_no_further_step(target: Path, when: str) -> None:
    engine = AsyncEngine(str(target), max_num_seqs=1)
    gate = Gate(engine)
    with running(engine, ServeOptions()) as server:
        ahead = None
        if when == "queued":
            ahead = connect(server)
            ahead.sendall(request({**LONG, "stream": True}))
            until(lambda: server.engine.status.num_open == 1)
            gate.open(1)
            until(lambda: server.engine.status.num_running == 1)
        with closing(connect(server)) as leaving:
            leaving.sendall(request({**LONG, "stream": when != "whole"}))
            until(lambda: server.engine.status.num_open == 1 + (ahead is not None))
            if when == "streaming":
                gate.open(1)
                assert leaving.recv(10)
        if ahead is not None:
            until(lambda: server.engine.status.num_open == 1)
            ahead.close()
        until(lambda: server.engine.status.num_open == 0)
        gate.open(1)  # the step that waits for it
        asyncio.run(idle(engine))
        usage = server.engine.status.kv_cache_usage
        gate.open()
        assert usage == 0


AHEAD = [
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    request({"prompt": "a", "user": "y" * 300_000}),
]


@pytest.mark.parametrize("in_one_piece", [True, False])
@pytest.mark.parametrize("ahead", AHEAD, ids=["small", "large"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_noticed_though_it_has_sent_more(
    target: Path, ahead: bytes, in_one_piece: bool, stream: bool
) -> None:
    engine = AsyncEngine(str(target))
    gate = Gate(engine)
    with running(engine, ServeOptions()) as server:
        with closing(connect(server)) as leaving:
            parts = [request({**LONG, "stream": stream}), ahead]
            for part in [b"".join(parts)] if in_one_piece else parts:
                leaving.sendall(part)
                until(lambda: server.engine.status.num_open == 1)
            gate.open(1)
            assert not stream or leaving.recv(10)
        try:
            until(lambda: server.engine.status.num_open == 0)
        finally:
            gate.open()


def test_what_is_sent_ahead_is_not_answered_and_closes_the_connection(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 3}
    with closing(connect(server)) as client:
        client.sendall(request(body) + AHEAD[0])
        whole = b"".join(iter(lambda: client.recv(65536), b""))
    assert whole.count(b"HTTP/1.1 ") == whole.count(b"HTTP/1.1 200 OK") == 1
    assert b"connection: close" in whole
    assert json.loads(whole.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 3
    with closing(connect(server)) as client:  # one after the other, a connection serves several
        for _ in range(2):
            client.sendall(request(body))
            answer = HTTPResponse(client)
            answer.begin()
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 3


def test_a_thousand_clients_that_leave_at_random_leave_nothing(server: Running) -> None:
    """In the queue, before the first token, in a stream, at its end: 40 at a time."""
    order = random.Random(7)
    plans = [(order.choice([0, 0.002, 0.02, 0.1]), order.random() < 0.5) for _ in range(1000)]

    def visit(plan: tuple[float, bool]) -> None:
        seconds, stream = plan
        body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": stream}
        with closing(connect(server)) as leaving:
            leaving.sendall(request(body))
            time.sleep(seconds)

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(visit, plans))
    # Its answer says that the server has seen all that came before it, too.
    text = httpx.post(server.url + PATH, json={"prompt": PROMPT, "max_tokens": 3}, timeout=PATIENCE)
    assert text.status_code == 200
    until(lambda: nothing_is_held(server))  # how soon: benchmarks/serve_life.py
    asyncio.run(idle(server.engine))
    assert server.engine.status.kv_cache_usage == 0


def test_a_long_prompt_does_not_stop_those_that_decode(target: Path) -> None:
    """Sixteen tokens a step: the prompt takes twelve steps, and each brings the other a token."""
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "enable_prefix_caching": False}
    engine = AsyncEngine(str(target), **options)  # type: ignore[arg-type]
    gate, while_prefilling = Gate(engine), []

    def noted() -> Any:
        done, samples = gate(), engine.engine.scheduler.running
        if any(sample.num_prompt == 180 and not sample.num_output for sample in samples):
            while_prefilling.append(samples[0].num_output)
        return done

    engine.engine.step = noted  # type: ignore[method-assign]
    with running(engine, ServeOptions()) as server, ThreadPoolExecutor(2) as pool:
        first = post_later(pool, server.url, **LONG)
        until(lambda: server.engine.status.num_open == 1)
        gate.open(1)
        until(lambda: gate.count == 1)
        second = post_later(pool, server.url, prompt=[5] * 180, max_tokens=1)
        until(lambda: server.engine.status.num_open == 2)
        gate.open()
        assert [f.result().status_code for f in (first, second)] == [200, 200]
    begin = while_prefilling[0]
    assert while_prefilling == [*range(begin, begin + 11)]  # the twelfth ends the prompt


def long_streams(server: Child, count: int, tokens: int) -> tuple[list[Any], list[Any]]:
    found: list[Any] = [None] * count
    begun = threading.Semaphore(0)

    def read(i: int) -> None:
        body = {"prompt": "abc", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        parts = []
        with (
            suppress(httpx.TransportError),  # where the process ends at once
            httpx.stream(
                "POST", server.http.base_url.join(PATH), json=body, timeout=PATIENCE
            ) as answer,
        ):
            for part in answer.iter_text():
                if not parts:
                    begun.release()
                parts.append(part)
            found[i] = answer.status_code, "".join(parts)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=PATIENCE)
    return threads, found


@pytest.mark.usefixtures("forked")
def test_sigterm_under_load_answers_everybody() -> None:
    """Three streams run, a whole answer and a stream wait for a slot, and a request comes late."""
    engine = {"threads": 1, "num_blocks": 512, "max_num_seqs": 3}
    with (
        child("tiny-python", engine=engine, step_seconds=0.01, drain_timeout=3600) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        threads, found = long_streams(server, 3, 2000)
        url = str(server.http.base_url)
        waiting = [post_later(pool, url, **LONG, stream=stream) for stream in (False, True)]
        until(lambda: 'num_requests_waiting{model_name="tiny-python"} 2.0' in metrics(server))
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.http.get("/health/ready").status_code == 503)
        late = server.http.post(PATH, json=LONG)
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert server.end(TIME_IS_UP) == 0
        assert server.said.splitlines() == ["Ending: requests left: 5 (3600 s at most).",
                                            "Ended: 5 requests were cut off."]  # fmt: skip
        for thread in threads:
            thread.join()
        ends = '"text":"","logprobs":null,"finish_reason":"length","stop_reason":"shutdown"'
        whole, streamed = (future.result().text for future in waiting)
        assert ends in whole
        assert '"completion_tokens":0' in whole
        assert streamed.count("data: ") == 2
        assert ends in streamed
        for status, text in [*found, (200, streamed)]:
            assert status == 200
            assert text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length","stop_reason":"shutdown"' in text


def metrics(server: Child) -> str:
    return server.http.get("/metrics").text


@pytest.mark.usefixtures("forked")
def test_a_server_that_ends_lets_answers_be_completed(target: Path) -> None:
    with child(target) as server:
        threads, found = long_streams(server, 3, 90)
        assert server.end() == 0
        assert server.said.endswith("Ended: no request was cut off.\n")
        for thread in threads:
            thread.join()
        assert [text for _, text in found if '"finish_reason":"length"' not in text] == []
        assert not any("shutdown" in text for _, text in found)


@pytest.mark.usefixtures("forked")
def test_a_server_ends_when_its_time_is_over_though_clients_wait(target: Path) -> None:
    """One client reads a stream of 12 s, which is cut; another has sent half of a request."""
    with child(target, step_seconds=0.05, drain_timeout=1) as server:
        threads, found = long_streams(server, 1, 240)
        with closing(connect(Running(str(server.http.base_url), None))) as slow:
            slow.sendall(request(LONG)[:-5])
            begin = time.monotonic()
            assert server.end() == 0
            assert time.monotonic() - begin < 5  # 1.4 on a machine that is not busy, 6.4 once
            assert slow.recv(65536).startswith(b"HTTP/1.1 503 ")
        threads[0].join()
        assert '"stop_reason":"shutdown"' in found[0][1]
        assert found[0][1].endswith("data: [DONE]\n\n")


@pytest.mark.usefixtures("forked")
def test_a_step_that_does_not_end_does_not_keep_a_server(target: Path) -> None:
    with child(target, step_seconds=PATIENCE, drain_timeout=3600) as server:
        with ThreadPoolExecutor(1) as pool:
            asked = post_later(pool, str(server.http.base_url), **LONG)
            until(lambda: is_open(server))
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.http.get("/health/ready").status_code == 503)
            assert server.end(LAST_CALL, seconds=30) == 0
            assert asked.result().status_code == 503
        assert server.said.endswith("Ended: 1 requests were cut off.\n")


def is_open(server: Child) -> bool:
    return re.search(r"num_requests_(running|waiting)\{.*\} 1\.0", metrics(server)) is not None


def test_a_server_that_is_idle_is_gone_at_once() -> None:
    """After its last line it computes nothing: an interpreter that ends took 1.2 s of CPU time."""
    words = [sys.executable, "-m", "foretoken", "serve", "tiny-python", "--port", "0"]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = [*takewhile(lambda line: "Ctrl-C" not in line, process.stderr)]
            told = "Chat template: the checkpoint's own; tool calls: hermes; reasoning: none.\n"
            assert said[-1] == told
            url = next(process.stderr).split()[-1]
            answer = httpx.post(url + PATH, json={"prompt": "a", "max_tokens": 3}, timeout=PATIENCE)
            assert answer.status_code == 200
            begin = time.monotonic()
            process.terminate()
            assert any("Ended: no request was cut off." in line for line in process.stderr)
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii")
            before = int(stat.rpartition(")")[2].split()[11]) / os.sysconf("SC_CLK_TCK")
            _, code, usage = os.wait4(process.pid, 0)
            assert code == 0
            assert usage.ru_utime - before < 0.4
            assert time.monotonic() - begin < 10  # 0.5 on a busy machine
        finally:
            process.kill()


@pytest.mark.usefixtures("forked")
def test_a_second_signal_ends_at_once() -> None:
    """The exit code is that of the signal; after `drain_timeout`, an hour, it would be 0."""
    engine = {"threads": 1, "num_blocks": 256}
    with child("tiny-python", engine=engine, step_seconds=0.01, drain_timeout=3600) as server:
        threads, _ = long_streams(server, 1, 2000)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.http.get("/health/ready").status_code == 503)
        assert server.end() == -signal.SIGTERM
        threads[0].join()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("breaks", ["thread", "device"])
def test_an_engine_that_fails_ends_the_process(target: Path, breaks: str) -> None:
    with child(target, breaks=breaks, expects=4, engine={"max_num_seqs": 1}) as server:
        url = str(server.http.base_url)
        with ThreadPoolExecutor(4) as pool:
            asked = [post_later(pool, url, **LONG) for _ in range(4)]
        assert [future.result().status_code for future in asked] == [503] * 4
        assert server.process.wait(PATIENCE) != 0


@pytest.mark.soak
def test_a_server_that_was_killed_is_back_within_ten_seconds() -> None:
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        words = [sys.executable, "-m", "foretoken", "serve", "tiny-python", "--port", port]
        start = time.monotonic()
        with subprocess.Popen(words, cwd=ROOT) as process, httpx.Client() as http:
            try:

                def is_ready() -> bool:
                    try:
                        url = f"http://127.0.0.1:{port}/health/ready"  # noqa: B023
                        return http.get(url).status_code == 200
                    except httpx.TransportError:
                        return False

                until(is_ready)
                assert time.monotonic() - start < 10
                answer = post(http, f"http://127.0.0.1:{port}{PATH}", prompt="a", max_tokens=3)
                assert answer["choices"]
            finally:
                process.kill()
