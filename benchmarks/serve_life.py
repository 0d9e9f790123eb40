"""How a server bears those who leave, and how it ends: by SIGTERM, by SIGKILL, and is back.

    python -m benchmarks.serve_life

A thousand clients hang up at random moments: queued, before the first token, in a stream, at its
end. SIGTERM comes while many are served and more wait: each must get a complete answer or one that
says that it was cut, if need be an empty one. After SIGKILL a new process must be ready.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import httpx

from benchmarks.common import DRAFT, TARGET, goal, parse, record
from benchmarks.served import Served, leave, served
from foretoken.lab.results import Row, Spread
from foretoken.lab.workloads import heldout

PATH = "/v1/completions"
MOMENTS = (0.0, 0.002, 0.02, 0.1, 0.4)
AT_ONCE = 40  # of those who leave
MAX_TO_FREE, MAX_TO_BE_READY = 1.0, 10.0  # seconds
LONG = 600  # tokens, more than there is time for


def client(server: Served) -> httpx.AsyncClient:
    """As many connections as are asked for."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


async def visits(server: Served, count: int) -> Counter[str]:
    """So many clients that leave at random moments: how many before the answer's end."""
    draw, turns, prompts = random.Random(7), asyncio.Semaphore(AT_ONCE), heldout()
    found = Counter[str]()

    async def visit(http: httpx.AsyncClient, i: int) -> None:
        body = {"prompt": prompts[i % len(prompts)].prompt, "ignore_eos": True, "seed": i,
                "max_tokens": draw.choice([5, 300]), "stream": draw.random() < 0.5}  # fmt: skip
        async with turns:
            await leave(http, PATH, body, draw.choice(MOMENTS))
        found["visits"] += 1

    async with client(server) as http:
        await asyncio.gather(*(visit(http, i) for i in range(count)))
    return found


def leaving(count: int) -> Row:
    """Seconds from the last one's leaving until nothing runs, waits or holds a block."""
    with served() as server:
        found = asyncio.run(visits(server, count))
        seconds, held = server.seconds_to_free(), server.num_held()
        body = {"prompt": "def f(", "max_tokens": 3}
        answer = httpx.post(server.url + PATH, json=body, timeout=30)
        values: dict[str, Any] = {
            **found,
            "seconds_to_free": seconds,
            "held_afterwards": held,
            "answered_afterwards": int(answer.status_code == 200),
            "exit_code": server.end(),
        }
    return Row(f"{count} clients that leave", {"clients": count}, values)


def outcome(answer: httpx.Response) -> str:
    """What one client got."""
    if answer.status_code != 200:
        return "refused"
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    if events and not answer.text.endswith("data: [DONE]\n\n"):
        return "broken_off"
    choice = json.loads(events[-1] if events else answer.text)["choices"][0]
    if choice.get("stop_reason") != "shutdown":
        return "complete" if choice["finish_reason"] == "length" else "broken_off"
    has_text = len(events) > 1 or choice["text"]
    return "marked_partial" if has_text else "marked_empty"


def ended_under_load(count: int, drain: float) -> Row:
    """What clients get whose server is told to end, half of them streams."""
    with served("--drain-timeout", str(drain), "--max-num-seqs", "16") as server:

        async def ask(http: httpx.AsyncClient, i: int) -> str:
            body = {"prompt": heldout()[i].prompt, "ignore_eos": True, "seed": i,
                    "max_tokens": 20 if i % 4 == 0 else LONG, "stream": i % 2 == 0}  # fmt: skip
            try:
                return outcome(await http.post(PATH, json=body))
            except httpx.TransportError:
                return "lost"

        async def load() -> tuple[list[str], float]:
            async with client(server) as http:
                asking = [asyncio.create_task(ask(http, i)) for i in range(count)]
                taken = 0
                while taken < count:
                    taken = int(await asyncio.to_thread(server.num_held))
                    taken += sum(task.done() for task in asking)
                server.process.send_signal(signal.SIGTERM)
                start = time.perf_counter()
                return await asyncio.gather(*asking), start

        outcomes, start = asyncio.run(load())
        code = server.process.wait(60)
        seconds = time.perf_counter() - start
    kinds = "complete marked_partial marked_empty refused broken_off lost".split()
    values = {name: outcomes.count(name) for name in kinds}
    told = {"drain_timeout": drain, "seconds_to_end": seconds, "exit_code": code}
    return Row(f"SIGTERM under {count} requests", {"clients": count}, values | told)


def killed(times: int) -> Row:
    """Seconds from the start of a process until it is ready, its forerunner killed under load."""
    ready, answered, port = [], [], 0
    for _ in range(times + 1):
        start = time.perf_counter()
        with served(port=port) as server:
            while httpx.get(f"{server.url}/health/ready").status_code != 200:
                time.sleep(0.01)
            ready.append(time.perf_counter() - start)
            body = {"prompt": "def f(", "max_tokens": 3}
            httpx.post(server.url + PATH, json=body, timeout=30).raise_for_status()
            answered.append(time.perf_counter() - start)
            port = server.port

            async def load(server: Served) -> None:
                async with client(server) as http:
                    long = {"prompt": "def f(", "max_tokens": LONG, "stream": True}
                    asking = [asyncio.create_task(http.post(PATH, json=long)) for _ in range(16)]
                    await asyncio.sleep(0.5)
                    server.process.kill()
                    await asyncio.gather(*asking, return_exceptions=True)

            asyncio.run(load(server))
    values = {
        "seconds_to_be_ready": Spread.of(ready[1:], "s"),
        "seconds_to_first_answer": Spread.of(answered[1:], "s"),
        "most_seconds_to_be_ready": max(ready[1:]),
    }
    return Row("SIGKILL under load and a new start on its port", {"times": times}, values)


def main() -> int:
    """Measure, record, and fail if a client was lost or something is still held."""
    options = parse(__doc__, clients=1000, accepted=48, restarts=5)
    rows = [leaving(options.clients), ended_under_load(options.accepted, 4.0)]
    rows.append(killed(options.restarts))
    for row in rows:
        print(row)
    notes = [
        goal("seconds until 1 000 that left hold nothing", rows[0], "seconds_to_free",
             MAX_TO_FREE, least=False),
        goal("requests lost by SIGTERM", rows[1], "lost", 0, least=False),
        goal("most seconds to be ready after SIGKILL", rows[2], "most_seconds_to_be_ready",
             MAX_TO_BE_READY, least=False),
        "Under SIGTERM: `marked_partial` and `marked_empty` are answers that say "
        "`stop_reason: shutdown`; empty are those for which there was no slot before the end.",
    ]  # fmt: skip
    shapes = {"target": TARGET, "draft": DRAFT, "at_once": AT_ONCE, "K": 4, "threads": 1}
    record("serve_life", options, shapes, rows, notes)
    left, term = rows[0].values, rows[1].values
    wrong = [left["held_afterwards"], left["exit_code"], term["exit_code"]]
    wrong += [term[name] for name in ("refused", "broken_off", "lost")]
    return int(any(wrong) or left["answered_afterwards"] != 1)


if __name__ == "__main__":
    sys.exit(main())
