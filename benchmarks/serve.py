"""What the server costs: its own CPU time per streamed chunk, and its share of the throughput.

    python -m benchmarks.serve

One process serves the embedded pair; its client, a raw socket per stream that parses nothing, runs
in another. CPU time is that of the event loop's thread, which does all of the server's work and
none of the engine's; what a request costs beside its chunks is found from requests of several
lengths. The same requests go to the same engine without a server, too, by as many tasks that read
deltas: the throughput and the CPU time to compare with. Rounds of both take turns. What no server
could do without is measured at the pace of one stream: a thread that computes wakes the loop, which
writes a chunk. At last many streams at once ask each for a marker of its own, which no other answer
may hold.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import linear_regression, median
from typing import Any, NamedTuple

from benchmarks.common import DRAFT, TARGET, goal, parse, record
from benchmarks.served import InThread, in_thread
from foretoken import AsyncEngine, SamplingParams
from foretoken.lab.results import Row, Spread
from foretoken.lab.workloads import heldout
from foretoken.serve.options import ServeOptions

MAX_CPU_US, MAX_TTFT_MS = 150.0, 5.0
LENGTHS = (1, 8, 64)  # of short answers, in tokens
CHUNKS = 100  # of which the least is measured


class Case(NamedTuple):
    """Requests that are measured together.

    Attributes:
        streams: at once.
        requests: in a round, `streams` after `streams`.
    """

    streams: int
    tokens: int
    requests: int
    rounds: int


def read_streams(port: int, bodies: Sequence[bytes]) -> dict[str, Any]:
    """Send all bodies at once; seconds until all streams ended, what they said and first bytes."""
    found: list[tuple[bytes, float]] = [(b"", 0.0)] * len(bodies)
    start = time.perf_counter()

    def read(i: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as stream:
            begin = time.perf_counter()
            stream.sendall(bodies[i])
            first, parts = 0.0, [b""]
            while b"[DONE]" not in parts[-2:][0][-10:] + parts[-1]:
                parts.append(stream.recv(65536))
                if not parts[-1]:
                    raise RuntimeError("a stream ended before its end")
                if not first and b"data: {" in parts[-1]:
                    first = time.perf_counter() - begin
            found[i] = b"".join(parts), first

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "chunks": sum(said.count(b"data: {") for said, _ in found),
        "ttft": [first for _, first in found],
        "said": [said for said, _ in found],
    }


def client(pipe: Connection) -> None:
    """The process of the client: reads what it is sent until it is sent nothing."""
    while (work := pipe.recv()) is not None:
        pipe.send(read_streams(*work))


def body(prompt: str, tokens: int) -> bytes:
    """A request as it goes over the wire."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
             "stream": True}  # fmt: skip
    text = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


class Direct(NamedTuple):
    """Of the same requests without a server: seconds in all and to first deltas, and texts."""

    seconds: float
    firsts: list[float]
    texts: list[str]
    deltas: int


