"""How long a prompt keeps running streams waiting, with and without `--max-step-seconds`.

    python -m benchmarks.stalls

Two requests stream; a prompt of 1 900 tokens comes, which no cache holds. What is timed is the
longest gap of the two streams until the prompt has its first token, and when that comes: next to
the streams, and without any. A draft model computes the prompt behind that, in one step: the
longest gap until 16 tokens are there is told apart. Servers with the default and
with no bound take turns.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import Any

import httpx

from benchmarks.common import TARGET, goal, heldout_tokens, parse, record
from benchmarks.served import served
from foretoken.lab.results import Row, Spread
from foretoken.serve.options import MAX_STEP_SECONDS

NO_BOUND = 1000.0  # seconds, which no step takes
PROMPT, ANSWER = 1900, 16  # tokens
SHORT, LONG = 40, 1800  # of a stream
MOST_GAP = 0.3
Times = dict[str, float]


async def stream(http: httpx.AsyncClient, prompt: list[int], count: int) -> list[float]:
    """When a request was sent, and when each of its chunks came; for a task: also if cancelled."""
    body = {"prompt": prompt, "max_tokens": count, "stream": True, "ignore_eos": True, "seed": 1}
    times = [time.perf_counter()]
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
    except asyncio.CancelledError:
        pass
    return times


def gaps(times: list[float], start: float, end: float) -> list[float]:
    """Between chunks of a stream, those with their middle in this time."""
    return [b - a for a, b in pairwise(times[1:]) if start <= (a + b) / 2 < end]


async def once(url: str, ids: list[int], turn: int) -> Times:
    """One prompt next to two streams, then another by itself."""
    prompts = [ids[(2 * turn + i) * PROMPT :][:PROMPT] for i in range(2)]
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        running = [
            asyncio.create_task(stream(http, ids[-SHORT * (2 * turn + i + 1) :][:SHORT], LONG))
            for i in range(2)
        ]
        await asyncio.sleep(1.0)
        sent, first, *_, last = await stream(http, prompts[0], ANSWER)
        await asyncio.sleep(0.5)
        if any(task.done() for task in running):
            raise RuntimeError("a stream ended before the prompt had its token")
        for task in running:
            task.cancel()
        streams = await asyncio.gather(*running)
        await asyncio.sleep(0.5)
        alone, first_alone, *_ = await stream(http, prompts[1], 1)
    before = [gap for times in streams for gap in gaps(times, streams[0][0], sent)]
    during = [gap for times in streams for gap in gaps(times, sent, first)]
    behind = [gap for times in streams for gap in gaps(times, first, last)]
    return {
        "usual_gap": median(before),
        "longest_gap": max(during),
        "longest_gap_behind": max(behind),
        "first_token": first - sent,
        "first_token_alone": first_alone - alone,
    }


def main() -> int:
    """Measure and record."""
    options = parse(__doc__, repeats=3, turns=3, threads=2)
    ids, rows = heldout_tokens(), list[Row]()
    found = defaultdict[tuple[str, float], dict[str, list[float]]](lambda: defaultdict(list))
    for turn in range(options.repeats):
        for drafts in ("plain", "draft model"):
            for bound in (MAX_STEP_SECONDS, NO_BOUND):
                words = ["--threads", str(options.threads), "--max-step-seconds", str(bound)]
                words += ["--no-speculation"] if drafts == "plain" else []
                with served(*words) as server:
                    for i in range(options.turns):
                        times = asyncio.run(once(server.url, ids, turn * options.turns + i))
                        for name, seconds in times.items():
                            found[drafts, bound][name].append(seconds)
    for (drafts, bound), lists in found.items():
        values: dict[str, Any] = {name: Spread.of(x, "s") for name, x in lists.items()}
        case = f"{drafts}, {f'{bound:g} s' if bound < NO_BOUND else 'no bound'}"
        rows.append(Row(case, {"drafts": drafts, "max_step_seconds": bound}, values))
        print(rows[-1])
    notes = [
        goal(f"{row.case}: longest gap next to a prompt, s", row, "longest_gap", MOST_GAP,
             least=False)
        for row in rows if row.labels["max_step_seconds"] == MAX_STEP_SECONDS
    ]  # fmt: skip
    shapes = {"target": TARGET, "prompt": PROMPT, "streams": 2, "threads": options.threads}
    record("stalls", options, shapes, rows, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
