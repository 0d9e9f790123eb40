"""Predictions of `foretoken plan` against the real engine under synthetic acceptance.

The embedded pair, one thread. The time is that of the process, which on a shared machine leaves out
what others do on its core. Steps are timed in one engine, under one acceptance rate, before and
after engines of several rates serve requests in turns; the simulation predicts them all from that
one profile.

    python -m benchmarks.plan

With `--wall 1` a few of these by wall time, on all threads and by one simulation, as `foretoken
plan` does; but with steps timed before each repeat and medians of both, so that what disturbs the
machine disturbs both. And how long a million requests of a fleet take to model.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import product
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.common import TARGET, arguments, goal, record
from foretoken import LLM, SamplingParams
from foretoken.lab.plan.calibrate import Calibration, Clock, EngineRun
from foretoken.lab.plan.command import figures
from foretoken.lab.plan.profile import Profile
from foretoken.lab.plan.simulate import Fleet, RequestSpec, Simulation
from foretoken.lab.results import Label, Row, Spread
from foretoken.sampling.synthetic import conditional_rates, joint_rates

RATES, DRAFTS, SIZES = (0.3, 0.6, 0.9), (0, 2, 5), (1, 4, 16)
INPUT, OUTPUT = 96, 48
MOST = max(DRAFTS)
PARAMS = SamplingParams(temperature=0.8)
UNITS = {
    "output_tokens_per_second": "tokens/s",
    "tpot_ms": "ms per token of a request",
    "ttft_ms": "ms",
}
GOALS = {"output_tokens_per_second": (0.10, 0.20), "tpot_ms": (0.10, 0.20), "ttft_ms": (0.20, None)}
"""Mean and largest error, without sign."""
Case = tuple[float, int, int]


def engine(rate: float, threads: int | None = 1, *, ahead: bool | None = None) -> LLM:
    """Whose drafts are accepted at this rate; `ahead`: whether it launches steps ahead."""
    speculation = {
        "method": "draft_model", "num_speculative_tokens": MOST,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_rate": rate,
    }  # fmt: skip
    sizes = {"max_num_seqs": max(SIZES), "max_model_len": 1024, "threads": threads}
    return LLM(
        TARGET, speculation, enable_prefix_caching=False, async_scheduling=ahead, **sizes
    )  # fmt: skip


def specs(size: int) -> list[RequestSpec]:
    """Requests of a case: twice as many as are under way, and enough for chance to even out."""
    return [RequestSpec(0.0, INPUT, OUTPUT)] * max(2 * size, 10)


def measured(
    llm: LLM, drafts: int, size: int, repeat: int, clock: Clock = time.process_time
) -> dict[str, float]:
    params = SamplingParams(temperature=PARAMS.temperature, num_speculative_tokens=drafts)
    engine_run = EngineRun(llm.engine, params, size, seed=1000 + repeat, clock=clock)
    return figures(engine_run.run(specs(size)), {})


def predicted(
    profile: Profile, rate: float, drafts: int, size: int, count: int
) -> dict[str, float]:
    """Means over simulations: of 20 the engine's own chance is left."""
    joint = joint_rates(conditional_rates(MOST, synthetic_acceptance_rate=rate))
    runs = [
        figures(Simulation(profile, joint, drafts, size, seed).run(specs(size)), {})
        for seed in range(count)
    ]
    return {name: fmean(run[name] for run in runs) for name in UNITS}


def row(profile: Profile, case: Case, repeats: list[dict[str, float]], count: int = 20) -> Row:
    return compared(case, repeats, predicted(profile, *case, count))


def compared(case: Case, repeats: list[dict[str, float]], expected: dict[str, float]) -> Row:
    """What was measured of a case beside what was expected."""
    rate, drafts, size = case
    values: dict[str, Any] = {}
    for name in UNITS:
        values[name] = Spread.of([repeat[name] for repeat in repeats], UNITS[name])
        values[f"predicted_{name}"] = expected[name]
        values[f"error_{name}"] = expected[name] / values[name].median - 1
    how = f"K={drafts}, rate {rate:g}" if drafts else "plain"
    labels = {"k": drafts, "rate": rate if drafts else None, "batch": size}
    return Row(f"{how}, concurrency {size}", labels, values)