async def without_server(engine: AsyncEngine, prompts: Sequence[str], tokens: int) -> Direct:
    """The requests as so many tasks that read deltas."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    async def read(prompt: str) -> tuple[float, list[str]]:
        begin, first, said = time.perf_counter(), 0.0, []
        async for delta in engine.generate(prompt, params, deltas=True):
            first = first or time.perf_counter() - begin
            said += [sample.text for sample in delta.outputs]
        return first, said

    start = time.perf_counter()
    found = await asyncio.gather(*(read(prompt) for prompt in prompts))
    seconds, (firsts, said) = time.perf_counter() - start, zip(*found, strict=True)
    return Direct(seconds, [*firsts], ["".join(text) for text in said], sum(map(len, said)))


def measure(
    engine: AsyncEngine, server: InThread, pipe: Connection, case: Case
) -> dict[str, list[float]]:
    """`rounds` turns of the case, with the server and without."""
    prompts = [item.prompt for item in heldout()]
    found: dict[str, list[float]] = {
        name: []
        for name in ("cpu", "alone", "request", "chunks", "ttft", "added", "served", "direct")
    }
    for turn in range(case.rounds + 1):
        spent = direct_spent = seconds = direct_seconds = 0.0
        num_chunks, num_deltas, firsts, direct_firsts = 0, 0, [], []
        for i in range(turn * case.requests, (turn + 1) * case.requests, case.streams):
            texts = [prompts[j % len(prompts)] for j in range(i, i + case.streams)]
            before = server.run(cpu())
            pipe.send((server.port, [body(text, case.tokens) for text in texts]))
            told = pipe.recv()
            between = server.run(cpu())
            direct = server.run(without_server(engine, texts, case.tokens))
            direct_spent += server.run(cpu()) - between
            spent += between - before
            num_chunks, num_deltas = num_chunks + told["chunks"], num_deltas + direct.deltas
            seconds, direct_seconds = seconds + told["seconds"], direct_seconds + direct.seconds
            firsts, direct_firsts = firsts + told["ttft"], direct_firsts + direct.firsts
        if turn:  # the first warms up
            num_tokens = case.requests * case.tokens
            found["cpu"].append(spent / num_chunks * 1e6)
            found["alone"].append(direct_spent / num_deltas * 1e6)
            found["request"].append(spent / case.requests * 1e6)
            found["chunks"].append(num_chunks / case.requests)
            found["ttft"].append(median(firsts) * 1e3)
            found["added"].append((median(firsts) - median(direct_firsts)) * 1e3)
            found["served"].append(num_tokens / seconds)
            found["direct"].append(num_tokens / direct_seconds)
    return found


async def cpu() -> float:
    """CPU seconds of the event loop's thread so far."""
    return time.thread_time()


def as_row(case: Case, found: dict[str, list[float]]) -> Row:
    """What was measured of one case."""
    pairs = zip(found["served"], found["direct"], strict=True)
    plural = "stream" if case.streams == 1 else "streams"
    length = "1 token" if case.tokens == 1 else f"{case.tokens} tokens"
    return Row(
        f"{case.streams} {plural}, {length}",
        {"streams": case.streams, "tokens": case.tokens},
        {
            "server_cpu_us_per_chunk": Spread.of(found["cpu"], "us"),
            "direct_cpu_us_per_delta": Spread.of(found["alone"], "us"),
            "server_cpu_us_per_request": Spread.of(found["request"], "us"),
            "chunks_per_stream": Spread.of(found["chunks"], ""),
            "ttft_ms": Spread.of(found["ttft"], "ms"),
            "added_ttft_ms": Spread.of(found["added"], "ms"),
            "served_tokens_per_second": Spread.of(found["served"], "tokens/s"),
            "direct_tokens_per_second": Spread.of(found["direct"], "tokens/s"),
            "share_of_throughput": Spread.of([1 - s / d for s, d in pairs], ""),
        },
    )


