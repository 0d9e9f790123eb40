"""Mixed requests through an engine that runs ahead, for as long as asked; nothing is lost or left.

Random lengths, temperatures, rules, K, edits, stop strings and samples; a pool too small for what
runs, prefixes that are shared, aborts at random moments. Each request is one of some hundreds whose
samples are known from such an engine, alone and without CUDA graphs (each kind of step would take
seconds to capture, 256 for 300 requests): outputs that differ are counted. Logits of one row
differ by rounding with what else is in the batch, so that a token may part at a near-tie, and
nowhere else (`near_ties.py`); in the native decoder they do not, and none may part.

    python -m benchmarks.soak --minutes 30                    # make soak
    python -m benchmarks.soak --device cuda --minutes 8 --requests 20000 --alone 25 --limit 555
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.near_ties import Parted, unexplained
from foretoken import LLM, SamplingParams
from foretoken.engine.boundary import build_output
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestGroup
from foretoken.lab.results import Row, collect, write
from foretoken.lab.workloads import heldout

NUM_DISTINCT = 300
CHECK_EVERY = 50  # steps between two checks of every block and slot
MOST_PARTED = 100  # samples that are looked into; more would be a bug, and take long
TO_END = 30  # seconds that are left for this and for who still runs
EDITS: list[dict[str, Any]] = [
    {}, {}, {},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
    {"bad_words": [" re", "x"], "logit_bias": {60: 2.0}},
    {"stop": ["\n\n", "("], "min_tokens": 2},
    {"stop_token_ids": list(range(0, 4000, 37)), "logprobs": 1},
    {"prompt_logprobs": 1, "top_p": 0.9},
    {"top_k": 20, "top_p": 0.95},
]  # fmt: skip
RULES = [None, "standard", "block", "coupled"]


class Known:
    """A request and what its samples are, alone."""

    def __init__(self, engine: Engine, prompts: list[list[int]], rng: random.Random) -> None:
        start = rng.choice(prompts)
        self.prompt = start[: rng.randint(1, min(len(start), 100))]
        self.params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            seed=rng.randrange(2**31),
            max_tokens=rng.randint(1, 90),
            n=rng.choice([1, 1, 1, 2]),
            num_speculative_tokens=rng.choice([None, None, 0, 1, 2]),
            rejection_sample_method=rng.choice(RULES),
            **rng.choice(EDITS),
        )
        group = engine.add("alone", self.prompt, self.params)
        while not group.finished:
            engine.step()
        if group.error is not None:
            raise group.error
        self.alone = outputs(engine, group)


def outputs(engine: Engine, group: RequestGroup) -> list[list[int]]:
    return [sample.token_ids for sample in build_output(engine, group).outputs]


class Crowd:
    """Requests that arrive, are aborted, and end."""

    def __init__(self, engine: Engine, known: list[Known], rng: random.Random, most: int) -> None:
        self.engine, self.known, self.rng, self.most = engine, known, rng, most
        self.running: dict[RequestGroup, Known] = {}
        self.found: Counter[str] = Counter()
        self.parted: list[Parted] = []

    def step(self) -> None:
        """Let some come, perhaps one go, and take a step."""
        found = self.found
        room = self.most - len(self.engine.scheduler.waiting)
        for _ in range(min(self.rng.choice([0, 1, 2, 8]), max(room, 0))):
            found["requests"] += 1
            known = self.rng.choice(self.known)
            group = self.engine.add(str(found["requests"]), known.prompt, known.params)
            self.running[group] = known
        if self.running and self.rng.random() < 0.1:
            self.engine.abort(self.rng.choice(list(self.running)))
        self.engine.step()
        found["steps"] += 1
        if found["steps"] % CHECK_EVERY == 0:
            self.engine.check_integrity()
        for group in [group for group in self.running if group.finished]:
            self._take(group, self.running.pop(group))

    def drain(self) -> None:
        """Serve who is left; every block and slot must come back."""
        while self.engine.has_work:
            self.engine.step()
        self.engine.step()  # what runs ahead is read
        for group, known in self.running.items():
            self._take(group, known)
        self.running.clear()
        self.engine.check_integrity()

    def _take(self, group: RequestGroup, known: Known) -> None:
        found, metrics = self.found, group.metrics
        if group.error is not None:
            raise group.error
        found["preemptions"] += metrics.num_preemptions
        found["cached_tokens"] += metrics.num_cached_tokens
        found["accepted"] += metrics.num_accepted_tokens
        params = known.params
        if params.edits_logits and not self.engine.runner.slots.on_host:
            params = replace(params, num_speculative_tokens=0)  # as the engine serves it
        for request, got, alone in zip(
            group.samples, outputs(self.engine, group), known.alone, strict=True
        ):
            found["samples"] += 1
            found["tokens"] += len(got)
            aborted = request.finish_reason == "abort"
            found["aborted"] += aborted
            alone = alone[: len(got)] if aborted else alone
            if parted := Parted.of(known.prompt, params, request.index, got, alone):
                self.parted.append(parted)


def memory(device: torch.device) -> dict[str, float]:
    """MiB that the process holds, and what PyTorch has allocated on the GPU."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    on_gpu = torch.cuda.memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    return {"resident": pages * 4096 / 2**20, "gpu": on_gpu}


