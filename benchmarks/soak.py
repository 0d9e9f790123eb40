"""Mixed requests through an engine that runs ahead, for as long as asked; nothing is lost or left.

Random lengths, temperatures, rules, K, edits, stop strings and samples; a pool too small for what
runs, prefixes that are shared, aborts at random moments. Each request is one of some hundreds whose
samples are known from the same engine, alone: outputs that differ are counted. Logits of one row
differ by rounding with what else is in the batch; in the native decoder they do not, and none may
part.

    python -m benchmarks.soak --minutes 30                    # make soak
    python -m benchmarks.soak --device cuda --minutes 8 --requests 20000
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from foretoken import LLM, SamplingParams
from foretoken.engine.boundary import build_output
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestGroup
from foretoken.lab.results import Row, collect, write
from foretoken.lab.workloads import heldout

NUM_DISTINCT = 300
CHECK_EVERY = 50  # steps between two checks of every block and slot
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
        for request, got, alone in zip(
            group.samples, outputs(self.engine, group), known.alone, strict=True
        ):
            found["samples"] += 1
            found["tokens"] += len(got)
            aborted = request.finish_reason == "abort"
            found["aborted"] += aborted
            found["different"] += got != (alone[: len(got)] if aborted else alone)


def memory(device: torch.device) -> dict[str, float]:
    """MiB that the process holds, and what PyTorch has allocated on the GPU."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    on_gpu = torch.cuda.memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    return {"resident": pages * 4096 / 2**20, "gpu": on_gpu}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--requests", type=int, default=0, help="at least so many")
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--num-blocks", type=int, default=0, help="of the pool; 0: too few")
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    rng = random.Random("soak")
    seqs = 32 if args.device != "cpu" else 8
    options: dict[str, Any] = {
        "max_num_seqs": seqs, "max_model_len": 256, "max_num_batched_tokens": 512,
        "block_size": 16, "num_blocks": args.num_blocks or 3 * seqs, "dtype": "float32",
    }  # fmt: skip
    speculation = {"method": args.method, "num_speculative_tokens": 4}
    llm = LLM("tiny-python", speculation, device=args.device, async_scheduling=True, **options)
    engine, tokenizer = llm.engine, llm.get_tokenizer()
    prompts = [tokenizer.encode(p.prompt) for p in heldout(40)]
    start, device = time.perf_counter(), engine.runner.slots.device
    known = [Known(engine, prompts, rng) for _ in range(NUM_DISTINCT)]
    print(f"{time.perf_counter() - start:6.0f} s: {len(known)} requests alone", flush=True)
    crowd, before, told = Crowd(engine, known, rng, 2 * seqs), memory(device), 0.0
    while (seconds := time.perf_counter() - start) < 60 * args.minutes or (
        crowd.found["requests"] < args.requests
    ):
        crowd.step()
        if told < 15 * args.minutes <= seconds:
            before = memory(device)
        if seconds >= told:
            told = seconds + 30
            print(f"{seconds:6.0f} s", dict(crowd.found), flush=True)
    crowd.drain()
    after = memory(device)
    found = dict(crowd.found) | {
        "seconds": round(time.perf_counter() - start, 1),
        "resident_mib_grown": round(after["resident"] - before["resident"], 1),
        "gpu_mib_grown": round(after["gpu"] - before["gpu"], 2),
        "blocks_missing": engine.scheduler.pool.num_blocks - engine.scheduler.pool.num_free,
    }
    print(json.dumps(found, indent=1), flush=True)
    if args.output is not None:
        row = Row(f"soak on {args.device}", {"device": args.device, "method": args.method}, found)
        command = f"python -m benchmarks.soak {' '.join(sys.argv[1:])}"
        shapes = {**options, "num_distinct": NUM_DISTINCT}
        write(collect(f"soak_{device.type}", command, shapes, [row]), args.output)
    lost = crowd.found["samples"] == 0 or found["blocks_missing"] or found["gpu_mib_grown"] > 1
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