def least(server: InThread, pipe: Connection, case: Case, found: dict[str, list[float]]) -> Row:
    """CPU time of a chunk at the pace of a case, if a thread wakes the loop and that writes it."""
    import torch

    pace = case.tokens / median(found["served"]) / median(found["chunks"])
    chunk = b"data: {" + b"x" * 190 + b"}\n\n"

    class Bare(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.write = transport.write

        def data_received(self, data: bytes) -> None:
            threading.Thread(target=self.work).start()

        def work(self) -> None:
            matrix = torch.randn(256, 256)
            for body in [chunk] * CHUNKS + [b"data: [DONE]\n\n"]:
                end = time.perf_counter() + pace
                while time.perf_counter() < end:
                    matrix @ matrix
                server.loop.call_soon_threadsafe(self.write, body)

    async def listen() -> asyncio.Server:
        return await server.loop.create_server(Bare, "127.0.0.1", 0)

    listening, costs = server.run(listen()), []
    port = listening.sockets[0].getsockname()[1]
    for _ in range(case.rounds):
        before = server.run(cpu())
        pipe.send((port, [b"go"]))
        told = pipe.recv()
        costs.append((server.run(cpu()) - before) / told["chunks"] * 1e6)
    server.loop.call_soon_threadsafe(listening.close)
    name = "1 stream, the least that a chunk takes"
    values = {"least_us_per_chunk": Spread.of(costs, "us"), "ms_between_chunks": pace * 1e3}
    return Row(name, {"streams": 1}, values)


def fixed_cost(found: Sequence[dict[str, list[float]]]) -> Row:
    """The line through what requests of several lengths cost: per request and per chunk."""
    turns = range(min(len(each["cpu"]) for each in found))
    lines = [
        linear_regression([each["chunks"][i] for each in found],
                          [each["request"][i] for each in found])
        for i in turns
    ]  # fmt: skip
    return Row(
        "1 stream, line through its lengths",
        {"streams": 1},
        {
            "fixed_us_per_request": Spread.of([line.intercept for line in lines], "us"),
            "us_per_further_chunk": Spread.of([line.slope for line in lines], "us"),
        },
    )


def markers(engine: AsyncEngine, server: InThread, pipe: Connection, count: int) -> Row:
    """So many streams at once, each with a marker: how many are whole, and its own alone."""
    marks = [f"{i * 7919 % 100_000:05d}" for i in range(count)]
    prompts = ["ITEMS = [" + f'"{mark}", ' * 12 + '"' for mark in marks]
    pipe.send((server.port, [body(prompt, 32) for prompt in prompts]))
    told = pipe.recv()
    direct = server.run(without_server(engine, prompts, 32))
    others, values = (
        set(marks),
        {"complete": 0, "own_marker": 0, "foreign_marker": 0, "as_direct": 0},
    )
    for mark, said, alone in zip(marks, told["said"], direct.texts, strict=True):
        chunks = [json.loads(data) for data in re.findall(rb"data: ({.*})", said)]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        values["complete"] += chunks[-1]["choices"][0]["finish_reason"] == "length"
        values["own_marker"] += text.startswith(f'{mark}"')
        values["foreign_marker"] += bool(others & {*re.findall(r'(?<=")\d{5}(?=")', text)} - {mark})
        values["as_direct"] += text == alone
    more = {"seconds": told["seconds"], "seconds_without_server": direct.seconds}
    return Row(f"{count} streams, a marker each", {"streams": count}, values | more)


def main() -> None:
    """Measure one stream, short and long, sixteen, and 256 that must not be mixed up."""
    options = parse(__doc__, tokens=256, rounds=5, streams=16, many=256)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=client, args=(theirs,))
    process.start()
    # Prompts that come again must be computed again.
    engine = AsyncEngine(TARGET, {"method": "draft_model"}, threads=1, enable_prefix_caching=False)
    alone = [Case(1, tokens, 8, options.rounds) for tokens in LENGTHS]
    alone.append(Case(1, options.tokens, 1, options.rounds))
    with in_thread(engine, ServeOptions()) as server:
        found = [measure(engine, server, ours, case) for case in alone]
        rows = [as_row(*pair) for pair in zip(alone, found, strict=True)]
        crowd = Case(options.streams, options.tokens, options.streams, options.rounds)
        rows.append(as_row(crowd, measure(engine, server, ours, crowd)))
        rows += [fixed_cost(found), least(server, ours, alone[-1], found[-1])]
        rows.append(markers(engine, server, ours, options.many))
    ours.send(None)
    process.join()
    for row in rows:
        print(row)
    one, many = rows[len(LENGTHS)], rows[len(LENGTHS) + 1]
    notes = [
        goal("server CPU per chunk at 1", one, "server_cpu_us_per_chunk", MAX_CPU_US, least=False),
        goal(f"server CPU per chunk at {options.streams}", many, "server_cpu_us_per_chunk",
             MAX_CPU_US, least=False),
        goal("added to the first token at 1", one, "added_ttft_ms", MAX_TTFT_MS, least=False),
        goal("streams that say their own marker", rows[-1], "own_marker", options.many),
        "ttft_ms is from a request sent to its first chunk read, the prompt's pass included; "
        "added_ttft_ms is that less what the same prompt took without a server.",
        "fixed_us_per_request: a connection of its own, the head, the body, the prompt's tokens "
        "and the end; us_per_further_chunk is what each chunk adds to that.",
    ]  # fmt: skip
    shapes = {"target": TARGET, "draft": DRAFT, "tokens": options.tokens, "K": 4, "threads": 1}
    record("serve", options, shapes, rows, notes)


if __name__ == "__main__":
    main()
