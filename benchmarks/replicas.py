"""Replicas on Ray Serve: what the death of one costs, what a hop adds, what prefixes gain.

    python -m benchmarks.replicas

Requests of four kinds, streamed and whole, go to two replicas, and one of them is killed in the
midst (SIGKILL): each request must be answered, or fail with a reason within ten seconds, and none
may be computed twice. The same requests, one after another, go to one engine without Ray and with
it in turns: the difference is the hop. Prompts with eight beginnings go to two replicas whose
caches have room for five of them each, routed by prefix, by Ray's own prefix router, and by the
shorter queue. `benchmarks.messages` says what a message costs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.common import goal, parse, record
from benchmarks.served import Served, served
from foretoken.lab.results import Row, Spread, Value
from foretoken.lab.workloads import heldout

AT_ONCE = 16
MOST_SECONDS = 10.0  # until a request that fails has failed
PREFIXES, PREFIX_TOKENS, BLOCKS = 8, 700, 215
MAX_FIRST_MS, MAX_CHUNK_MS, MIN_GAIN = 10.0, 3.0, 1.5
FAILED = re.compile(r'^(event: error$|data: \{"error")', re.MULTILINE)
ROUTERS = ("prefix", "ray_prefix", "shorter_queue")


class Outcome(NamedTuple):
    """What became of a request: `answered`, `refused` (503), `broken` (an error in its stream) or
    `lost` (anything else); when it began and ended, and which replica had it."""

    kind: str
    began: float
    ended: float
    replica: str


@contextmanager
def fleet(count: int, *options: str, router: str = "prefix") -> Iterator[Served]:
    """So many replicas with one thread each; it waits until all are up."""
    module = f"benchmarks.routed.{router}"
    with served("--replicas", str(count), *options, module=module) as started:
        yield started


def replica_pids() -> list[int]:
    """Processes of replicas, as Ray names them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if words.startswith(b"ray::ServeReplica:foretoken"):
                found.append(int(entry.name))
    return found


