"""What `foretoken plan --fleet` says of 1, 2 and 3 replicas on this machine, and what they serve.

    python -m benchmarks.fleet_plan

Requests come at random to real replicas, at rates around the predicted one; what they serve is the
rate at which 95 % of the requests still keep both bounds, on a line between the two rates that
enclose it. The client that sends them runs on the same cores. A shared machine's speed changes by
half within minutes, so each plan is made before and after what it is compared with, and the mean
of both taken.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.common import parse, record
from benchmarks.replicas import fleet
from benchmarks.served import Served
from foretoken.lab.results import Row, Value
from foretoken.lab.workloads import heldout
from foretoken.models import load_tokenizer

CORES, INPUT, OUTPUT, SLOTS = 2, 96, 64, 16
TTFT_MS, TPOT_MS, MET = 1000.0, 50.0, 0.95
AROUND = (0.7, 0.85, 1.0, 1.15, 1.3, 1.45)
GOAL = 0.2
COUNTS = (1, 2, 3)


def predicted(count: int) -> dict[str, float]:
    """Requests per second by the command, for a file with so many replicas."""
    engine = {"model": "tiny-python", "max_num_seqs": SLOTS, "threads": 1}
    model = {"engine": engine, "replicas": count, "replica_cpus": part(count)}
    app = {"import_path": "foretoken.serve.deployment:build", "args": {"models": [model]}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fleet.yaml"
        path.write_text(yaml.safe_dump({"applications": [app]}), encoding="utf-8")
        words = [sys.executable, "-m", "foretoken", "plan", "--fleet", str(path), "--json"]
        words += ["--rate", "1", "--cores", str(CORES), "--input-len", str(INPUT)]
        words += ["--output-len", str(OUTPUT), "--slo-ttft-ms", str(TTFT_MS)]
        words += ["--slo-tpot-ms", str(TPOT_MS)]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    rows = [row for row in json.loads(said)["rows"] if row["labels"]["kind"] == "replicas"]
    return {row["case"]: row["values"]["capacity"] for row in rows}


def part(count: int) -> float:
    """Cores of a replica."""
    return min(1.0, CORES * 100 // count / 100)


def prompts() -> list[list[int]]:
    """Token ids, as many as were planned with, no two of which begin alike."""
    tokenizer = load_tokenizer("tiny-python")
    ids = [i for item in heldout() for i in tokenizer.encode(item.prompt + item.reference)]
    draw = random.Random(5)
    starts = [draw.randrange(len(ids) - INPUT) for _ in range(4000)]
    return [[draw.choice(ids), *ids[at : at + INPUT - 1]] for at in starts]


async def times(port: int, body: bytes) -> tuple[float, float]:
    """Seconds until the first event of a stream, and until its end; a client that costs little."""
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    await reader.readuntil(b"data: {")
    first, tail = time.perf_counter() - begun, b""
    while b"[DONE]" not in tail:
        if not (part := await reader.read(2**16)):
            raise ConnectionError("a stream was cut off")
        tail = tail[-16:] + part
    writer.close()
    return first, time.perf_counter() - begun


async def met(server: Served, rate: float, seconds: float) -> float:
    """The share of requests that keep the bounds, those of the first fifth left out."""
    draw, found, texts = random.Random(int(rate * 100)), list[tuple[float, bool]](), prompts()

    async def one(number: int, at: float) -> None:
        body = {"prompt": texts[number % len(texts)], "max_tokens": OUTPUT, "ignore_eos": True,
                "stream": True, "temperature": 0}  # fmt: skip
        first, last = await times(server.port, json.dumps(body).encode())
        found.append(
            (at, first <= TTFT_MS / 1e3 and (last - first) / (OUTPUT - 1) <= TPOT_MS / 1e3)
        )

    tasks, start, at = [], time.perf_counter(), 0.0
    while at < seconds:
        await asyncio.sleep(max(start + at - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(one(len(tasks), at)))
        at += draw.expovariate(rate)
    await asyncio.gather(*tasks)
    late = [keeps for at, keeps in found if at > seconds / 5]
    return sum(late) / len(late)


def measured(server: Served, around: float, seconds: float) -> tuple[float, dict[float, float]]:
    """Requests per second within the bounds, and the share that kept them at each rate."""
    shares, rate = dict[float, float](), 0.0
    for factor in AROUND:
        share = asyncio.run(met(server, factor * around, seconds))
        shares[factor * around] = share
        print(f"  {factor * around:.1f} requests/s: {share:.3f} keep the bounds", flush=True)
        if share < MET:
            break
        rate = factor * around
    else:
        return rate, shares
    if not rate:
        return factor * around * share / MET, shares
    last, low = shares[rate], shares[factor * around]
    return rate + (last - MET) / (last - low) * (factor * around - rate), shares


def main() -> None:
    options = parse(__doc__, seconds=25)
    rows = []
    for count in COUNTS:
        name = f"{count} replica{'s' * (count > 1)}"
        before = predicted(count)[name]
        print(name, "predicted", round(before, 2), flush=True)
        words = ("--replica-cpus", str(part(count)), "--max-num-seqs", str(SLOTS))
        with fleet(count, "--no-speculation", *words) as server:
            asyncio.run(met(server, before / 3, 3))
            found, shares = measured(server, before, options.seconds)
        after = predicted(count)[name]
        mean = (before + after) / 2
        values: dict[str, Value] = {
            "predicted": mean, "predicted_before": before, "predicted_after": after,
            "measured": found, "error": mean / found - 1,
            **{f"met_at_{rate:.1f}": share for rate, share in shares.items()},
        }  # fmt: skip
        print(values, flush=True)
        rows.append(Row(name, {"kind": "fleet", "replicas": count}, values))
    worst = max(abs(float(row.values["error"])) for row in rows)  # type: ignore[arg-type]
    reached = "reached" if worst <= GOAL else "NOT reached"
    notes = [f"Largest error {worst:.1%}, goal <= {GOAL:.0%}: {reached}."]
    shapes = {"input": INPUT, "output": OUTPUT, "slots": SLOTS, "cores": CORES,
              "ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS}  # fmt: skip
    record("fleet_plan", options, shapes, rows, notes)


if __name__ == "__main__":
    main()
