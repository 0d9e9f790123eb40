"""The statistical laws of sampling and verification on one backend: the full matrix, recorded.

    python -m benchmarks.law --backend triton --device cuda --out benchmarks/results/law.json

Runs without pytest what `make law` runs with it (the cases are those of `tests/support`): the joint
law of every combination of rule, K, q, filter, noise and draft dtype, acceptance against exact
enumeration, large vocabularies, ties, nearly uniform rows and tails, the synthetic rates, and every
mutant, which must be rejected. Each number that a law bounds is one row of the results file. Ends
with exit status 1 if a law is broken.

The laws are shared out to `--jobs` processes: on a GPU most of the time is spent on compilation.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import CODE, whole_commit
from foretoken.lab.results import Row, collect, write
from foretoken.ops import BACKENDS, Backend, Rule, get_backend
from tests.support import law_accept, law_noise, law_synthetic
from tests.support.law import CORRECT_P, MUTANT_P, TRIALS
from tests.support.law_cases import Case, Finding, check_case, extra_cases, matrix, pairwise
from tests.support.law_model import Setting
from tests.support.law_mutant_cases import (
    READ_RULES,
    Mutant,
    check_mutant,
    mutants,
    rule_mutants,
)
from tests.support.law_rounds import several_rounds

NOISE = {
    "fp32": Setting(),
    "fp64": Setting(fp64_noise=True),
    "flat": Setting(rule=Rule.COUPLED),
}
Law = Callable[[Backend, torch.device, int], list[Finding]]
"""(backend, device, trials) -> what was found."""


def vocabularies(backend: Backend, device: torch.device, trials: int) -> list[Finding]:
    """Ties, rows with whole blocks masked, and vocabularies of all sizes."""
    findings = law_noise.ties(backend, device, trials)
    findings += law_noise.masked_blocks(backend, device, 20_000)
    for vocabulary in law_noise.VOCABULARIES:
        rows = max(100, min(5000, 2**24 // vocabulary)) if device.type == "cpu" else 20_000
        findings += law_noise.vocabulary_law(backend, device, vocabulary, rows)
    return findings


def noise(backend: Backend, device: torch.device, name: str) -> list[Finding]:
    """Nearly uniform rows and tails; on a GPU with the draws of the goal.

    A CPU takes 0.3 ns per logit, 20 per token of flat noise: fewer draws, smaller vocabularies.
    """
    gpu = device.type == "cuda"
    draw = law_noise.sampler(backend, NOISE[name])
    vocabulary, draws = (200_000, 400_000) if gpu else (10_000, 20_000)
    if gpu and name == "fp32":
        draws = 4_000_000
    findings = law_noise.near_uniform(draw, device, vocabulary, draws, f"near_uniform-{name}")
    for vocabulary in (1024, 200_000) if gpu else (1024,):
        draws = (32 if gpu else 1) * 2**31 // vocabulary
        if gpu or name == "fp32":
            findings += law_noise.tail(draw, device, vocabulary, draws, f"tail-{name}")
    return findings


def synthetic(backend: Backend, device: torch.device, trials: int) -> list[Finding]:
    """Rates per position, mean rates through the solver, rejections at T = 0."""
    return [
        *law_synthetic.per_position(backend, device),
        *law_synthetic.mean_rates(backend, device),
        *law_synthetic.greedy_rejections(backend, device),
    ]


LAWS: dict[str, Law] = {
    "several_rounds": lambda backend, device, _: several_rounds(backend, device),
    "mean_accepted": law_accept.mean_accepted,
    "overlap": law_accept.overlap,
    "always_and_never": law_accept.always_and_never,
    "nucleus": law_accept.outside_the_nucleus,
    "ends_of_u": lambda backend, device, _: law_accept.ends_of_u(backend, device),
    "vocabularies": vocabularies,
    **{f"noise-{name}": lambda *on, name=name: noise(*on[:2], name) for name in NOISE},
    "synthetic": synthetic,
}


class Task(NamedTuple):
    """One law, or one case of the joint law or one mutant by its number."""

    law: str
    number: int
    backend: str
    device: torch.device
    trials: int


def tasks(options: argparse.Namespace) -> list[Task]:
    """All there is to check: the longest first, the rest of the full matrix last."""
    on = (options.backend, options.device, options.trials)
    cases, broken = joint_cases(options.quick), mutants_of(options.backend)
    found = [Task(law, 0, *on) for law in reversed(LAWS)]
    if options.device.type == "cuda":  # 10 GB
        found.insert(0, Task("far_rows", 0, *on))
    found += [Task("mutants", i, *on) for i in range(len(broken))]
    joint = "joint_quick" if options.quick else "joint"
    return [*found, *(Task(joint, i, *on) for i in range(len(cases)))]


@cache
def joint_cases(quick: bool) -> list[Case]:
    """Of the joint law; those of a quick run first."""
    few = [*pairwise(matrix()), *extra_cases()]
    return few if quick else [*few, *(case for case in matrix() if case not in few)]


def mutants_of(backend: str) -> list[Mutant]:
    """That a backend can be broken by."""
    return [*mutants(), *(rule_mutants() if backend in READ_RULES else ())]


def findings(task: Task) -> list[Finding]:
    """What one task finds; runs in a process of its own."""
    torch.set_num_threads(1)
    backend = get_backend(task.backend)
    if task.law == "mutants":
        mutant = mutants_of(task.backend)[task.number]
        return [check_mutant(mutant, backend, task.device)]
    if task.law.startswith("joint"):
        case = joint_cases(task.law == "joint_quick")[task.number]
        return check_case(case, backend, task.device, task.trials)
    if task.law == "far_rows":
        return law_noise.far_rows(backend, task.device)
    return LAWS[task.law](backend, task.device, task.trials)


def row(law: str, finding: Finding, backend: str, device: torch.device) -> Row:
    """One line of the results file."""
    law = law.removesuffix("_quick")
    labels = {"law": law, "statistic": finding.statistic, "backend": backend, "device": device.type}
    labels |= {"low": str(finding.low), "high": str(finding.high), "passed": finding.passed}
    values = {finding.statistic: finding.value, "trials": finding.trials}
    return Row(f"{finding.case}: {finding.statistic}", labels, values)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument(
        "--backend", default="triton" if gpu else "native", choices=sorted(BACKENDS)
    )
    parser.add_argument("--device", default="cuda" if gpu else "cpu", type=torch.device)
    parser.add_argument("--trials", default=TRIALS, type=int, help="of one case of the joint law")
    parser.add_argument("--jobs", default=os.cpu_count() or 1, type=int, help="processes")
    parser.add_argument("--quick", action="store_true", help="the pairwise selection alone")
    parser.add_argument("--commit", type=whole_commit, help="of this code, without its repository")
    parser.add_argument("--out", type=Path, help="default: law.json, or law_gpu.json, of results")
    options = parser.parse_args()
    name = "law_gpu" if options.device.type == "cuda" else "law"
    options.out = options.out or Path(f"benchmarks/results/{name}.json")
    return options


def main() -> None:
    options = parse()
    start = time.perf_counter()
    found: dict[Task, list[Finding]] = {task: [] for task in tasks(options)}
    broken, said = 0, ""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        running = {pool.submit(findings, task): task for task in found}
        for number, done in enumerate(as_completed(running), 1):
            task = running[done]
            try:
                found[task] = done.result()
            except Exception as error:  # the other laws are recorded all the same
                traceback.print_exception(error)
                found[task] = [Finding(f"{task.law} {task.number}", "error", math.nan, 0, 0, 0)]
            broken += sum(not finding.passed for finding in found[task])
            for finding in found[task]:
                if not finding.passed:
                    print(f"BROKEN  {finding}", flush=True)
            if number % 20 == 0 or number == len(running):
                took = time.perf_counter() - start
                print(f"{took:6.1f} s  {number} of {len(running)}: {task.law}", flush=True)
                said = save(options, found, took, len(running) - number)
    print(said)
    sys.exit(bool(broken))


def save(
    options: argparse.Namespace, found: dict[Task, list[Finding]], took: float, left: int
) -> str:
    """Write what there is, now and then: a run that is cut short keeps it, and says so."""
    rows = [
        row(task.law, finding, options.backend, options.device)
        for task in found
        for finding in found[task]
    ]
    broken = sum(not finding.passed for each in found.values() for finding in each)
    shapes = {"backend": options.backend, "device": str(options.device), "trials": options.trials}
    shapes |= {"jobs": options.jobs}
    shapes |= {"matrix": "pairwise" if options.quick else "full", "seconds": round(took, 1)}
    notes = [
        f"{len(rows)} numbers, {broken} outside their bounds, in {took:.0f} s.",
        f"Passes: p > {CORRECT_P:g}; of a mutant, p < {MUTANT_P:g}.",
    ]
    notes += [f"Cut short: {left} of {len(found)} tasks are missing."] if left else []
    code = (options.commit, False) if options.commit else CODE
    command = shlex.join(["python", "-m", "benchmarks.law", *sys.argv[1:]])
    path = write(collect(options.out.stem, command, shapes, rows, notes, code), options.out.parent)
    return f"{notes[0]} Wrote {path}"


if __name__ == "__main__":
    main()