def learn(llm: LLM, rng: random.Random, seconds: float) -> list[Known]:
    """What requests give alone, as many as there is time for."""
    prompts = [llm.get_tokenizer().encode(p.prompt) for p in heldout(40)]
    known, start = list[Known](), time.perf_counter()
    while len(known) < NUM_DISTINCT and time.perf_counter() - start < seconds:
        known.append(Known(llm.engine, prompts, rng))
        if len(known) % 20 == 0:
            took = time.perf_counter() - start
            print(f"{took:6.1f} s: {len(known)} requests alone", flush=True)
    return known


def soak(crowd: Crowd, args: argparse.Namespace, end: float) -> dict[str, float]:
    """Let the crowd come and go; how long it did, and what memory has grown by.

    Growth counts from a quarter of the time on, and from the last CUDA graph that was captured.
    """
    engine, start = crowd.engine, time.perf_counter()
    device, graphs = engine.runner.slots.device, engine.runner.graphs
    before, captured, since, told, now = memory(device), 0, 0.0, start, start
    while now < end - TO_END and (
        now - start < 60 * args.minutes or crowd.found["requests"] < args.requests
    ):
        crowd.step()
        now = time.perf_counter()
        if now >= told:
            told = now + 20
            if now - start < 15 * args.minutes or graphs.num_bytes != captured:
                before, captured, since = memory(device), graphs.num_bytes, now - start
            print(f"{now - start:6.0f} s", dict(crowd.found), memory(device), flush=True)
    seconds = time.perf_counter() - start
    crowd.drain()
    after = memory(device)
    return {
        "seconds": round(seconds, 1),
        "resident_mib_grown": round(after["resident"] - before["resident"], 1),
        "gpu_mib_grown": round(after["gpu"] - before["gpu"], 2),
        "grown_since_second": round(since, 1),
        "blocks_missing": engine.scheduler.pool.num_blocks - engine.scheduler.pool.num_free,
    }


def main() -> int:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the crowd")
    parser.add_argument("--requests", type=int, default=0, help="at least so many")
    parser.add_argument("--alone", type=float, default=1e9, help="seconds for requests alone")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--num-blocks", type=int, default=0, help="of the pool; 0: too few")
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    rng = random.Random("soak")
    seqs = 96 if args.device != "cpu" else 8
    options: dict[str, Any] = {
        "max_num_seqs": seqs, "max_model_len": 256, "max_num_batched_tokens": 512 + 5 * seqs,
        "block_size": 16, "num_blocks": args.num_blocks or 3 * seqs, "dtype": "float32",
    }  # fmt: skip
    speculation = {"method": args.method, "num_speculative_tokens": 4}
    given = ("tiny-python", speculation)
    options |= {"device": args.device, "async_scheduling": True}
    with LLM(*given, enforce_eager=True, **options) as llm:
        known = learn(llm, rng, args.alone)
    llm = LLM(*given, **options)
    crowd = Crowd(llm.engine, known, rng, 2 * seqs)
    grown = soak(crowd, args, start + args.limit)
    looked_into = crowd.parted[:MOST_PARTED]
    wrong = unexplained(looked_into, speculation)
    found = (
        dict(crowd.found)
        | grown
        | {
            "distinct": len(crowd.known),
            "different": len(crowd.parted),
            "near_ties": len(looked_into) - len(wrong),
            "unexplained": len(crowd.parted) - len(looked_into) + len(wrong),
        }
    )
    print(json.dumps(found), *wrong[:5], sep="\n", flush=True)
    if args.output is not None:
        row = Row(f"soak on {args.device}", {"device": args.device, "method": args.method}, found)
        command = f"python -m benchmarks.soak {' '.join(sys.argv[1:])}"
        kind = llm.engine.runner.slots.device.type
        write(collect(f"soak_{kind}", command, options, [row]), args.output)
    short = found["seconds"] < 60 * args.minutes or found["requests"] < args.requests
    lost = found["blocks_missing"] or found["unexplained"] or found["gpu_mib_grown"] > 1
    return int(bool(short or lost))


if __name__ == "__main__":
    sys.exit(main())
