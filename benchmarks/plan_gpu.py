"""Predictions of `foretoken plan` against the real engine on a GPU: an 8B shape, an EAGLE-3 head.

Random weights under synthetic acceptance, wall time. Steps are timed in one engine under one rate
of acceptance; engines of that and of other rates then serve requests, and the simulation predicts
them all from that one profile.

    python -m benchmarks.plan_gpu
"""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import product
from statistics import fmean
from typing import Any

from benchmarks.common import arguments, record
from benchmarks.plan import UNITS, Case, compared, summed
from benchmarks.start import HEAD, TARGET
from foretoken import LLM, SamplingParams
from foretoken.lab.plan.calibrate import Calibration, EngineRun
from foretoken.lab.plan.command import figures
from foretoken.lab.plan.profile import Profile
from foretoken.lab.plan.simulate import RequestSpec, Simulation
from foretoken.sampling.synthetic import conditional_rates, joint_rates

RATES, DRAFTS, SIZES = (0.6, 0.3, 0.9), (0, 2, 4), (1, 8, 32)
MOST, INPUT, OUTPUT = max(DRAFTS), 256, 64
PARAMS = SamplingParams(temperature=0.8)
MOST_RUNS = 8


def engine(options: Any, rate: float) -> LLM:
    """Whose drafts are accepted at this rate; several fit into one GPU."""
    speculation = {
        "method": "eagle3", "model": options.head, "num_speculative_tokens": MOST,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_rate": rate,
    }  # fmt: skip
    return LLM(
        options.target, speculation, load_format="dummy", dtype=options.dtype,
        device=options.device, enable_prefix_caching=False, max_num_seqs=max(SIZES),
        max_model_len=1024, max_num_batched_tokens=8192, num_blocks=options.num_blocks,
    )  # fmt: skip


def specs(size: int) -> list[RequestSpec]:
    """Two waves of requests, three where there is one at a time."""
    return [RequestSpec(0.0, INPUT, OUTPUT)] * max(2 * size, 3)


def measured(llm: LLM, drafts: int, size: int, seed: int) -> dict[str, float]:
    params = SamplingParams(temperature=PARAMS.temperature, num_speculative_tokens=drafts)
    return figures(EngineRun(llm.engine, params, size, seed=seed).run(specs(size)), {})


def predicted(profile: Profile, case: Case) -> dict[str, float]:
    """Means over simulations: of 20 the engine's own chance is left."""
    rate, drafts, size = case
    joint = joint_rates(conditional_rates(MOST, synthetic_acceptance_rate=rate))
    runs = [
        figures(Simulation(profile, joint, drafts, size, seed).run(specs(size)), {})
        for seed in range(20)
    ]
    return {name: fmean(run[name] for run in runs) for name in UNITS}


def made(llm: LLM) -> int:
    """CUDA graphs and kernels made so far: each takes as long as many steps."""
    from foretoken.ops.backends.triton import compiled

    return len(llm.engine.runner.graphs._captured) + len(compiled._kernels)


def settled(llm: LLM, case: Case, seed: int) -> dict[str, float]:
    """What a case comes to in a run in which none is made: the first such one."""
    for repeat in range(MOST_RUNS):
        before = made(llm)
        found = measured(llm, case[1], case[2], seed + 1000 * repeat)
        if made(llm) == before:
            return found
    raise SystemExit(f"Something was compiled in each of {MOST_RUNS} runs of {case}.")


def run(options: Any) -> tuple[Profile, dict[Case, list[dict[str, float]]]]:
    """What steps take in the first engine, and what each case came to in its own."""
    start, profile = time.perf_counter(), None
    found: dict[Case, list[dict[str, float]]] = {}
    for rate in RATES:
        llm = engine(options, rate)
        profile = profile or Calibration(llm.engine, SIZES, PARAMS).run()
        cases = [(rate, k, size) for k, size in product(DRAFTS, SIZES) if k or rate == RATES[0]]
        for repeat, case in product(range(options.repeats + 1), cases):
            values = settled(llm, case, repeat)
            if repeat:  # the first warms up
                found.setdefault(case, []).append(values)
        llm.close()
        print(f"{time.perf_counter() - start:.0f} s: a rate of {rate:g}", flush=True)
    assert profile is not None
    return profile, found


def main() -> None:
    parser = arguments(__doc__, repeats=3, num_blocks=1024)
    for name, value in {"device": "cuda", "dtype": "bfloat16"}.items():
        parser.add_argument(f"--{name}", default=value)
    for name, path in {"target": TARGET, "head": HEAD}.items():
        parser.add_argument(f"--{name}", default=str(path))
    options = parser.parse_args()
    profile, found = run(options)
    rows = [compared(case, runs, predicted(profile, case)) for case, runs in found.items()]
    whole, notes = summed(rows)
    notes += [
        f"Wall time; one calibration under a rate of {RATES[0]:g}, before the requests.",
        "Predictions are means of 20 simulations.",
    ]
    shapes = {
        "model": TARGET.name, "method": "eagle3", "head": HEAD.name, "dtype": options.dtype,
        "most_drafts": MOST, "input_len": INPUT, "output_len": OUTPUT,
        "temperature": PARAMS.temperature, "repeats": options.repeats, "profile": asdict(profile),
    }  # fmt: skip
    for row in rows:
        errors = {name: value for name, value in row.values.items() if "error" in name}
        print(row.case, *(f"{name} {value:+.3f}" for name, value in errors.items()))
    print("\n".join(notes))
    record("plan_gpu", options, shapes, [*rows, whole], notes)


if __name__ == "__main__":
    main()
