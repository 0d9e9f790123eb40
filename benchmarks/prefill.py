"""How long 64 prompts of 1024 tokens take to their first tokens, by tokens of a step, and where.

An 8B shape with random weights on a GPU; nothing decodes beside. Kernels are those of a quarter of
the prompts, under PyTorch's profiler.

    python -m benchmarks.prefill --output benchmarks/results
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.common import goal
from benchmarks.start import TARGET
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread, collect, write

PROMPTS, LENGTH, KERNELS = 64, 1024, 8
BOUND = 1.49  # s


def compute(llm: LLM, rng: random.Random, count: int) -> float:
    """Seconds until so many prompts have their first token."""
    ids = [[rng.randrange(5, 4000) for _ in range(LENGTH)] for _ in range(count)]
    prompts = [{"prompt_token_ids": prompt} for prompt in ids]
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    return time.perf_counter() - start


def kernels(llm: LLM, rng: random.Random) -> dict[str, Any]:
    """Shares of the GPU's time, largest first, by the names of kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        compute(llm, rng, PROMPTS // 4)
    seconds = {one.key: one.self_device_time_total for one in found.key_averages()}
    most = sorted(seconds.items(), key=lambda pair: -pair[1])[:KERNELS]
    return {name: us / sum(seconds.values()) for name, us in most}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TARGET))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    rng, rows = random.Random(0), list[Row]()
    options: dict[str, Any] = {
        "load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_model_len": 2048,
        "max_num_seqs": PROMPTS, "enable_prefix_caching": False,
    }  # fmt: skip
    for tokens in args.tokens:
        with LLM(args.model, None, max_num_batched_tokens=tokens, **options) as llm:
            compute(llm, rng, PROMPTS)
            seconds = [compute(llm, rng, PROMPTS) for _ in range(args.repeats)]
            values: dict[str, Any] = {"seconds": Spread.of(seconds, "s to the last first token")}
            rows.append(Row(f"{tokens} tokens a step", {"tokens": tokens}, values))
            print(rows[-1].case, [round(s, 4) for s in seconds], flush=True)
            if tokens == args.tokens[0]:
                shares = kernels(llm, rng)
                rows.append(Row(f"{tokens} tokens a step: kernels", {"tokens": tokens}, shares))
    timed = [row for row in rows if "seconds" in row.values]
    what = f"s to the last first token of {PROMPTS} x {LENGTH}"
    notes = [goal(f"{row.case}: {what}", row, "seconds", BOUND, False) for row in timed]
    print(*notes, sep="\n")
    if args.output is not None:
        command = f"python -m benchmarks.prefill {' '.join(sys.argv[1:])}"
        shapes = {**options, "model": args.model, "prompts": PROMPTS, "length": LENGTH}
        write(collect("gpu_prefill", command, shapes, rows, notes), args.output)
    return int(not any(note.endswith(": reached.") for note in notes))


if __name__ == "__main__":
    sys.exit(main())
