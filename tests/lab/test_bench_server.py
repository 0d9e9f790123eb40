"""`foretoken bench --url`: times and counts of streams, and faults of servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from foretoken import SamplingParams
from foretoken.errors import ConfigError
from foretoken.lab.bench.command import make_bench
from foretoken.lab.bench.load import (
    BenchRequest,
    Record,
    RequestFailedError,
    Run,
    ServerGoneError,
    drive,
)
from foretoken.lab.bench.options import BenchCase, BenchOptions, Load, server_cases
from foretoken.lab.bench.server import Server

COUNTS = """# HELP vllm:spec_decode_num_drafts_total Verifications.
vllm:spec_decode_num_drafts_total{model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{model_name="m"} 1.7e9
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 11.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 4.0
"""
(CASE,), *_ = server_cases({}, 0.5, speculates=False, compare=True)
(PLAIN, DRAFTED), *_ = server_cases({"k": [3]}, 0.5, speculates=True, compare=True)


def event(text: str, **more: Any) -> str:
    return f"data: {json.dumps({'choices': [{'text': text}], **more})}\n\n"


STREAM = [event("a"), ": a comment\n\n", event(""), event("bc")[:9], event("bc")[9:]]
USAGE = {"completion_tokens": 4, "prompt_tokens": 6}
END = f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n"


class Fake:
    """An HTTP server that keeps its requests; answers are set, and None in `pieces` hangs up."""

    def __init__(self, owner: str = "someone", pieces: Any = (*STREAM, END, "data: [DONE]\n\n")):
        self.owner, self.pieces = owner, pieces
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.refused: tuple[str, ...] = ()
        self.metrics = COUNTS
        self.chunked, self.raw, self.is_silent = True, b"", False
        self.server: Any = None
        self.tasks: list[Any] = []
        self.url, self.streams, self.stops_after = "", 0, 10**9

    async def __aenter__(self) -> Fake:
        self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.server.close()
        await asyncio.gather(*self.tasks)
        await asyncio.sleep(0)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        with suppress(ConnectionError):
            await self.answer_one(reader, writer)
        writer.close()

    async def answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
        body = json.loads(await reader.readexactly(size) or "{}")
        path = head.split()[1]
        self.heads.append(head)
        if self.is_silent:
            await reader.read()  # until the client has left
        elif self.raw:
            writer.write(self.raw)
        elif body.get("stream"):
            self.streams += 1
            if self.streams >= self.stops_after:  # before the answer's end invites another
                self.server.close()
            await self.stream(writer, body)
        else:
            self.whole(writer, path, body)

    def whole(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        status, text = 404, "none"
        if path == "/v1/models":
            status, text = 200, json.dumps({"data": [{"id": "m", "owned_by": self.owner}]})
        elif path == "/metrics":
            status, text = 200, self.metrics
        elif path == "/v1/completions":
            refused = [name for name in self.refused if name in body]
            status, text = (400, f"no {refused}") if refused else (200, "{}")
        data = text.encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        kind = "Transfer-Encoding: Chunked" if self.chunked else "X: y"
        writer.write(f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n".encode())
        for piece in self.pieces:
            data = piece.encode()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)
            await writer.drain()
            await asyncio.sleep(0.001)  # so that each comes by itself
        if self.chunked and self.pieces[-1].startswith("data: [DONE]"):
            writer.write(b"0\r\n\r\n")


def run(work: Callable[[Fake, Server], Awaitable[None]], fake: Fake, **given: Any) -> None:
    async def all_of_it() -> None:
        async with fake:
            await work(fake, Server(fake.url, SamplingParams(top_k=7, seed=1), **given))

    asyncio.run(all_of_it())


@pytest.mark.parametrize("chunked", [True, False])
def test_a_stream_gives_times_and_counts(chunked: bool) -> None:
    async def work(fake: Fake, server: Server) -> None:
        await server.prepare()
        for prompt in ("def", [1, 2], [{"role": "user", "content": "x"}]):
            record = Record(0.0)
            await server.send(BenchRequest(prompt, 9, 5), CASE, record)  # type: ignore[arg-type]
            assert (record.num_input, record.num_output, len(record.arrivals)) == (6, 4, 2)
            assert 0 < record.arrivals[0] < record.arrivals[1]
            assert record.num_first == 1
        assert [next(iter(b.keys() & {"prompt", "messages"})) for b in fake.bodies] == [
            "prompt", "prompt", "messages"
        ]  # fmt: skip
        body = fake.bodies[0]
        assert {name: body[name] for name in ("model", "max_tokens", "temperature", "seed")} == {
            "model": "m", "max_tokens": 9, "temperature": 0.5, "seed": 5,
        }  # fmt: skip
        assert (body["top_k"], body["ignore_eos"], "speculative" in body) == (7, True, False)
        assert "Bearer secret" in fake.heads[0]
        assert any("no speed-up" in note for note in server.notes)

    fake = Fake()
    fake.chunked = chunked
    run(work, fake, api_key="secret")


def test_without_usage_pieces_are_counted_and_fields_that_are_refused_are_left_out() -> None:
    async def work(fake: Fake, server: Server) -> None:
        fake.refused = ("ignore_eos",)
        await server.prepare()
        record = Record(0.0)
        await server.send(BenchRequest("x", 9, 5), CASE, record)
        assert (record.num_output, record.num_input) == (2, 0)
        assert "ignore_eos" not in fake.bodies[0]
        assert any("too short" in note for note in server.notes)

    run(work, Fake(pieces=[*STREAM, "data: [DONE]\n\n"]))


def test_plain_takes_turns_where_requests_choose() -> None:
    async def work(fake: Fake, server: Server) -> None:
        await server.prepare()
        assert (server.speculates, server.notes) == (True, [])
        for case in (PLAIN, DRAFTED):
            await server.send(BenchRequest("x", 9, 5), case, Record(0.0))
        sent = [body["speculative"] for body in fake.bodies]
        assert sent == [{"num_speculative_tokens": 0}, {"num_speculative_tokens": 3}]
        fake.refused = ("speculative",)  # nothing drafts there
        other = Server(fake.url, SamplingParams())
        await other.prepare()
        assert not other.speculates

    run(work, Fake("foretoken"))


def test_tokens_of_the_first_piece_are_told_by_who_counts_with_each() -> None:
    async def work(fake: Fake, server: Server) -> None:
        record = Record(0.0)
        await server.send(BenchRequest("x", 9, 5), CASE, record)
        assert (record.num_first, record.num_output) == (3, 7)

    counted = [event("abc", usage={"completion_tokens": 3}), event("d")]
    counted.append(event("e", usage={"completion_tokens": 7}))
    run(work, Fake(pieces=[*counted, "data: [DONE]\n\n"]))


def test_counts_of_a_server() -> None:
    async def work(fake: Fake, server: Server) -> None:
        found = await server.counts()
        assert found is not None
        counts = (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens)
        assert (counts, found.accepted_per_position) == ((10, 20, 11), [7, 4])
        assert await server.tokens("x") == []  # no /tokenize
        fake.metrics = COUNTS.replace("10.0", "many")
        assert await server.counts() is None

    run(work, Fake())


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([*STREAM], "broke off"),
        ([event("a"), "data: {broken\n\n"], "broke off or is no HTTP: Expecting"),
        (["data: 3\n\n"], "no object"),
        ([event("a", usage="x")], "no completion in the stream: .*usage"),
        ([event("a", usage={"completion_tokens": "abc"})], "no completion in the stream"),
        ([event("a", usage={"completion_tokens": -3})], "no completion in the stream"),
        (['data: {"choices": ["x"]}\n\n'], "no completion in the stream"),
        (['data: {"choices": [{"delta": "x"}]}\n\n'], "no completion in the stream"),
        (['data: {"choices": 3}\n\n'], "no completion in the stream"),
        (['data: {"error": "too hot"}\n\n'], "too hot"),
        ([END, "data: [DONE]\n\n"], "without a token"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no status line"),
        (b"HTTP/1.1 503 Busy\r\n\r\nlater", "status 503: later"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "6 bytes are missing"),
        (None, r"no news for 0\.25 s"),
    ],
)
def test_a_wrong_answer_is_a_failed_request_and_is_named(pieces: Any, said: str) -> None:
    """A wrong stream, bytes that are no answer, or a server that is silent."""

    async def work(fake: Fake, server: Server) -> None:
        fake.is_silent = pieces is None
        fake.raw = pieces if isinstance(pieces, bytes) else b""
        with pytest.raises(RequestFailedError, match=said):
            await server.send(BenchRequest("x", 9, 5), CASE, Record(0.0))
        if fake.raw:
            with pytest.raises(ConfigError, match="`url` is 'http"):
                await server.prepare()

    run(work, Fake(pieces=pieces), **({"timeout": 0.25} if pieces is None else {}))


def test_a_server_that_stops_leaves_what_it_answered() -> None:
    async def work(fake: Fake, server: Server) -> None:
        fake.stops_after, load, kept = 4, Load(1), Run()
        asked = [(0.0, BenchRequest("x", 9, i)) for i in range(20)]
        await drive(server, CASE, load, asked, kept)
        assert (len(kept.done), len(kept.failed)) == (4, 1)
        assert "no connection to 127.0.0.1" in kept.stopped
        with pytest.raises(ServerGoneError):
            await server.send(BenchRequest("x", 9, 5), CASE, Record(0.0))
        with pytest.raises(ConfigError, match=r"`url` is .*: must be an OpenAI-compatible server"):
            await server.prepare()

    run(work, Fake())


def test_a_whole_benchmark_of_a_server() -> None:
    async def work(fake: Fake, server: Server) -> None:
        options = BenchOptions(
            url=fake.url, concurrency="2", num_requests="3", input_len="5", sweep=("k=1,2",)
        )
        bench = await make_bench(options, SamplingParams(temperature=0.0), {})
        await bench.run()
        names = {case.name for _, case in bench.measured}
        assert names == {"plain", "speculative, K=1", "speculative, K=2"}
        assert {len(m.repeats) for m in bench.measured.values()} == {3}
        prompts = [body["prompt"] for body in fake.bodies]
        assert {len(prompt) for prompt in prompts} == {20}
        assert len(set(prompts)) > len(prompts) * 0.9  # a server may keep prefixes
        assert all(body["stream_options"]["continuous_usage_stats"] for body in fake.bodies)
        assert any("4 characters" in note for note in bench.notes)
        text = BenchOptions(url=fake.url, prompts="random")
        with pytest.raises(ConfigError, match="`prompts` is 'random'"):
            await (await make_bench(text, SamplingParams(), {})).run()

    run(work, Fake("foretoken"))


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x", "http://"])
def test_a_url_is_one(url: str) -> None:
    with pytest.raises(ConfigError, match="`url` is"):
        Server(url, SamplingParams())


def cases(**given: Any) -> list[BenchCase]:
    return server_cases(given, 0.0, speculates=False, compare=True)[0]


def test_sweeps_of_a_server_that_takes_no_wishes() -> None:
    assert [case.name for case in cases(temperature=[0.0, 1.0])] == ["server, T=0", "server, T=1"]
    with pytest.raises(ConfigError, match=r"`sweep` is 'k=\.\.\.': must be one of temperature"):
        cases(k=[2])