def mixed(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests: path and body."""
    draw, prompts, found = random.Random(11), heldout(), []
    for i in range(count):
        text = prompts[i % len(prompts)].prompt[-600:]
        turn = [{"role": "user", "content": text}]
        body: dict[str, Any] = {"stream": draw.random() < 0.6, "seed": i, "temperature": 0.8}
        path, sizes = draw.choice(["completions", "chat/completions", "responses", "messages"]), {}
        length = draw.choice([8, 40, 160])
        if path == "completions":
            sizes = {"prompt": text, "max_tokens": length, "n": draw.choice([1, 1, 2])}
        elif path == "responses":
            sizes = {"input": text, "max_output_tokens": length}
        else:
            sizes = {"messages": turn, "max_tokens": length}
        if path in ("responses", "messages"):
            del body["seed"]
        found.append((f"/v1/{path}", {"model": "tiny-python", **body, **sizes}))
    return found


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], number: int) -> Outcome:
    """One request, and what its client learns."""
    began = time.monotonic()
    headers = {"X-Request-Id": f"request-{number}"}
    try:
        answer = await client.post(path, json=body, headers=headers)
    except httpx.HTTPError as error:
        return Outcome(f"lost: {type(error).__name__}", began, time.monotonic(), "")
    text, kind = answer.text, "lost"
    if answer.status_code == 503 and json.loads(text)["error"]["message"]:
        kind = "refused"
    elif answer.status_code == 200 and body["stream"]:
        kind = "broken" if FAILED.search(text) else "lost"
        kind = "answered" if is_complete(path, text) and kind == "lost" else kind
    elif answer.status_code == 200:
        kind = "answered"
    replica = answer.headers.get("x-replica", "")
    return Outcome(kind, began, time.monotonic(), replica)


def is_complete(path: str, text: str) -> bool:
    """Whether a stream ends as its API says."""
    if path == "/v1/messages":
        return "event: message_stop" in text
    if path == "/v1/responses":
        return "event: response.completed" in text or "event: response.incomplete" in text
    return text.endswith("data: [DONE]\n\n") and "finish_reason" in text


async def killing(server: Served, count: int) -> tuple[list[Outcome], float, float]:
    """All requests, one replica killed after 40 % of them; and when, and when it was back."""
    turns, done, killed, back = asyncio.Semaphore(AT_ONCE), 0, 0.0, 0.0

    async def one(client: httpx.AsyncClient, number: int, path: str, body: dict[str, Any]) -> Any:
        nonlocal done, killed
        async with turns:
            if done >= 0.4 * count and not killed:
                killed = time.monotonic()
                os.kill(replica_pids()[0], signal.SIGKILL)
            outcome = await ask(client, path, body, number)
            done += 1
        return outcome

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        work = [one(client, i, *each) for i, each in enumerate(mixed(count))]
        waiting = asyncio.gather(*work)
        while not back:
            await asyncio.sleep(0.05)
            if killed and len(up(server)) == 2 and time.monotonic() > killed + 1:
                back = time.monotonic()
        found = await waiting
    return found, killed, back


def up(server: Served) -> set[str]:
    """Names of the replicas that say how they are."""
    return set(httpx.get(f"{server.url}/load", timeout=30).json()["replicas"])


def death(server: Served, count: int) -> Row:
    """One of two replicas dies under requests."""
    before = up(server)
    already = computed(server, before)
    found, killed, back = asyncio.run(killing(server, count))
    alive = up(server)
    made = computed(server, alive)
    kinds = Counter(each.kind for each in found)
    late = [each.ended - max(each.began, killed) for each in found if each.kind != "answered"]
    samples = Counter[str]()
    for each, (_, body) in zip(found, mixed(count), strict=True):
        if each.kind == "answered":
            samples[each.replica] += body.get("n", 1)
    values: dict[str, Value] = {
        "requests": count,
        **{kind: kinds[kind] for kind in ("answered", "refused", "broken")},
        "lost": sum(n for kind, n in kinds.items() if kind.startswith("lost")),
        "computed_twice": sum(
            abs(made[name] - already.get(name, 0) - samples[name]) for name in alive
        ),
        "seconds_to_fail": max(late, default=0.0),
        "seconds_until_back": back - killed,
        "replicas_before": len(before),
        "replicas_after": len(alive),
    }
    print(values)
    return Row("one of two replicas is killed", {"kind": "death"}, values)


def computed(server: Served, replicas: set[str]) -> dict[str, float]:
    """Samples that each of these replicas has completed, as it counts them itself."""
    text = server.metrics()
    return {name: sum(_values(text, "vllm:request_success_total", name)) for name in replicas}


def _values(text: str, name: str, replica: str) -> list[float]:
    pattern = rf'^{re.escape(name)}\{{.*replica="{replica}".*\}} (\S+)$'
    return [float(value) for value in re.findall(pattern, text, re.MULTILINE)]


def seeds(server: Served) -> Row:
    """The same request, many at once, seeded and not: how many texts come, of how many replicas."""
    body = {"prompt": "def fibonacci(n):\n", "max_tokens": 48, "temperature": 0.9}

    async def several(seeded: bool) -> list[tuple[str, str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            given = [body | ({"seed": 7} if seeded else {}) for _ in range(40)]
            asked = (client.post("/v1/completions", json=each) for each in given)
            answers = await asyncio.gather(*asked)
        return [(a.headers["x-replica"], a.json()["choices"][0]["text"]) for a in answers]

    same, free = asyncio.run(several(True)), asyncio.run(several(False))
    values: dict[str, Value] = {
        "replicas": len({name for name, _ in same}),
        "texts_with_a_seed": len({text for _, text in same}),
        "texts_without": len({text for _, text in free}),
    }
    print(values)
    return Row("40 requests at once, with one seed and without", {"kind": "seeds"}, values)


async def arrivals(client: httpx.AsyncClient, body: dict[str, Any]) -> list[float]:
    """Milliseconds after the request at which each character of a streamed text came."""
    start, found = time.perf_counter(), list[float]()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text = json.loads(line[6:])["choices"][0]["text"]
                found += [1e3 * (time.perf_counter() - start)] * len(text)
    return found


def hop(repeats: int) -> Row:
    """One engine without Ray and one behind a front, in turns: streams of 64 plain steps."""
    alone, behind = [], []

    async def run(first: Served, second: Served) -> None:
        one = httpx.AsyncClient(base_url=first.url, timeout=60)
        other = httpx.AsyncClient(base_url=second.url, timeout=60)
        prompts = heldout()
        for i in range(repeats + 3):
            body = {"prompt": prompts[i % len(prompts)].prompt[-300:], "temperature": 0,
                    "max_tokens": 64, "ignore_eos": True, "stream": True}  # fmt: skip
            pair = [(one, alone), (other, behind)]
            for client, times in pair if i % 2 else pair[::-1]:
                times.append(await arrivals(client, body))

    plain = ("--no-speculation",)
    with served(*plain) as first, fleet(1, "--replica-cpus", "1", *plain) as second:
        asyncio.run(run(first, second))
    pairs = list(zip(alone[3:], behind[3:], strict=True))
    later = [statistics.median(y - x for x, y in zip(a, b, strict=True)) for a, b in pairs]
    measured = {
        "first_token_ms": [b[0] - a[0] for a, b in pairs], "chunk_ms": later,
        "last_token_ms": [b[-1] - a[-1] for a, b in pairs],
        "alone_first_ms": [a[0] for a, _ in pairs], "alone_last_ms": [a[-1] for a, _ in pairs],
    }  # fmt: skip
    values: dict[str, Value] = {name: Spread.of(all_, "ms") for name, all_ in measured.items()}
    print({name: round(statistics.median(all_), 2) for name, all_ in measured.items()})
    return Row("a front and one replica, over one engine", {"kind": "hop"}, values)


def sharing(router: str, count: int) -> Row:
    """Prompts with eight beginnings, four at a time."""
    draw = random.Random(3)
    text = "".join(item.prompt + item.reference for item in heldout())
    size = 3 * PREFIX_TOKENS  # characters: more than so many tokens
    starts = [text[i * size : (i + 1) * size] for i in range(PREFIXES)]
    prompts = [
        start + f"\n# {draw.random()}\n" for start in starts for _ in range(count // PREFIXES)
    ]
    draw.shuffle(prompts)

    async def run(server: Served) -> float:
        turns = asyncio.Semaphore(4)

        async def one(client: httpx.AsyncClient, prompt: str) -> None:
            async with turns:
                body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
                answer = await client.post("/v1/completions", json=body)
                answer.raise_for_status()

        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            start = time.perf_counter()
            await asyncio.gather(*(one(client, prompt) for prompt in prompts))
            return time.perf_counter() - start

    with fleet(2, "--num-blocks", str(BLOCKS), router=router) as server:
        seconds = asyncio.run(run(server))
        text = server.metrics()
    totals = {
        name: sum(float(v) for v in re.findall(rf"^vllm:prefix_cache_{name}_total\{{.*\}} (\S+)$",
                                               text, re.MULTILINE))
        for name in ("hits", "queries")
    }  # fmt: skip
    values = {"hit_rate": totals["hits"] / totals["queries"], "seconds": seconds,
              "prompt_tokens": totals["queries"] / count}  # fmt: skip
    print(router, values)
    return Row(f"8 prefixes, routed by {router}", {"kind": "sharing", "router": router}, values)


def messages() -> list[Row]:
    """What a message costs by each way, in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.messages"]
    said = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, dict[str, float]] = json.loads(said.strip().splitlines()[-1])
    print(found)
    return [
        Row(f"a message by {way}", {"kind": "messages", "way": way}, {**values})
        for way, values in found.items()
    ]


def main() -> None:
    options = parse(__doc__, requests=500, repeats=40, shared=240)
    with fleet(2) as server:
        rows = [death(server, options.requests), seeds(server)]
    rows.append(hop(options.repeats))
    rows += [sharing(router, options.shared) for router in ROUTERS]
    rows += messages()
    by_name = {row.case: row for row in rows}
    dead, hops = rows[0], rows[2]
    rates = {row.labels["router"]: row.values["hit_rate"] for row in rows if "router" in row.labels}
    gain = rates["prefix"] / rates["shorter_queue"]
    notes = [
        goal("first token, ms", hops, "first_token_ms", MAX_FIRST_MS, least=False),
        goal("a chunk, ms", hops, "chunk_ms", MAX_CHUNK_MS, least=False),
        f"Prefix routing over the shorter queue: {gain:.2f} (at least {MIN_GAIN}).",
        f"Seconds to fail: {dead.values['seconds_to_fail']:.2f} (at most {MOST_SECONDS:g}).",
    ]
    shapes = {"at_once": AT_ONCE, "prefixes": PREFIXES, "blocks": BLOCKS, "cases": [*by_name]}
    record("replicas", options, shapes, rows, notes)


if __name__ == "__main__":
    main()
