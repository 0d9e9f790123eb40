"""Mixed requests through an engine that runs ahead, for as long as asked; nothing is lost or left.

Random lengths, temperatures, rules, K, edits, stop strings and samples; a pool too small for what
runs, prefixes that are shared, aborts at random moments. Each request is one of some hundreds.
Several processes find their samples before, one request at a time, in an engine on the host, and
outputs that differ are counted. Logits of one row differ by rounding with the device and with the
other requests of the batch, so that a token may part at a near-tie, and nowhere else
(`near_ties.py`); in the native decoder they do not, and none may part.

    python -m tests.long.soak --minutes 30                    # make soak
    python -m tests.long.soak --device cuda --minutes 8 --requests 20000 --alone 15 --limit 560
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.near_ties import PAIR, Ids, Parted, unexplained
from foretoken import LLM, SamplingParams
from foretoken.engine import build
from foretoken.engine.boundary import build_output
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestGroup
from foretoken.lab.results import Row, collect, write
from foretoken.lab.workloads import heldout
from foretoken.models import load_tokenizer, resolve_checkpoint

NUM_DISTINCT, LEAST_DISTINCT = 300, 100
MOST_PROCESSES = 12
CHECK_EVERY = 50  # steps between two checks of every block and slot
PAUSES = [0, 20, 40, 100]  # steps between two waves; in the longest many end, size after size
ABORTED = 0.001  # of those there are, in a step
MOST_PARTED = 100  # samples that are looked into; more would be a bug, and take long
TO_START = 60  # seconds, at most, until a process serves single requests
LOOK_EVERY = 8  # seconds
TO_END = 20  # seconds that are left for this and for who still runs
LEAST_STEADY = 0.1  # of the time
MOST_GROWN = {"resident_mib_grown": 64, "gpu_mib_grown": 1}
PROMISED = (
    "preemptions", "aborted", "cached_tokens", "accepted", "resampled", "edited", "stopped",
    "with_logprobs", "with_prompt_logprobs",
)  # fmt: skip
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
    """A request, its samples when it is served alone, and its parameters with the engine's K."""

    def __init__(self, prompts: list[Ids], rng: random.Random, *, on_host: bool) -> None:
        start = rng.choice(prompts)
        self.prompt = start[: rng.randint(1, min(len(start), 100))]
        self.params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]), seed=rng.randrange(2**31),
            max_tokens=rng.randint(2, 48), n=rng.choice([1, 1, 1, 2]),
            num_speculative_tokens=rng.choice([None, None, 0, 1, 2]),
            rejection_sample_method=rng.choice(RULES), **rng.choice(EDITS),
        )  # fmt: skip
        self.served = self.params
        if self.params.edits_logits and not on_host:  # edits need tokens that the host has seen
            self.served = replace(self.params, num_speculative_tokens=0)
        self.alone: list[Ids] = []

    def run(self, engine: Engine) -> None:
        group = engine.add("alone", self.prompt, self.served)
        while not group.finished:
            engine.step()
        if group.error is not None:
            raise group.error
        self.alone = [sample.token_ids for sample in build_output(engine, group).outputs]