def summed(rows: list[Row]) -> tuple[Row, list[str]]:
    """Mean and largest errors, and what was asked of them."""
    values: dict[str, Any] = {}
    for name in GOALS:
        errors = [abs(float(one.values[f"error_{name}"])) for one in rows]  # type: ignore[arg-type]
        values |= {f"mean_error_{name}": fmean(errors), f"most_error_{name}": max(errors)}
    whole, notes = Row("all", {"k": None, "rate": None, "batch": None}, values), []
    for name, bounds in GOALS.items():
        for kind, bound in zip(("mean", "most"), bounds, strict=True):
            if bound is not None:
                value = f"{kind}_error_{name}"
                notes.append(
                    goal(f"prediction: {kind} error of {name}", whole, value, bound, False)
                )
    return whole, notes


def by_wall(repeats: int) -> tuple[list[Row], list[str], dict[str, Any]]:
    """Rows, notes and the profile of what the command itself does."""
    llm, clock = engine(RATES[1], None), time.perf_counter
    cases = [(RATES[1], drafts, size) for drafts in (0, MOST) for size in SIZES]
    found: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    expected: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(repeats):
        profile = Calibration(llm.engine, SIZES, PARAMS, repeats=1).run()
        for case in cases:
            found[case].append(measured(llm, case[1], case[2], repeat, clock))
            expected[case].append(predicted(profile, *case, 1))
    medians = {
        case: {name: median(run[name] for run in runs) for name in UNITS}
        for case, runs in expected.items()
    }
    rows = [compared(case, runs, medians[case]) for case, runs in found.items()]
    whole, _ = summed(rows)
    fleet, start = Fleet(profile, (), INPUT, OUTPUT), clock()
    gaps = np.random.default_rng(0).exponential(0.2, size=(1000, 1000))
    fleet.run(np.cumsum(gaps, axis=1))
    labels: dict[str, Label] = {"k": 0, "rate": None, "batch": None}
    took = {"seconds": clock() - start, "requests": gaps.size, "engines": len(gaps)}
    notes = [
        "Wall time, all threads. Medians of predictions, each of one simulation from steps that "
        "were timed right before a repeat; the profile is the last one's."
    ]
    return [*rows, whole, Row("fleet, plain", labels, took)], notes, asdict(profile)


def main() -> None:
    options = arguments(__doc__, repeats=3, calibrations=1, wall=0).parse_args()
    if options.wall:
        rows, notes, profile = by_wall(options.repeats)
        shapes = {"model": TARGET, "method": "draft_model", "most_drafts": MOST, "input_len": INPUT}
        shapes |= {"output_len": OUTPUT, "temperature": PARAMS.temperature, "profile": profile}
        options.machine = "wall"
        record("plan", options, shapes, rows, notes)
        return
    engines = {rate: engine(rate) for rate in RATES}
    middle = engines[RATES[1]].engine
    calibration = Calibration(middle, SIZES, PARAMS, options.calibrations, clock=time.process_time)
    calibration.run()
    cases = [c for c in product(RATES, DRAFTS, SIZES) if c[1] or c[0] == RATES[1]]
    found: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(options.repeats):
        for rate, drafts, size in cases:
            found[rate, drafts, size].append(measured(engines[rate], drafts, size, repeat))
        print(f"repeat {repeat} done", flush=True)
    profile = calibration.run()
    rows = [row(profile, case, repeats) for case, repeats in found.items()]
    whole, notes = summed(rows)
    notes += [
        "Seconds of the process, which computes on one thread: what others do beside is left out.",
        f"Steps were timed under a rate of {RATES[1]:g}, before and after the requests.",
        "Predictions are means of 20 simulations.",
    ]
    shapes = {
        "model": TARGET, "method": "draft_model", "most_drafts": MOST, "input_len": INPUT,
        "output_len": OUTPUT, "temperature": PARAMS.temperature, "threads": 1,
        "calibrations": options.calibrations, "repeats": options.repeats,
        "profile": {
            "batches": [*profile.batches], "drafts": [*profile.drafts],
            "rest": profile.rest, "draft": profile.draft, "context": [*profile.context],
        },
    }  # fmt: skip
    record("plan", options, shapes, [*rows, whole], notes)
    print("\n".join(notes))


if __name__ == "__main__":
    main()
