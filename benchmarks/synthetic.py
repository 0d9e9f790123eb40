"""Does synthetic acceptance take the time of real acceptance, where as many drafts are accepted?

The target drafts for itself, so that its drafts are all accepted (except where one row and K + 1
round differently: at T=0 at any near-tie in a half type), and synthetic acceptance has rates of
one. Both rules take turns in one engine, on the same prompts.

    python -m benchmarks.synthetic --device cuda --output benchmarks/results
    python -m benchmarks.synthetic --device cpu --model tiny-python --batch-size 1,4
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.start import TARGET
from foretoken import LLM, SamplingParams
from foretoken.lab.bench.figures import UNITS, figures
from foretoken.lab.bench.floor import Floor
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.bench.run import run_batch
from foretoken.lab.bench.workload import Workload
from foretoken.lab.results import Row, Spread, collect, write

K = 4
RULES = ("standard", "synthetic")
SHOWN = ("step_ms", "decode_ms_per_token", "tokens_per_step", "verify_ms", "draft_ms", "target_ms")
MOST = 0.02  # of a step, apart


def measure(llm: LLM, options: BenchOptions, batch: int, temperature: float) -> Row:
    """Both rules at one batch size, in turns."""
    workload = Workload(options, SamplingParams(temperature=temperature), llm.engine)
    floor = Floor.of(llm.engine, 1000.0)
    found: dict[str, list[dict[str, float]]] = {rule: [] for rule in RULES}
    for repeat in range(options.warmup + options.repeats):
        for rule in RULES[:: -1 if repeat % 2 else 1]:
            asked = workload.params(batch, repeat, None)
            params = [replace(p, rejection_sample_method=rule) for p in asked]
            run = run_batch(llm, workload.prompts(batch, repeat), params)
            if repeat >= options.warmup:
                found[rule].append(figures(run, floor))
    values: dict[str, Any] = {
        f"{rule}_{name}": Spread.of([figure[name] for figure in found[rule]], UNITS[name])
        for rule in RULES
        for name in SHOWN
    }
    pairs = list(zip(*found.values(), strict=True))
    for name in ("step_ms", "decode_ms_per_token"):
        ratios = [synthetic[name] / real[name] for real, synthetic in pairs]
        values[f"{name}_ratio"] = Spread.of(ratios, "synthetic / real")
    accepted = [real["acceptance_rate"] for real, _ in pairs]
    values["really_accepted"] = statistics.fmean(accepted)
    case = f"batch {batch}, T={temperature:g}"
    return Row(case, {"batch": batch, "temperature": temperature}, values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=str(TARGET))
    parser.add_argument("--batch-size", default="1,8,64")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 0.0])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args, start = parser.parse_args(), time.perf_counter()
    options = BenchOptions(args.batch_size, 256, 160, args.repeats)
    engine: dict[str, Any] = {"device": args.device, "enable_prefix_caching": False}
    if args.model == str(TARGET):
        engine |= {"load_format": "dummy", "dtype": "bfloat16"}
    engine["max_model_len"] = options.input_len + options.output_len
    engine["speculative_config"] = {
        "method": "draft_model", "model": args.model, "num_speculative_tokens": K,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0] * K,
    }  # fmt: skip
    llm, rows = LLM(args.model, **options.sized(engine)), []
    for temperature, batch in itertools.product(args.temperatures, options.batch_sizes):
        if not rows or time.perf_counter() - start < args.seconds:
            rows.append(measure(llm, options, batch, temperature))
            medians = {
                name: round(value.median if isinstance(value, Spread) else value, 4)
                for name, value in rows[-1].values.items()
            }
            print(rows[-1].case, medians, flush=True)
    if args.output is not None:
        command = f"python -m benchmarks.synthetic {' '.join(sys.argv[1:])}"
        shapes = {**engine, "input_len": options.input_len, "output_len": options.output_len}
        write(collect(f"synthetic_{args.device}", command, shapes, rows), args.output)
    medians = [row.values["step_ms_ratio"].median for row in rows]  # type: ignore[union-attr]
    return int(any(abs(ratio - 1) > MOST for ratio in medians))


if __name__ == "__main__":
    sys.exit(main())