class Crowd:
    def __init__(self, engine: Engine, known: list[Known], rng: random.Random, most: int) -> None:
        self.engine, self.known, self.rng, self.most = engine, known, rng, most
        # Those of seldom rules share all their kernels and graphs: each kind takes a second.
        self.alike = [one for one in known if one.params.rejection_sample_method in RULES[2:]]
        self.running: dict[RequestGroup, Known] = {}
        self.found: Counter[str] = Counter()
        self.parted: list[Parted] = []
        self.pause = 0

    def step(self) -> None:
        found, self.pause = self.found, self.pause - 1
        if self.pause < 0 or not self.engine.has_work:
            self.pause = self.rng.choice(PAUSES)
            # The pool keeps a block per request free: only if all grow alike is that too few.
            among = self.rng.choice([self.known, self.known, [self.rng.choice(self.alike)]])
            room = self.most - len(self.engine.scheduler.waiting)
            for _ in range(min(self.rng.randint(1, self.most), room)):
                found["requests"] += 1
                known = self.rng.choice(among)
                group = self.engine.add(str(found["requests"]), known.prompt, known.params)
                self.running[group] = known
        if self.rng.random() < ABORTED * len(self.running):
            self.engine.abort(self.rng.choice(list(self.running)))
        self.engine.step()
        found["steps"] += 1
        if found["steps"] % CHECK_EVERY == 0:
            self.engine.check_integrity()
        for group in [group for group in self.running if group.finished]:
            self._take(group, self.running.pop(group))

    def drain(self) -> None:
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
        output = build_output(self.engine, group)
        found["with_prompt_logprobs"] += bool(output.prompt_logprobs)
        for got, alone in zip(output.outputs, known.alone, strict=True):
            found["samples"] += 1
            found["tokens"] += len(got.token_ids)
            found["resampled"] += got.origins.count("resampled")
            found["edited"] += known.params.edits_logits
            found["with_logprobs"] += bool(got.logprobs)
            found["stopped"] += got.finish_reason == "stop"
            aborted = got.finish_reason == "abort"
            found["aborted"] += aborted
            alone = alone[: len(got.token_ids)] if aborted else alone
            if parted := Parted.of(known.prompt, known.served, got.index, got.token_ids, alone):
                self.parted.append(parted)


class Memory:
    """What memory grows by, in MiB, seen while nothing runs, from a quarter of the time on.

    What CUDA graphs and kernels take is no growth: stretches in which one was made do not count.

    on_host, on_gpu: growth of the process, and of what PyTorch holds on the GPU
    steady: seconds of the stretches that count
    """

    def __init__(self, engine: Engine, limit: float) -> None:
        self.engine, self.limit, self.looked = engine, limit, 0.0
        self.on_host = self.on_gpu = self.steady = 0.0
        self.held = self._now()

    def look(self, seconds: float) -> None:
        made, host, gpu = self.held
        self.held = self._now()
        if self.held[0] == made and self.looked >= self.limit / 4:
            self.on_host += self.held[1] - host
            self.on_gpu += self.held[2] - gpu
            self.steady += seconds - self.looked
        self.looked = seconds

    def _now(self) -> tuple[int, float, float]:
        """CUDA graphs and kernels made so far; MiB of the process, and of PyTorch on the GPU."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        made, on_gpu = 0, 0.0
        if self.engine.runner.slots.device.type != "cpu":
            from foretoken.ops.backends.triton import compiled

            made = len(self.engine.runner.graphs._captured) + len(compiled._kernels)
            on_gpu = torch.cuda.memory_allocated() / 2**20
        return made, pages * 4096 / 2**20, on_gpu


def learn(known: list[Known], speculation: Any, options: Any, seconds: float) -> list[Known]:
    """Serve one request at a time in an engine of this process, as many as there is time for."""
    with LLM(PAIR[0], speculation, **options, device="cpu", threads=1) as llm:
        start = time.perf_counter()
        for number, one in enumerate(known):
            if time.perf_counter() - start > seconds:
                return known[:number]
            one.run(llm.engine)
    return known


def soak(crowd: Crowd, args: argparse.Namespace, end: float) -> dict[str, float]:
    pool, start, limit = crowd.engine.scheduler.pool, time.perf_counter(), 60 * args.minutes
    memory, now, told = Memory(crowd.engine, limit), start, start
    if end - TO_END - start < limit:
        sys.exit(f"Only {end - start:.0f} s of --limit are left for {limit:.0f} s of crowd.")
    while now - start < limit or (now < end - TO_END and crowd.found["requests"] < args.requests):
        crowd.step()
        now = time.perf_counter()
        if now - told >= LOOK_EVERY:
            told = now
            crowd.drain()
            memory.look(now - start)
            made, host, gpu = memory.held
            held = f"{host:.1f} MiB, GPU {gpu:.2f}, {made} made"
            print(f"{now - start:6.0f} s", held, dict(crowd.found), flush=True)
    crowd.drain()
    memory.look(now - start)
    return {
        "seconds": round(now - start, 1),
        "resident_mib_grown": round(memory.on_host, 1),
        "gpu_mib_grown": round(memory.on_gpu, 2),
        "steady_seconds": round(memory.steady, 1),
        "made": memory.held[0],
        "blocks_missing": pool.num_blocks - pool.num_free,
        "distinct": len(crowd.known),
        "different": len(crowd.parted),
    }


def failures(found: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Promised events that did not happen, and bounds that were exceeded."""
    least = {"seconds": 60 * args.minutes, "requests": args.requests, "distinct": LEAST_DISTINCT}
    least |= dict.fromkeys(PROMISED, 1) | {"steady_seconds": 60 * args.minutes * LEAST_STEADY}
    most = {"blocks_missing": 0, "unexplained": 0, **MOST_GROWN}
    return [
        f"{name} is {found.get(name, 0)}, not at {word} {bound}"
        for word, bounds in (("least", least), ("most", most))
        for name, bound in bounds.items()
        if (found.get(name, 0) - bound) * (1 if word == "most" else -1) > 0
    ]


