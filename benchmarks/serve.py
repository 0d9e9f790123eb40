"""What the server costs: its own CPU time per streamed chunk, and its share of the throughput.

    python -m benchmarks.serve

One process serves the embedded pair; its client, a raw socket per stream that parses nothing, runs
in another. CPU time is that of the event loop's thread, which does all of the server's work and
none of the engine's. The same requests go to the same engine without a server, too, by as many
tasks that read deltas: the throughput to compare with. Rounds of both take turns.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from benchmarks.common import DRAFT, TARGET, goal, parse, record
from foretoken import AsyncEngine, SamplingParams
from foretoken.lab.results import Row, Spread
from foretoken.lab.workloads import heldout
from foretoken.serve.app import build_app
from foretoken.serve.options import ServeOptions
from foretoken.serve.server import listen, make_server

MAX_CPU_US, MAX_TTFT_MS = 150.0, 5.0


def read_streams(port: int, bodies: Sequence[bytes]) -> dict[str, Any]:
    """Send all bodies at once; seconds until all streams ended, their chunks and first bytes."""
    found: list[tuple[int, float]] = [(0, 0.0)] * len(bodies)
    start = time.perf_counter()

    def read(i: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as stream:
            begin = time.perf_counter()
            stream.sendall(bodies[i])
            count, first, tail = 0, 0.0, b""
            while b"[DONE]" not in tail:
                got = stream.recv(65536)
                if not got:
                    raise RuntimeError("a stream ended before its end")
                count += got.count(b"data: {")
                if count and not first:
                    first = time.perf_counter() - begin
                tail = (tail + got)[-64:]
            found[i] = count, first

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "chunks": sum(count for count, _ in found),
        "ttft": [first for _, first in found],
    }


def client(pipe: Connection) -> None:
    """The process of the client: reads what it is sent until it is sent nothing."""
    while (work := pipe.recv()) is not None:
        pipe.send(read_streams(*work))


def body(prompt: str, tokens: int, path: str = "/v1/completions") -> bytes:
    """A request as it goes over the wire."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
             "stream": True}  # fmt: skip
    text = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


async def without_server(
    engine: AsyncEngine, prompts: Sequence[str], tokens: int
) -> tuple[float, list[float]]:
    """Seconds that the same requests take, read as deltas, and those to their first ones."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    async def read(prompt: str) -> float:
        begin, first = time.perf_counter(), 0.0
        async for _ in engine.generate(prompt, params, deltas=True):
            first = first or time.perf_counter() - begin
        return first

    start = time.perf_counter()
    firsts = await asyncio.gather(*(read(prompt) for prompt in prompts))
    return time.perf_counter() - start, firsts


def measure(
    engine: AsyncEngine, loop: Any, port: int, pipe: Connection, case: tuple[int, int, int]
) -> dict[str, list[float]]:
    """`rounds` turns of so many streams, with the server and without."""
    streams, tokens, rounds = case
    prompts = [item.prompt for item in heldout()]
    found: dict[str, list[float]] = {
        name: [] for name in ("cpu", "chunks", "ttft", "added", "served", "direct")
    }
    for turn in range(rounds + 1):
        texts = [prompts[(turn * streams + i) % len(prompts)] for i in range(streams)]
        before = asyncio.run_coroutine_threadsafe(cpu(), loop).result()
        pipe.send((port, [body(text, tokens) for text in texts]))
        told = pipe.recv()
        spent = asyncio.run_coroutine_threadsafe(cpu(), loop).result() - before
        direct = without_server(engine, texts, tokens)
        seconds, firsts = asyncio.run_coroutine_threadsafe(direct, loop).result()
        if turn:  # the first warms up
            found["cpu"].append(spent / told["chunks"] * 1e6)
            found["chunks"].append(told["chunks"] / streams)
            served_first, direct_first = median(told["ttft"]), median(firsts)
            found["ttft"].append(served_first * 1e3)
            found["added"].append((served_first - direct_first) * 1e3)
            found["served"].append(streams * tokens / told["seconds"])
            found["direct"].append(streams * tokens / seconds)
    return found


async def cpu() -> float:
    """CPU seconds of the event loop's thread so far."""
    return time.thread_time()


def main() -> None:
    """Measure one stream and sixteen."""
    options = parse(__doc__, tokens=256, rounds=7, streams=16)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=client, args=(theirs,))
    process.start()
    # Prompts that come again must be computed again.
    engine = AsyncEngine(TARGET, {"method": "draft_model"}, threads=1, enable_prefix_caching=False)
    server, rows = make_server(build_app(engine, ServeOptions())), []
    loop = (server.config.get_loop_factory() or asyncio.new_event_loop)()  # uvloop, as it serves
    with listen(ServeOptions(port=0)) as bound:
        port = bound.getsockname()[1]

        def run() -> None:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(server.serve([bound]))

        thread = threading.Thread(target=run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        for streams in (1, options.streams):
            found = measure(engine, loop, port, ours, (streams, options.tokens, options.rounds))
            shares = [1 - s / d for s, d in zip(found["served"], found["direct"], strict=True)]
            rows.append(
                Row(
                    f"{streams} streams",
                    {"streams": streams},
                    {
                        "server_cpu_us_per_chunk": Spread.of(found["cpu"], "us"),
                        "chunks_per_stream": Spread.of(found["chunks"], ""),
                        "ttft_ms": Spread.of(found["ttft"], "ms"),
                        "added_ttft_ms": Spread.of(found["added"], "ms"),
                        "served_tokens_per_second": Spread.of(found["served"], "tokens/s"),
                        "direct_tokens_per_second": Spread.of(found["direct"], "tokens/s"),
                        "share_of_throughput": Spread.of(shares, ""),
                    },
                )
            )
            print(rows[-1])
        server.should_exit = True
        thread.join()
    ours.send(None)
    process.join()
    notes = [
        goal("server CPU per chunk", rows[-1], "server_cpu_us_per_chunk", MAX_CPU_US, least=False),
        goal("added to the first token at 1", rows[0], "added_ttft_ms", MAX_TTFT_MS, least=False),
        "ttft_ms is from a request sent to its first chunk read, the prompt's pass included; "
        "added_ttft_ms is that less what the same prompt took without a server.",
    ]
    shapes = {"target": TARGET, "draft": DRAFT, "tokens": options.tokens, "K": 4, "threads": 1}
    record("serve", options, shapes, rows, notes)


if __name__ == "__main__":
    main()
