"""Does synthetic acceptance take the time of real acceptance, where as many drafts are accepted?

The target drafts for itself, so that its drafts are all accepted (except where one row and K + 1
round differently: at T=0 at any near-tie in a half type), and synthetic acceptance has rates of
one. Both rules take turns in one engine, on the same prompts.

    python -m benchmarks.synthetic --device cuda --output benchmarks/results
    python -m benchmarks.synthetic --device cpu --model tiny-python --batch-size 1,4
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.common import goal
from benchmarks.start import TARGET
from foretoken import SamplingParams
from foretoken.config import SpeculativeConfig
from foretoken.lab.bench.figures import UNITS
from foretoken.lab.bench.offline import Engines
from foretoken.lab.bench.options import BenchOptions, engine_cases, parse_sweep
from foretoken.lab.bench.run import Bench
from foretoken.lab.results import Row, Spread, collect, write

K = 4
RULES = ("standard", "synthetic")
SHOWN = ("step_ms", "decode_ms_per_token", "tokens_per_step", "verify_ms", "draft_ms", "target_ms")
MOST = 0.02  # of a step, apart


def rows(bench: Bench) -> list[Row]:
    """Both rules under each load and temperature."""
    cases = {(case.labels["temperature"], case.labels["rule"]): case for case in bench.groups[0]}
    made = []
    for load in bench.options.loads:
        for temperature in dict.fromkeys(t for t, _ in cases):
            keys = [(load, cases[temperature, rule]) for rule in RULES]
            if not bench.measured.keys() >= {*keys}:
                continue
            found = {
                rule: bench.measured[key].repeats for rule, key in zip(RULES, keys, strict=True)
            }
            values: dict[str, Any] = {
                f"{rule}_{name}": Spread.of([figure[name] for figure in found[rule]], UNITS[name])
                for rule in RULES
                for name in SHOWN
            }
            pairs = list(zip(*found.values(), strict=False))  # the last turn may have been cut
            for name in ("step_ms", "decode_ms_per_token"):
                ratios = [synthetic[name] / real[name] for real, synthetic in pairs]
                values[f"{name}_ratio"] = Spread.of(ratios, "synthetic / real")
            values["really_accepted"] = statistics.fmean(
                real["acceptance_rate"] for real, _ in pairs
            )
            labels = {"batch": load.concurrency, "temperature": temperature}
            made.append(Row(f"batch {load.concurrency}, T={temperature:g}", labels, values))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=str(TARGET))
    parser.add_argument("--batch-size", default="1,8,64")
    parser.add_argument("--temperatures", default="0.8,0")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so many")
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    sweep = (f"rule={','.join(RULES)}", f"temperature={args.temperatures}")
    options = BenchOptions(
        concurrency=args.batch_size, num_requests=args.batch_size, input_len="256",
        output_len="160", repeats=args.repeats, prompts="random", sweep=sweep, compare=False,
    )  # fmt: skip
    engine: dict[str, Any] = {"device": args.device, "enable_prefix_caching": False}
    if args.model == str(TARGET):
        engine |= {"load_format": "dummy", "dtype": "bfloat16"}
    engine["max_model_len"] = 256 + 160
    engine["speculative_config"] = {
        "method": "draft_model", "model": args.model, "num_speculative_tokens": K,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0] * K,
    }  # fmt: skip
    speculation = SpeculativeConfig.parse(engine["speculative_config"])
    cases = engine_cases(parse_sweep(sweep), 0.0, speculation, compare=False)
    made = Engines({"model": args.model, **options.sized(engine)}, SamplingParams(), 1000.0)
    bench = Bench(options, made, cases)
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(bench.run(lambda done, what: None), args.seconds))
    found = rows(bench)
    for row in found:
        medians = {
            name: round(value.median if isinstance(value, Spread) else value, 4)
            for name, value in row.values.items()
        }
        print(row.case, medians, flush=True)
    what = "synthetic step to real"
    notes = [
        goal(f"{row.case}: {what}", row, "step_ms_ratio", bound, least)
        for row in found
        for bound, least in ((1 + MOST, False), (1 - MOST, True))
    ]
    if args.output is not None:
        command = f"python -m benchmarks.synthetic {' '.join(sys.argv[1:])}"
        shapes = {**engine, "input_len": 256, "output_len": 160}
        write(collect(f"synthetic_{args.device}", command, shapes, found, notes), args.output)
    return int(not (notes and all(note.endswith(": reached.") for note in notes)))


if __name__ == "__main__":
    sys.exit(main())