def main() -> int:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the crowd")
    parser.add_argument("--requests", type=int, default=0, help="at least so many")
    parser.add_argument("--alone", type=float, default=1e9, help="seconds for requests alone")
    parser.add_argument("--seqs", type=int, default=0, help="at once; 0: 8, on a GPU 96")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--num-blocks", type=int, default=0, help="of the pool; 0: too few")
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    rng, on_host = random.Random("soak"), build.is_on_host(torch.device(args.device))
    seqs = args.seqs or (96 if args.device != "cpu" else 8)
    options: dict[str, Any] = {
        "max_num_seqs": seqs, "max_model_len": 256, "max_num_batched_tokens": 512 + 5 * seqs,
        "block_size": 16, "num_blocks": args.num_blocks or 2 * seqs + 8, "dtype": "float32",
        "async_scheduling": True,
    }  # fmt: skip
    speculation = {"method": args.method, "num_speculative_tokens": 4}
    tokenizer = load_tokenizer(resolve_checkpoint(PAIR[0]))
    prompts = [tokenizer.encode(item.prompt) for item in heldout(40)]
    known = [Known(prompts, rng, on_host=on_host) for _ in range(NUM_DISTINCT)]
    count = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        shares = [(known[i::count], speculation, options, args.alone) for i in range(count)]
        learning = pool.starmap_async(learn, shares)
        llm = LLM(PAIR[0], speculation, device=args.device, **options)
        known = [one for share in learning.get(args.alone + TO_START) for one in share]
    took = time.perf_counter() - start
    print(f"{took:.1f} s: the engine, and {len(known)} requests alone", flush=True)
    crowd = Crowd(llm.engine, known, rng, 2 * seqs)
    found: dict[str, Any] = soak(crowd, args, start + args.limit) | crowd.found
    print(json.dumps(found), flush=True)
    looked_into = crowd.parted[:MOST_PARTED]
    wrong = unexplained(looked_into, speculation)
    found["near_ties"] = len(looked_into) - len(wrong)
    found["unexplained"] = len(crowd.parted) - found["near_ties"]
    print(json.dumps(found), *wrong[:5], sep="\n", flush=True)
    if args.output is not None:
        row = Row(f"soak on {args.device}", {"device": args.device, "method": args.method}, found)
        command = f"python -m tests.long.soak {' '.join(sys.argv[1:])}"
        kind = llm.engine.runner.slots.device.type
        write(collect(f"soak_{kind}", command, options, [row]), args.output)
    failed = failures(found, args)
    print(*failed, sep="\n", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
